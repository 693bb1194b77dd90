"""The trace pass: a few steps of its own with every forward, recomputation and backward stamped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from adapters.protocol import Pipeline
from bench.jobs import SpanResult, TraceResult
from bench.worker.channel import Channel
from bench.worker.clock import Clock, clock_for, stamp_cost_s
from bench.worker.ranks import Ranks
from bench.worker.stage_hooks import Call, StageHooks

__all__ = ["STEPS", "trace"]

STEPS = 3
Stamp = tuple[str, int, int, Any]  # (what, model stage, micro-batch, stamp)


def trace(
    ranks: Ranks, channel: Channel, pipeline: Pipeline, batch: Any, lane: Callable[[int], int]
) -> tuple[TraceResult, tuple[SpanResult, ...]]:
    """Run ``STEPS`` steps and return their spans on the host's clock; ``lane`` maps a model stage to its device.

    A step starts after a barrier and a sync of every device, as a measured one does.
    """
    stages = pipeline.stages()
    device = {k: ranks.devices[lane(k)] for k in stages}
    clock = clock_for(ranks.local)
    spans: list[SpanResult] = []
    seconds: list[float] = []
    for step in range(STEPS):
        ranks.barrier()
        ranks.sync()
        start = time.monotonic_ns()
        with _Recorder(pipeline, clock, device) as recorder, channel.stepping():
            pipeline.step(batch)
            ranks.sync()
        seconds.append((time.monotonic_ns() - start) * 1e-9)
        # Ranks of one host share the clock: one zero for all of them.
        begin = min(ranks.gather(start)) * 1e-9
        spans += [
            SpanResult(
                step=step,
                stage=lane(k) if k >= 0 else ranks.rank,
                model_stage=k,
                kind=kind,
                micro_batch=micro_batch,
                start_s=first - begin,
                end_s=last - begin,
            )
            for kind, k, micro_batch, first, last in recorder.spans()
        ]
        channel.step(step)
    cost = stamp_cost_s(clock, ranks.local[0])
    return TraceResult(step_times_s=tuple(seconds), stamp_cost_s=cost), tuple(spans)


class _Recorder:
    """Stamps one step.  What a schedule runs as halves of a backward is stamped around its own calls."""

    def __init__(self, pipeline: Pipeline, clock: Clock, device: Mapping[int, torch.device]) -> None:
        self._clock, self._device = clock, device
        self._stamps: list[Stamp] = []  # append is atomic
        self._optimizer = pipeline.optimizer()
        self._halves = dict(getattr(pipeline, "backward_halves", dict)())
        backward = {} if self._halves else {"backward": self._on("backward"), "finish": self._on("finish")}
        self._hooks = StageHooks(pipeline.stages(), enter=self._enter, leave=self._leave, **backward)
        self._stack = ExitStack()

    def __enter__(self) -> _Recorder:
        self._stack.enter_context(self._hooks)
        for stage, (owner, methods) in self._halves.items():
            for kind, name in methods.items():
                self._stack.enter_context(self._around(owner, name, kind, stage))
        if self._optimizer is not None:
            first = next(iter(self._device))
            for what, register in (
                ("update", self._optimizer.register_step_pre_hook),
                ("updated", self._optimizer.register_step_post_hook),
            ):
                handle = register(lambda *_, what=what: self._add(what, first, -1))
                self._stack.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _add(self, what: str, stage: int, micro_batch: int) -> None:
        self._stamps.append((what, stage, micro_batch, self._clock.stamp(self._device[stage])))

    def _enter(self, call: Call) -> None:
        self._add("recompute" if call.recompute else "forward", call.stage, call.micro_batch)

    def _leave(self, call: Call) -> None:
        self._add("recomputed" if call.recompute else "forwarded", call.stage, call.micro_batch)

    def _on(self, what: str) -> Callable[[Call], None]:
        return lambda call: self._add(what, call.stage, call.micro_batch)

    @contextmanager
    def _around(self, owner: Any, name: str, kind: str, stage: int) -> Iterator[None]:
        """Shadow a method of one object for the time of the step; its first argument is the micro-batch."""
        original = getattr(owner, name)

        def stamped(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            self._add(f"{kind} begins", stage, micro_batch)
            try:
                return original(micro_batch, *args, **kwargs)
            finally:
                self._add(f"{kind} ends", stage, micro_batch)

        setattr(owner, name, stamped)
        try:
            yield
        finally:
            delattr(owner, name)

    def spans(self) -> Iterator[tuple[str, int, int, float, float]]:
        """(kind, model stage, micro-batch, start, end) in seconds of the host's clock."""
        stamps = [(what, k, mb, self._clock.seconds(stamp)) for what, k, mb, stamp in self._stamps]
        stamps.sort(key=lambda stamp: stamp[3])
        yield from _paired(stamps, "forward", "forwarded")
        yield from _paired(stamps, "recompute", "recomputed")
        for kind, _, _, start, end in _paired(stamps, "update", "updated"):
            yield kind, -1, -1, start, end
        for kind in ("backward", "backward_weight"):
            for _, k, mb, start, end in _paired(stamps, f"{kind} begins", f"{kind} ends"):
                yield kind, k, mb, start, end
        begun: dict[tuple[int, int], float] = {}
        ended: dict[tuple[int, int], float] = {}
        for what, k, mb, at in stamps:
            if what == "backward":
                begun.setdefault((k, mb), at)
            elif what == "finish":
                ended[k, mb] = at
        for (k, mb), start in begun.items():
            yield "backward", k, mb, start, max(ended.get((k, mb), start), start)


def _paired(
    stamps: list[tuple[str, int, int, float]], first: str, last: str
) -> Iterator[tuple[str, int, int, float, float]]:
    opened: dict[tuple[int, int], float] = {}
    for what, k, mb, at in stamps:
        if what == first:
            opened[k, mb] = at
        elif what == last and (k, mb) in opened:
            yield first, k, mb, opened.pop((k, mb)), at
