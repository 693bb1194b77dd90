"""What plain PyTorch and ddp have in common: a device trains the whole model, micro-batch after micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from adapters.protocol import ReadBack, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["WholeModel"]


class WholeModel:
    """The whole model on one device; see ``adapters.protocol.Pipeline`` for what is not said here."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, self.device = task, device
        self.model = task.model.to(device)
        self.optim = task.make_optimizer(self.model.parameters())

    def accumulate(
        self, batch: Any, call: Callable[[Any], Any], around: Callable[[bool], AbstractContextManager[Any]]
    ) -> torch.Tensor:
        """One step over a list of micro-batches; ``around(last)`` is entered around each of them."""
        total = None
        for index, (x, y) in enumerate(batch):
            with around(index == len(batch) - 1):
                loss = self.task.loss(call(x), y) / len(batch)
                loss.backward()
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
