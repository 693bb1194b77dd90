"""Hooks on the stage modules of a built pipeline, the same for every library.

A stage module is called once per micro-batch; a call inside the autograd engine is a
recomputation; a gradient that reaches a stage's output starts its backward.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

__all__ = ["Counts", "StageHooks", "in_backward"]


def in_backward() -> bool:
    """Whether this thread is inside the autograd engine."""
    return torch._C._current_graph_task_id() != -1


class StageHooks:
    """Calls ``enter(stage, recompute)`` and ``leave(stage, recompute)`` around each call of a stage
    module and ``backward(stage)`` when a gradient reaches its output, from the library's own
    threads.  Use as a context manager; nothing stays behind."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        enter: Callable[[int, bool], None],
        leave: Callable[[int, bool], None],
        backward: Callable[[int], None],
    ) -> None:
        self._stages, self._enter, self._leave, self._backward = stages, enter, leave, backward
        self._handles: list[Any] = []

    def __enter__(self) -> StageHooks:
        for stage, module in self._stages.items():
            self._handles.append(module.register_forward_pre_hook(self._before(stage)))
            # always_call: a recomputation that stops early raises out of the module on purpose.
            self._handles.append(module.register_forward_hook(self._after(stage), always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, stage: int) -> Callable[..., None]:
        return lambda module, args: self._enter(stage, in_backward())

    def _after(self, stage: int) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._leave(stage, in_backward())
            first = next((t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad), None)
            if first is not None:
                first.register_hook(lambda gradient: self._backward(stage))

        return after


class Counts:
    """Counts forwards, recomputations and the most micro-batches in flight of each stage."""

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self.forwards: Counter[int] = Counter()
        self.recomputes: Counter[int] = Counter()
        self.backwards: Counter[int] = Counter()
        self.in_flight: Counter[int] = Counter()
        self._lock = threading.Lock()
        self.hooks = StageHooks(stages, enter=self._enter, leave=lambda *_: None, backward=self._back)

    def _enter(self, stage: int, recompute: bool) -> None:
        with self._lock:
            (self.recomputes if recompute else self.forwards)[stage] += 1
            flying = self.forwards[stage] - self.backwards[stage]
            self.in_flight[stage] = max(self.in_flight[stage], flying)

    def _back(self, stage: int) -> None:
        with self._lock:
            self.backwards[stage] += 1
