"""Plain PyTorch on one device: the baseline, gradients accumulated over the micro-batches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from adapters.protocol import Capabilities, Task
from adapters.whole_model import WholeModel

if TYPE_CHECKING:
    import torch

__all__ = ["build", "capabilities"]

capabilities = Capabilities(distribution=None, extra=None, ranks="one", stages_are="none", checkpoints=("never",))


class Single(WholeModel):
    """See ``adapters.protocol.Pipeline``."""

    def place(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        m = self.task.micro_batches
        return list(zip(x.to(self.device).chunk(m), y.to(self.device).chunk(m), strict=True))

    def step(self, batch: Any) -> torch.Tensor:
        return self.accumulate(batch, self.model, lambda last: nullcontext())

    def close(self) -> None:
        pass


def build(task: Task) -> Single:
    """The whole model on ``task.devices[0]``."""
    return Single(task, task.devices[0])
