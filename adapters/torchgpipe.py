"""torchgpipe: ``GPipe`` on all devices from one process."""

from __future__ import annotations

from adapters.protocol import Capabilities, ScheduleRule, Task
from adapters.single_process import SHARED_NOTES, SingleProcessPipe

__all__ = ["build", "capabilities"]

capabilities = Capabilities(
    distribution="torchgpipe",
    extra="torchgpipe",
    ranks="one",
    stages_are="devices",
    schedules=(ScheduleRule(name="gpipe"),),
    overlap_on_cpu=False,
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
