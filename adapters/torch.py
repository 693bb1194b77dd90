"""PyTorch's own ``torch.distributed.pipelining``, one rank a stage, stages cut by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from adapters.protocol import Capabilities, ReadBack, ScheduleRule, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["build", "capabilities"]

capabilities = Capabilities(
    distribution=None,
    extra=None,
    ranks="per_stage",
    stages_are="devices",
    schedules=(
        ScheduleRule(name="1f1b", min_micro_batches="stages"),
        ScheduleRule(name="gpipe"),
        ScheduleRule(name="interleaved_1f1b", virtual_stages=None, whole_rounds=True, min_stages=2),
        ScheduleRule(
            name="interleaved_zero_bubble",
            virtual_stages=None,
            whole_rounds=True,
            min_stages=2,
            checkpoints=("never",),
        ),
        ScheduleRule(name="zbv_zero_bubble", virtual_stages=(2,), checkpoints=("never",), placement="v", min_stages=2),
    ),
    several_nodes=True,
    reasons={
        "checkpoint": "under zero-bubble schedules torch would recompute a micro-batch many times over",
    },
    notes=("recomputation is torch.utils.checkpoint around a stage; BatchNorm buffers are kept exact",),
)

_CLASSES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv_zero_bubble": "ScheduleZBVZeroBubble",
}


def model_stages_of(rank: int, stages: int, virtual_stages: int, placement: str) -> list[int]:
    """The model stages that live on a rank, in order."""
    if placement == "v":
        return [rank, 2 * stages - 1 - rank]
    return list(range(rank, stages * virtual_stages, stages))


def _boundary_metas(task: Task, starts: list[int]) -> list[Any]:
    """What enters each model stage and leaves the last, as tensors on the meta device.

    A shape-only run, so that the first step needs none of its own.  The layers are copied to the
    meta device one by one: BatchNorm counters and weights of the real model stay untouched.
    """
    import copy

    import torch

    entering: list[Any] = []
    with torch.no_grad():
        x: Any = torch.empty(task.input_shape, dtype=task.dtype, device="meta")
        for index, layer in enumerate(task.model):
            if index in starts:
                entering.append(x)
            x = copy.deepcopy(layer).to("meta")(x)
    return [*entering, x]


def _static(value: Any, device: torch.device, *, requires_grad: bool) -> tuple[torch.Tensor, ...]:
    import torch

    tensors = value if isinstance(value, tuple) else (value,)
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=device).requires_grad_(requires_grad) for t in tensors)


def _stage_module(layers: list[nn.Module], checkpoint: str, micro_batches: int) -> tuple[nn.Module, nn.Module]:
    """(what the schedule calls, what is called once per micro-batch inside it)."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint as recompute

    class Stage(nn.Module):
        """Takes a boundary's tensors as positional arguments, as torch.distributed.pipelining passes
        them, and recomputes the asked micro-batches."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(*layers)
            self.calls = 0

        def forward(self, *tensors: torch.Tensor) -> Any:
            x: Any = tensors if len(tensors) > 1 else tensors[0]
            last = self.calls % micro_batches == micro_batches - 1
            self.calls += 1
            if checkpoint == "never" or (checkpoint == "except_last" and last):
                output = self.inner(x)
            else:
                output = recompute(
                    self.inner, x, use_reentrant=False, context_fn=lambda: _frozen_statistics(self.inner)
                )
            # A zero-bubble schedule detaches the output in place, which a view forbids.
            if isinstance(output, torch.Tensor) and output._is_view():
                output = output.clone()
            return output

    stage = Stage()
    return stage, stage.inner


def _frozen_statistics(inner: nn.Module) -> tuple[Any, Any]:
    """Contexts for the first forward and the recomputation; the second leaves BatchNorm buffers as
    they are, since the first forward has moved them already."""
    from contextlib import contextmanager, nullcontext

    from torch.nn.modules.batchnorm import _BatchNorm

    @contextmanager
    def recomputing() -> Any:
        norms = [m for m in inner.modules() if isinstance(m, _BatchNorm)]
        momenta = [m.momentum for m in norms]
        for norm in norms:
            norm.momentum = 0.0
        try:
            yield
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
                # Early stop may end the recomputation before a norm has counted again.
                counter = counters.get(norm)
                if counter is not None and norm.num_batches_tracked is not None:
                    norm.num_batches_tracked.copy_(counter)

    counters = {
        m: m.num_batches_tracked + 1
        for m in inner.modules()
        if isinstance(m, _BatchNorm) and m.num_batches_tracked is not None
    }
    return nullcontext(), recomputing()


class TorchPipeline:
    """See ``adapters.protocol.Pipeline``."""

    def __init__(self, task: Task) -> None:
        from torch.distributed import pipelining
        from torch.distributed.pipelining import schedules as schedule_module

        self.task = task
        self.rule = next(r for r in capabilities.schedules if r.name == task.schedule)
        count = len(task.partition)
        bounds = [sum(task.partition[:i]) for i in range(count + 1)]
        self.mine = model_stages_of(task.rank, task.stages, task.virtual_stages, self.rule.placement)
        device = task.devices[task.rank]
        metas = _boundary_metas(task, bounds[:-1])
        flat = list(task.model)
        self._layers: dict[int, nn.Module] = {}
        self._inner: dict[int, nn.Module] = {}
        made = []
        for k in self.mine:
            layers = flat[bounds[k] : bounds[k + 1]]
            module, inner = _stage_module(layers, task.checkpoint, task.micro_batches)
            module.to(device)
            self._inner[k] = inner
            self._layers.update(zip(range(bounds[k], bounds[k + 1]), layers, strict=True))
            made.append(
                pipelining.PipelineStage(
                    module,
                    k,
                    count,
                    device,
                    input_args=_static(metas[k], device, requires_grad=k > 0),
                    output_args=_static(metas[k + 1], device, requires_grad=True),
                )
            )
        self._made = dict(zip(self.mine, made, strict=True))
        self.first, self.last = 0 in self.mine, count - 1 in self.mine
        make: Callable[..., Any] = getattr(schedule_module, _CLASSES[task.schedule])
        several = task.virtual_stages > 1
        self.schedule = make(made if several else made[0], task.micro_batches, loss_fn=task.loss)
        parameters = [p for layer in self._layers.values() for p in layer.parameters()]
        self.optim = task.make_optimizer(parameters) if parameters else None

    def place(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        device = self.task.devices[self.task.rank]
        return (x.to(device) if self.first else None, y.to(device) if self.last else None)

    def step(self, batch: Any) -> torch.Tensor | None:
        import torch

        x, y = batch
        losses: list[torch.Tensor] = []
        inputs = (x,) if self.first else ()
        if self.last:
            self.schedule.step(*inputs, target=y, losses=losses, return_outputs=False)
        else:
            self.schedule.step(*inputs, return_outputs=False)
        if self.optim is not None:
            self.optim.step()
            self.optim.zero_grad(set_to_none=True)
        return torch.stack(losses).mean().detach() if self.last else None

    def stages(self) -> Mapping[int, nn.Module]:
        return self._inner

    def layers(self) -> Mapping[int, nn.Module]:
        return self._layers

    def optimizer(self) -> torch.optim.Optimizer | None:
        return self.optim

    def backward_halves(self) -> Mapping[int, tuple[Any, Mapping[str, str]]]:
        if "zero_bubble" not in self.task.schedule:
            return {}
        names = {"backward": "backward_one_chunk", "backward_weight": "backward_weight_one_chunk"}
        return {k: (stage, names) for k, stage in self._made.items()}

    def read_back(self) -> ReadBack:
        name = type(self.schedule).__name__
        return ReadBack(
            partition={k: len(list(inner.children())) for k, inner in self._inner.items()},
            micro_batches=self.schedule._n_microbatches,
            schedule=next(key for key, value in _CLASSES.items() if value == name),
            checkpoint=self.task.checkpoint,
        )

    def close(self) -> None:
        del self.schedule, self._made


def build(task: Task) -> TorchPipeline:
    """The stages of this rank and their schedule."""
    return TorchPipeline(task)
