"""Adapters with a fault built in on purpose, to see whether the gate catches it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from adapters.protocol import Pipeline, Task

__all__ = ["FAULTS", "sabotaged"]


def _with_optimizer(task: Task, change: Callable[[torch.optim.Optimizer], None]) -> Task:
    make = task.make_optimizer

    def changed(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        change(optimizer)
        return optimizer

    return replace(task, make_optimizer=changed)


def _set(key: str, value: Callable[[float], float]) -> Callable[[Task], Task]:
    def change(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group[key] = value(group[key])

    return lambda task: _with_optimizer(task, change)


def _silently(key: str, value: Callable[[float], float]) -> Callable[[Task], Task]:
    """The same while the step runs only, so that nothing but parity can see it."""

    def change(optimizer: torch.optim.Optimizer) -> None:
        saved: list[float] = []

        def before(*_: Any) -> None:
            saved[:] = [group[key] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group[key] = value(group[key])

        def after(*_: Any) -> None:
            for group, old in zip(optimizer.param_groups, saved, strict=True):
                group[key] = old

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    return lambda task: _with_optimizer(task, change)


def _clipping(task: Task) -> Task:
    def change(optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(parameters, 1e-3) and None)

    return _with_optimizer(task, change)


def _dropped(task: Task) -> Task:
    """The last micro-batch gives no gradient, the loss is still divided by m."""
    size = task.batch_size // task.micro_batches
    calls = 0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        if output.shape[0] > size:
            kept = output.shape[0] - size
            return task.loss(output[:kept], target[:kept]) * kept / output.shape[0]
        calls += 1
        return task.loss(output, target) * (0.0 if calls % task.micro_batches == 0 else 1.0)

    return replace(task, loss=loss)


def _summed(task: Task) -> Task:
    return replace(task, loss=lambda output, target: task.loss(output, target) * output.shape[0])


def _wrong_boundary(task: Task) -> Task:
    first, *rest = task.partition
    if not rest:  # one stage: a layer is lost
        return replace(task, model=task.model[:-1], partition=(first - 1,))
    return replace(task, partition=(first + 1, rest[0] - 1, *rest[1:]))


def _one_micro_batch(task: Task) -> Task:
    return replace(task, micro_batches=1, input_shape=(task.batch_size, *task.input_shape[1:]))


def _kept_gradients(task: Task) -> Task:
    """The optimizer sees the sum of all gradients so far, as if they were never cleared."""

    def change(optimizer: torch.optim.Optimizer) -> None:
        total: dict[nn.Parameter, torch.Tensor] = {}

        def before(*_: Any) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        total[p] = total[p] + p.grad if p in total else p.grad.clone()
                        p.grad = total[p].clone()

        optimizer.register_step_pre_hook(before)

    return _with_optimizer(task, change)


FAULTS: dict[str, Callable[[Task], Task]] = {
    "none": lambda task: task,
    "clipping": _clipping,
    "learning_rate": _set("lr", lambda lr: lr * 1.01),
    "learning_rate_silently": _silently("lr", lambda lr: lr * 1.01),
    "momentum": _set("momentum", lambda momentum: 0.0),
    "momentum_silently": _silently("momentum", lambda momentum: 0.0),
    "dropped_micro_batch": _dropped,
    "wrong_boundary": _wrong_boundary,
    "kept_gradients": _kept_gradients,
    "summed_loss": _summed,
    "one_micro_batch": _one_micro_batch,
}


def sabotaged(build: Callable[[Task], Pipeline], fault: str) -> Callable[[Task], Pipeline]:
    """``build`` with the fault put into its task."""
    return lambda task: build(FAULTS[fault](task))
