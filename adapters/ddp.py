"""Plain data parallelism: ``DistributedDataParallel`` over as many replicas as there are stages."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from adapters.protocol import Capabilities, ReadBack, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["build", "capabilities"]

capabilities = Capabilities(
    distribution=None,
    extra=None,
    ranks="per_stage",
    stages_are="replicas",
    checkpoints=("never",),
    notes=(
        "each replica holds the whole model and its share of the micro-batches; "
        "BatchNorm statistics are not shared (no SyncBatchNorm, broadcast_buffers=False)",
    ),
)


class Ddp:
    """See ``adapters.protocol.Pipeline``."""

    def __init__(self, task: Task) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self.task = task
        self.device = task.devices[task.rank]
        self.model = task.model.to(self.device)
        self.replica = DistributedDataParallel(
            self.model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            broadcast_buffers=False,
        )
        self.optim = task.make_optimizer(self.model.parameters())

    def place(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        share = self.task.micro_batches // self.task.world_size
        mine = slice(self.task.rank * share, (self.task.rank + 1) * share)
        xs, ys = (t.chunk(self.task.micro_batches)[mine] for t in (x, y))
        return [(a.to(self.device), b.to(self.device)) for a, b in zip(xs, ys, strict=True)]

    def step(self, batch: Any) -> torch.Tensor:
        total = None
        for index, (x, y) in enumerate(batch):
            # Only the last micro-batch's backward sends the gradients, summed up to then.
            with self.replica.no_sync() if index < len(batch) - 1 else nullcontext():
                loss = self.task.loss(self.replica(x), y) / len(batch)
                loss.backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
        self.optim.step()
        self.optim.zero_grad(set_to_none=True)
        assert total is not None
        return total

    def stages(self) -> Mapping[int, nn.Module]:
        return {0: self.model}

    def layers(self) -> Mapping[int, nn.Module]:
        return dict(enumerate(self.model))

    def optimizer(self) -> torch.optim.Optimizer:
        return self.optim

    def read_back(self) -> ReadBack:
        return ReadBack(
            partition={0: len(self.model)},
            micro_batches=self.task.micro_batches,
            schedule="none",
            checkpoint="never",
        )

    def close(self) -> None:
        del self.replica


def build(task: Task) -> Ddp:
    """A replica of the whole model on this rank's device."""
    return Ddp(task)
