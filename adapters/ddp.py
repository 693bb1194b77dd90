"""Plain data parallelism: ``DistributedDataParallel`` over as many replicas as there are stages."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from adapters.protocol import Capabilities, Task
from adapters.whole_model import WholeModel

if TYPE_CHECKING:
    import torch

__all__ = ["build", "capabilities"]

capabilities = Capabilities(
    distribution=None,
    extra=None,
    ranks="per_stage",
    stages_are="replicas",
    checkpoints=("never",),
    several_nodes=True,
    notes=(
        "each replica holds the whole model and its share of the micro-batches; "
        "BatchNorm statistics are not shared (no SyncBatchNorm, broadcast_buffers=False)",
    ),
)


class Ddp(WholeModel):
    """See ``adapters.protocol.Pipeline``."""

    def __init__(self, task: Task) -> None:
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(task, task.devices[task.rank])
        self.replica = DistributedDataParallel(
            self.model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            broadcast_buffers=False,
        )

    def place(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        share = self.task.micro_batches // self.task.world_size
        mine = slice(self.task.rank * share, (self.task.rank + 1) * share)
        xs, ys = (t.chunk(self.task.micro_batches)[mine] for t in (x, y))
        return [(a.to(self.device), b.to(self.device)) for a, b in zip(xs, ys, strict=True)]

    def step(self, batch: Any) -> torch.Tensor:
        # Only the last micro-batch's backward sends the gradients, summed up to then.
        return self.accumulate(batch, self.replica, lambda last: nullcontext() if last else self.replica.no_sync())

    def close(self) -> None:
        del self.replica


def build(task: Task) -> Ddp:
    """A replica of the whole model on this rank's device."""
    return Ddp(task)
