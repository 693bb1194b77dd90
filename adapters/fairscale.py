"""FairScale: ``fairscale.nn.Pipe`` on all devices from one process."""

from __future__ import annotations

from adapters.protocol import Capabilities, ScheduleRule, Task
from adapters.single_process import SHARED_NOTES, SingleProcessPipe

__all__ = ["build", "capabilities"]

capabilities = Capabilities(
    distribution="fairscale",
    extra="fairscale",
    ranks="one",
    stages_are="devices",
    schedules=(ScheduleRule(name="gpipe"),),
    overlap_on_cpu=False,
    notes=SHARED_NOTES,
)


def build(task: Task) -> SingleProcessPipe:
    """A ``Pipe`` with exactly the asked boundaries, micro-batches and checkpointing."""
    from fairscale.nn import Pipe  # type: ignore[import-untyped]

    return SingleProcessPipe(task, Pipe)
