"""Hooks on the stage modules of a built pipeline, the same for every library.

A stage module is called once per micro-batch; a call inside the autograd engine is a
recomputation; a gradient that reaches a stage's output starts its backward, and the gradient of its
input, or of what it computes first where the input asks for none, ends it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["Call", "Counts", "StageHooks", "in_backward"]


def in_backward() -> bool:
    """Whether this thread is inside the autograd engine."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True)
class Call:
    """One call of a model stage's module.  ``micro_batch`` counts a step's calls from 0; −1 where a
    recomputation's input is none that was seen."""

    stage: int
    micro_batch: int
    recompute: bool


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _nothing(call: Call) -> None:
    pass


class _Entrance(torch.autograd.Function):
    """The identity, whose backward says that the gradient of a stage's input is there.

    A hook on the input itself would wait for the node that made it, which libraries let others
    overtake; of nodes that are ready autograd takes the youngest first, and this is the youngest
    that is not the stage's own.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Call, finish: Callable[[Call], None]) -> torch.Tensor:
        ctx.call, ctx.finish = call, finish
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.finish(ctx.call)
        return gradients[0], None, None


class StageHooks:
    """Calls ``enter`` and ``leave`` around each call of a stage module, ``backward`` when a gradient
    reaches its output and, where given, ``finish`` each time a gradient leaves it (the last one
    ends the backward), from the library's own threads.  Use as a context manager around one step;
    nothing stays behind."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        enter: Callable[[Call], None] = _nothing,
        leave: Callable[[Call], None] = _nothing,
        backward: Callable[[Call], None] = _nothing,
        finish: Callable[[Call], None] | None = None,
    ) -> None:
        self._stages, self._enter, self._leave, self._backward, self._finish = stages, enter, leave, backward, finish
        self._handles: list[Any] = []
        self._counts: Counter[int] = Counter()
        self._seen: dict[tuple[int, int], int] = {}  # (stage, address of the input) → micro-batch
        self._awaited: set[tuple[int, int]] = set()  # calls whose backward is hooked
        self._local = threading.local()

    def __enter__(self) -> StageHooks:
        for stage, module in self._stages.items():
            self._handles.append(module.register_forward_pre_hook(self._before(stage)))
            # always_call: a recomputation that stops early raises out of the module on purpose.
            self._handles.append(module.register_forward_hook(self._after(stage), always_call=True))
            if self._finish is not None and (first := _first_parametric(module)) is not None:
                self._handles.append(first.register_forward_hook(self._computed))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, stage: int) -> Callable[..., Any]:
        def before(module: nn.Module, args: Any) -> Any:
            address = next((t.data_ptr() for t in _tensors(args)), 0)
            if in_backward():
                call = Call(stage, self._seen.get((stage, address), -1), True)
            else:
                call = Call(stage, self._counts[stage], False)
                self._counts[stage] += 1
                self._seen[stage, address] = call.micro_batch
            self._local.calls = [*getattr(self._local, "calls", []), call]
            self._enter(call)
            finish = self._finish
            if finish is None or not any(t.requires_grad for t in _tensors(args)):
                return None

            def marked(value: Any) -> Any:
                wanted = isinstance(value, torch.Tensor) and value.requires_grad
                return _Entrance.apply(value, call, finish) if wanted else value  # type: ignore[no-untyped-call]

            return tree_map(marked, args)

        return before

    def _after(self, stage: int) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            call = self._local.calls.pop()
            self._leave(call)
            outputs = [t for t in _tensors(output) if t.requires_grad]
            # With checkpointing either the first call's output or, in some libraries, only the recomputed one's
            # is part of a graph.
            if not outputs or (stage, call.micro_batch) in self._awaited:
                return
            self._awaited.add((stage, call.micro_batch))
            for tensor in outputs if self._finish is not None else outputs[:1]:
                self._handles.append(tensor.register_hook(lambda gradient: self._backward(call)))

        return after

    def _computed(self, module: nn.Module, args: Any, output: Any) -> None:
        """The first parametric layer of a stage has run: where no gradient leaves the stage, its own is the last."""
        calls = getattr(self._local, "calls", [])
        node = next((t.grad_fn for t in _tensors(output) if t.grad_fn is not None), None)
        if calls and node is not None and not any(t.requires_grad for t in _tensors(args)):
            call, finish = calls[-1], self._finish
            assert finish is not None
            node.register_hook(lambda *_: finish(call))


def _first_parametric(module: nn.Module) -> nn.Module | None:
    """The first module without children of its own that holds parameters."""
    leaves = (m for m in module.modules() if next(m.children(), None) is None)
    return next((m for m in leaves if next(m.parameters(recurse=False), None) is not None), None)


class Counts:
    """Counts forwards, recomputations and the most micro-batches in flight of each stage."""

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self.forwards: Counter[int] = Counter()
        self.recomputes: Counter[int] = Counter()
        self.backwards: Counter[int] = Counter()
        self.in_flight: Counter[int] = Counter()
        self._lock = threading.Lock()
        self.hooks = StageHooks(stages, enter=self._enter, backward=self._back)

    def _enter(self, call: Call) -> None:
        with self._lock:
            (self.recomputes if call.recompute else self.forwards)[call.stage] += 1
            flying = self.forwards[call.stage] - self.backwards[call.stage]
            self.in_flight[call.stage] = max(self.in_flight[call.stage], flying)

    def _back(self, call: Call) -> None:
        with self._lock:
            self.backwards[call.stage] += 1
