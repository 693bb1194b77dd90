"""The memory pass: one step of its own, never a timed one; peaks a stage."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adapters.protocol import Pipeline
from bench.worker.ranks import Ranks
from bench.worker.stage_hooks import Call, StageHooks

__all__ = ["peaks"]


class _LiveStorages:
    """Counts the bytes of live storages by stage: of the stage that was computing when a storage
    was first seen.  Thread-safe, since libraries call stages from threads of their own."""

    def __init__(self, first: int) -> None:
        self.peak: dict[int, int] = {}
        self.stage = first
        self._now: dict[int, int] = {}
        self._seen: dict[int, tuple[int, int]] = {}
        self._lock = threading.RLock()  # a finalizer may run inside ``add`` of the same thread

    def add(self, tensor: torch.Tensor, stage: int) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if size == 0 or key in self._seen:
                return
            self._seen[key] = (size, stage)
            self._now[stage] = self._now.get(stage, 0) + size
            self.peak[stage] = max(self.peak.get(stage, 0), self._now[stage])
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        with self._lock:
            size, stage = self._seen.pop(key)
            self._now[stage] -= size


class _Watch(TorchDispatchMode):
    def __init__(self, live: _LiveStorages) -> None:
        super().__init__()
        self._live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._live.add(leaf, self._live.stage)
        return output


class _StageWatch:
    """Enters a ``_Watch`` on whatever thread runs a stage, and says which stage computes."""

    def __init__(self, live: _LiveStorages, lane: Callable[[int], int]) -> None:
        self._live, self._lane, self._local = live, lane, threading.local()

    def enter(self, call: Call) -> None:
        self._live.stage = self._lane(call.stage)
        watch = _Watch(self._live)
        self._local.watches = [*getattr(self._local, "watches", []), watch]
        watch.__enter__()

    def leave(self, call: Call) -> None:
        self._local.watches.pop().__exit__(None, None, None)

    def backward(self, call: Call) -> None:
        self._live.stage = self._lane(call.stage)


def peaks(
    ranks: Ranks, pipeline: Pipeline, batch: Any, lane: Callable[[int], int]
) -> dict[int, tuple[int, int | None]]:
    """Device index (stage) → (peak allocated bytes, peak reserved bytes or None on CPU) of one step.

    ``lane`` maps a model stage to its device.  On the CPU live storages are counted: parameters,
    gradients, optimizer state, the placed mini-batch and all that the step makes; the step is about
    twice as slow, hence a pass of its own.
    """
    if ranks.local[0].type == "cuda":
        return _cuda_peaks(ranks, pipeline, batch, lane)
    return _cpu_peaks(pipeline, batch, lane)


def _cuda_peaks(
    ranks: Ranks, pipeline: Pipeline, batch: Any, lane: Callable[[int], int]
) -> dict[int, tuple[int, int | None]]:
    ranks.sync()
    ranks.release_memory()
    pipeline.step(batch)
    ranks.sync()
    return {
        stage: (
            torch.cuda.max_memory_allocated(ranks.devices[stage]),
            torch.cuda.max_memory_reserved(ranks.devices[stage]),
        )
        for stage in sorted({lane(k) for k in pipeline.stages()})
    }


def _cpu_peaks(pipeline: Pipeline, batch: Any, lane: Callable[[int], int]) -> dict[int, tuple[int, int | None]]:
    stages = pipeline.stages()
    lanes = sorted({lane(k) for k in stages})
    live = _LiveStorages(lanes[0])
    _add_standing(live, stages, pipeline.optimizer(), batch, lane)
    watch = _StageWatch(live, lane)
    with _Watch(live), StageHooks(stages, enter=watch.enter, leave=watch.leave, backward=watch.backward):
        pipeline.step(batch)
    return {stage: (live.peak.get(stage, 0), None) for stage in lanes}


def _add_standing(
    live: _LiveStorages,
    stages: Mapping[int, nn.Module],
    optimizer: torch.optim.Optimizer | None,
    batch: Any,
    lane: Callable[[int], int],
) -> None:
    """Count what is alive before the step: parameters, buffers, optimizer state, the mini-batch."""
    state = optimizer.state if optimizer is not None else {}
    for model_stage, module in stages.items():
        for parameter in module.parameters():
            for tensor in (parameter, parameter.grad, *state.get(parameter, {}).values()):
                if isinstance(tensor, torch.Tensor):
                    live.add(tensor, lane(model_stage))
        for buffer in module.buffers():
            live.add(buffer, lane(model_stage))
    for tensor in tree_leaves(batch):
        if isinstance(tensor, torch.Tensor):
            live.add(tensor, lane(min(stages) if tensor.is_floating_point() else max(stages)))
