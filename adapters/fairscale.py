"""FairScale: ``fairscale.nn.Pipe`` on all devices from one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters import single_process
from adapters.protocol import Capabilities, ScheduleRule, Task
from adapters.single_process import NATIVE_BALANCES, NATIVE_REASONS, SHARED_NOTES, SingleProcessPipe

__all__ = ["build", "capabilities", "native_partition"]

capabilities = Capabilities(
    distribution="fairscale",
    extra="fairscale",
    modules=("fairscale.nn",),
    ranks="one",
    stages_are="devices",
    schedules=(ScheduleRule(name="gpipe"),),
    overlap_on_cpu=False,
    recomputes_ahead=True,
    native_balances=NATIVE_BALANCES,
    reasons=NATIVE_REASONS,
    notes=(
        *SHARED_NOTES,
        "every stage but the last recomputes a micro-batch before the backward of the one before it, so two hold "
        "their activations",
    ),
)


def build(task: Task) -> SingleProcessPipe:
    """A ``Pipe`` with exactly the asked boundaries, micro-batches and checkpointing."""
    from fairscale.nn import Pipe  # type: ignore[import-untyped]

    return SingleProcessPipe(task, Pipe)


def native_partition(rule: str, options: Mapping[str, Any], task: Task) -> tuple[int, ...]:
    """What the library's own balancing routine picks."""
    from fairscale.nn.pipe import balance

    return single_process.native_partition(rule, task, balance)
