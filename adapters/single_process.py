"""What torchgpipe and FairScale have in common: one process drives all devices, one autograd graph, and
the same routines for a partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from adapters.protocol import ReadBack, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["NATIVE_BALANCES", "NATIVE_REASONS", "SHARED_NOTES", "SingleProcessPipe", "native_partition"]

SHARED_NOTES = (
    "recomputation advances BatchNorm statistics a second time",
    "the mini-batch is cut and the output gathered by the library inside its step; the loss is taken once, "
    "over the whole mini-batch",
)

NATIVE_BALANCES = {"time": ("cpu", "cuda"), "size": ("cuda",)}
NATIVE_REASONS = {"balance=native_size": "its balance_by_size measures CUDA memory"}


def native_partition(rule: str, task: Task, balance: Any) -> tuple[int, ...]:
    """What ``balance_by_time`` or ``balance_by_size`` of the library's module ``balance`` picks.

    Time is profiled on one micro-batch, which is what a stage runs; size takes the whole
    mini-batch and its micro-batches, and parameters three times: gradients and SGD's momentum.
    """
    import torch

    device = task.devices[0]
    samples = task.input_shape[0] if rule == "time" else task.batch_size
    x = torch.rand(samples, *task.input_shape[1:], dtype=task.dtype, generator=torch.Generator().manual_seed(0))
    model, stages = task.model.to(device), len(task.devices)
    if rule == "time":
        return tuple(balance.balance_by_time(stages, model, x.to(device), device=device))
    picked = balance.balance_by_size(
        stages, model, x.to(device), chunks=task.micro_batches, param_scale=3.0, device=device
    )
    return tuple(picked)


class SingleProcessPipe:
    """A pipe that is called on a whole mini-batch; see ``adapters.protocol.Pipeline``.

    ``make`` is the library's class; the two take the same arguments.
    """

    def __init__(self, task: Task, make: Callable[..., Any]) -> None:
        self.task = task
        self.pipe = make(
            task.model,
            balance=list(task.partition),
            devices=list(task.devices),
            chunks=task.micro_batches,
            checkpoint=task.checkpoint,
        )
        self.partitions: list[nn.Module] = list(self.pipe.partitions)
        parameters = list(self.pipe.parameters())
        self.optim = task.make_optimizer(parameters) if parameters else None

    def place(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return x.to(self.task.devices[0]), y.to(self.task.devices[-1])

    def step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = self.task.loss(self.pipe(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.optim is not None:
            self.optim.step()
            self.optim.zero_grad(set_to_none=True)
        return loss.detach()

    def stages(self) -> Mapping[int, nn.Module]:
        return dict(enumerate(self.partitions))

    def layers(self) -> Mapping[int, nn.Module]:
        flat = (layer for partition in self.partitions for layer in partition.children())
        return dict(enumerate(flat))

    def optimizer(self) -> torch.optim.Optimizer | None:
        return self.optim

    def read_back(self) -> ReadBack:
        return ReadBack(
            partition={i: len(list(p.children())) for i, p in enumerate(self.partitions)},
            micro_batches=self.pipe.chunks,
            schedule="gpipe",
            checkpoint=self.pipe.checkpoint,
        )

    def close(self) -> None:
        # A pipe that lives on into the interpreter's exit leaves its worker threads waiting.
        import gc

        del self.pipe, self.partitions, self.optim
        gc.collect()
