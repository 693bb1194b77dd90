"""Plain PyTorch on one device: the baseline, gradients accumulated over the micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from adapters.protocol import Capabilities, ReadBack, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["build", "capabilities"]

capabilities = Capabilities(distribution=None, extra=None, ranks="one", stages_are="none", checkpoints=("never",))


class Single:
    """See ``adapters.protocol.Pipeline``."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model = task.model.to(task.devices[0])
        self.optim = task.make_optimizer(self.model.parameters())

    def place(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        device = self.task.devices[0]
        m = self.task.micro_batches
        return list(zip(x.to(device).chunk(m), y.to(device).chunk(m), strict=True))

    def step(self, batch: Any) -> torch.Tensor:
        total = None
        for x, y in batch:
            loss = self.task.loss(self.model(x), y) / self.task.micro_batches
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
        pass


def build(task: Task) -> Single:
    """The whole model on ``task.devices[0]``."""
    return Single(task)
