"""The memory pass: one step of its own, never a timed one; peaks a stage."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adapters.protocol import Pipeline
from bench.worker.ranks import Ranks
from bench.worker.stage_hooks import Call, StageHooks

__all__ = ["Peak", "peaks"]

KINDS = ("parameters", "gradients", "optimizer_state", "placed", "activations")


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The fullest moment of one device in one step, in bytes.

    ``allocated`` is the sum of the rest.  On CPU each is counted; on CUDA ``parameters`` (buffers
    included), ``gradients`` (as many bytes as parameters), ``optimizer_state`` and ``placed`` are what
    stands there after the step and ``activations`` what is left of the allocator's peak.
    """

    allocated: int
    reserved: int | None
    retries: int | None
    parameters: int
    gradients: int
    optimizer_state: int
    placed: int
    activations: int


@dataclass
class _Storage:
    size: int
    stage: int
    kind: str
    born: int


class _LiveStorages:
    """Counts the bytes of live storages by stage, of the stage that was computing when a storage
    was first seen, and by what they are.  Thread-safe, since libraries call stages from threads of
    their own."""

    def __init__(self, first: int) -> None:
        self.stage = first
        self._now: dict[int, Counter[str]] = {}
        self._peak: dict[int, tuple[int, int, Counter[str]]] = {}  # total, when, by kind
        self._seen: dict[int, _Storage] = {}
        self._births = 0
        self._lock = threading.RLock()  # a finalizer may run inside ``add`` of the same thread

    def add(self, tensor: torch.Tensor, stage: int, kind: str = "activations") -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if size == 0 or key in self._seen:
                return
            self._births += 1
            self._seen[key] = _Storage(size, stage, kind, self._births)
            now = self._now.setdefault(stage, Counter())
            now[kind] += size
            total = now.total()
            if total > self._peak.get(stage, (0,))[0]:
                self._peak[stage] = (total, self._births, Counter(now))
        weakref.finalize(storage, self._free, key).atexit = False

    def is_gradient(self, tensor: torch.Tensor) -> None:
        """What was made as any other tensor has become a parameter's gradient."""
        with self._lock:
            known = self._seen.get(tensor.untyped_storage()._cdata)
            if known is None or known.kind == "gradients":
                return
            counters = [self._now[known.stage]]
            _, when, at_peak = self._peak[known.stage]
            if known.born <= when:  # it lived then as it lives now
                counters.append(at_peak)
            for counter in counters:
                counter[known.kind] -= known.size
                counter["gradients"] += known.size
            known.kind = "gradients"

    def peak(self, stage: int) -> Peak:
        total, _, kinds = self._peak.get(stage, (0, 0, Counter()))
        return Peak(allocated=total, reserved=None, retries=None, **{kind: kinds[kind] for kind in KINDS})

    def _free(self, key: int) -> None:
        with self._lock:
            known = self._seen.pop(key)
            self._now[known.stage][known.kind] -= known.size


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


def peaks(ranks: Ranks, pipeline: Pipeline, batch: Any, lane: Callable[[int], int]) -> dict[int, Peak]:
    """Device index (stage) → its peak in one step.

    ``lane`` maps a model stage to its device.  On the CPU live storages are counted: parameters,
    gradients, optimizer state, the placed mini-batch and all that the step makes; the step is about
    twice as slow, hence a pass of its own.
    """
    if ranks.local[0].type == "cuda":
        return _cuda_peaks(ranks, pipeline, batch, lane)
    return _cpu_peaks(pipeline, batch, lane)


def _cuda_peaks(ranks: Ranks, pipeline: Pipeline, batch: Any, lane: Callable[[int], int]) -> dict[int, Peak]:
    ranks.sync()
    ranks.release_memory()
    stages = sorted({lane(k) for k in pipeline.stages()})
    before = {stage: torch.cuda.memory_stats(ranks.devices[stage]).get("num_alloc_retries", 0) for stage in stages}
    pipeline.step(batch)
    ranks.sync()
    standing: dict[int, Counter[str]] = {stage: Counter() for stage in stages}
    for tensor, stage, kind in _standing(pipeline, batch, lane):
        standing[stage][kind] += tensor.untyped_storage().nbytes()
    found = {}
    for stage in stages:
        device, held = ranks.devices[stage], standing[stage]
        held["gradients"] = sum(
            p.numel() * p.element_size()
            for k, m in pipeline.stages().items()
            if lane(k) == stage
            for p in m.parameters()
        )
        allocated = torch.cuda.max_memory_allocated(device)
        held["activations"] = max(0, allocated - held.total())
        found[stage] = Peak(
            allocated=allocated,
            reserved=torch.cuda.max_memory_reserved(device),
            retries=torch.cuda.memory_stats(device).get("num_alloc_retries", 0) - before[stage],
            **{kind: held[kind] for kind in KINDS},
        )
    return found


def _cpu_peaks(pipeline: Pipeline, batch: Any, lane: Callable[[int], int]) -> dict[int, Peak]:
    stages = pipeline.stages()
    lanes = sorted({lane(k) for k in stages})
    live = _LiveStorages(lanes[0])
    for tensor, stage, kind in _standing(pipeline, batch, lane):
        live.add(tensor, stage, kind)
    watch = _StageWatch(live, lane)
    with ExitStack() as stack:
        for module in stages.values():
            for parameter in module.parameters():
                handle = parameter.register_post_accumulate_grad_hook(
                    lambda p: live.is_gradient(p.grad) if p.grad is not None else None
                )
                stack.callback(handle.remove)
        stack.enter_context(_Watch(live))
        stack.enter_context(StageHooks(stages, enter=watch.enter, leave=watch.leave, backward=watch.backward))
        pipeline.step(batch)
    return {stage: live.peak(stage) for stage in lanes}


def _standing(pipeline: Pipeline, batch: Any, lane: Callable[[int], int]) -> Iterator[tuple[torch.Tensor, int, str]]:
    """(tensor, device index, kind) of what is alive before and after a step."""
    stages, optimizer = pipeline.stages(), pipeline.optimizer()
    state = optimizer.state if optimizer is not None else {}
    for model_stage, module in stages.items():
        stage = lane(model_stage)
        for parameter in module.parameters():
            yield parameter, stage, "parameters"
            if parameter.grad is not None:
                yield parameter.grad, stage, "gradients"
            for value in state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    yield value, stage, "optimizer_state"
        for buffer in module.buffers():
            yield buffer, stage, "parameters"
    for tensor in tree_leaves(batch):
        if isinstance(tensor, torch.Tensor):
            yield tensor, lane(min(stages) if tensor.is_floating_point() else max(stages)), "placed"
