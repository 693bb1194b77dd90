"""torchgpipe: ``GPipe`` on all devices from one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters import single_process
from adapters.protocol import Capabilities, ScheduleRule, Task
from adapters.single_process import NATIVE_BALANCES, NATIVE_REASONS, SHARED_NOTES, SingleProcessPipe

__all__ = ["build", "capabilities", "native_partition"]

capabilities = Capabilities(
    distribution="torchgpipe",
    extra="torchgpipe",
    modules=("torchgpipe",),
    ranks="one",
    stages_are="devices",
    schedules=(ScheduleRule(name="gpipe"),),
    overlap_on_cpu=False,
    native_balances=NATIVE_BALANCES,
    reasons=NATIVE_REASONS,
    notes=(
        *SHARED_NOTES,
        "makes the input of micro-batches after the first require a gradient: an extra input gradient of the "
        "first convolution",
    ),
)


def build(task: Task) -> SingleProcessPipe:
    """A ``GPipe`` with exactly the asked boundaries, micro-batches and checkpointing."""
    from torchgpipe import GPipe  # type: ignore[import-untyped]

    return SingleProcessPipe(task, GPipe)


def native_partition(rule: str, options: Mapping[str, Any], task: Task) -> tuple[int, ...]:
    """What the library's own balancing routine picks."""
    from torchgpipe import balance

    return single_process.native_partition(rule, task, balance)
