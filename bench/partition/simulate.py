"""A discrete-event simulation of one step of a pipeline: what each stage does when, and how long the step takes.

Both schedules are run as a grid of ticks on which every operation has one place, all that it waits
for stands on earlier ticks, and each stage has at most one operation a tick.  Times are not tied to
the ticks: an operation starts as soon as its stage is free and its input is there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["Boundary", "Costs", "Pipeline", "Schedule", "Span", "StageCost", "Timeline", "simulate", "step_times"]

Seconds = NDArray[np.float64]
Kind = Literal["forward", "recompute", "backward", "update", "send_forward", "send_backward"]
BUSY: tuple[Kind, ...] = ("forward", "recompute", "backward")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """In which order the stages work, and what their transfers hold up.

    ``gpipe`` runs all forwards, then all backwards, from the last micro-batch to the first
    (the order in which autograd unrolls a step) or, without ``last_first``, in the forwards' order.
    ``1f1b``: stage s of p runs at most p − s forwards ahead, then one backward, one forward in
    turn; its backwards are in the forwards' order always.

    ``checkpoint``: which micro-batches run their forward again, right before their backward and
    after its gradient has come.

    ``sends``: ``overlap``: a transfer starts when its operation ends and holds up nobody but its
    reader; transfers of one direction across one boundary queue.  ``block``: a stage that has
    finished an operation offers its result and asks for the next operation's input at once; a
    transfer starts when both ends are there, and neither computes before its own are through.
    """

    name: Literal["gpipe", "1f1b"]
    micro_batches: int
    checkpoint: Literal["never", "except_last", "always"] = "never"
    sends: Literal["overlap", "block"] = "overlap"
    last_first: bool = True

    def __post_init__(self) -> None:
        if self.name not in ("gpipe", "1f1b"):
            raise ValueError(f"no simulation of schedule {self.name}; there are gpipe and 1f1b")
        if self.micro_batches < 1:
            raise ValueError(f"{self.micro_batches} micro-batches; at least 1 is needed")

    def in_flight(self, stage: int, stages: int) -> int:
        """The most micro-batches that have run forward but not backward on ``stage`` of ``stages``."""
        return self.micro_batches if self.name == "gpipe" else min(self.micro_batches, stages - stage)

    def recomputes(self, micro_batch: int) -> bool:
        """Whether this micro-batch runs its forward twice."""
        last = micro_batch == self.micro_batches - 1
        return self.checkpoint == "always" or (self.checkpoint == "except_last" and not last)


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Seconds of one stage: forward, backward and the recomputed forward of one micro-batch, update of one step.

    ``update_s`` (the optimizer's step) lies after the stage's last operation.
    """

    forward_s: float
    backward_s: float
    recompute_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Seconds that one micro-batch's activation (``forward_s``) and gradient (``backward_s``) take to cross."""

    forward_s: float = 0.0
    backward_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What ``simulate`` runs: p stages, the p − 1 boundaries between them (none given: free) and a schedule."""

    stages: tuple[StageCost, ...]
    schedule: Schedule
    boundaries: tuple[Boundary, ...] = ()

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a pipeline needs at least one stage")
        if self.boundaries and len(self.boundaries) != len(self.stages) - 1:
            raise ValueError(f"{len(self.boundaries)} boundaries for {len(self.stages)} stages")
        seconds = [value for part in (*self.stages, *self.boundaries) for value in vars(part).values()]
        if not all(math.isfinite(value) and value >= 0 for value in seconds):
            raise ValueError("times must be finite and not negative")


@dataclass(frozen=True)
class Span:
    """What ``stage`` did from ``start_s`` to ``end_s``, counted from the step's start.

    A transfer is its sender's; ``micro_batch`` is None for the update.
    """

    kind: Kind
    stage: int
    micro_batch: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One simulated step.

    ``spans``: forward, recompute, backward and update, ``transfers``: send_forward and
    send_backward, each in the order of the schedule.  ``busy_s``: forward, recompute and backward a
    stage.  ``bubble``: 1 − busy/(stages × step), 0 for a step without length.
    """

    step_time_s: float
    busy_s: tuple[float, ...]
    bubble: float
    spans: tuple[Span, ...]
    transfers: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The times of many pipelines of one length side by side: a row a stage, a column a pipeline.

    ``send_forward_s[s]`` and ``send_backward_s[s]`` are of the boundary between stages s and s + 1
    (p − 1 rows); all else has p rows and means what it means in ``StageCost``.
    """

    forward_s: Seconds
    backward_s: Seconds
    recompute_s: Seconds
    update_s: Seconds
    send_forward_s: Seconds
    send_backward_s: Seconds


def simulate(pipeline: Pipeline) -> Timeline:
    """The timeline of one step."""
    count = len(pipeline.stages)
    boundaries = pipeline.boundaries or (Boundary(),) * (count - 1)

    def column(values: list[float]) -> Seconds:
        return np.array(values, dtype=np.float64).reshape(len(values), 1)

    costs = Costs(
        forward_s=column([stage.forward_s for stage in pipeline.stages]),
        backward_s=column([stage.backward_s for stage in pipeline.stages]),
        recompute_s=column([stage.recompute_s for stage in pipeline.stages]),
        update_s=column([stage.update_s for stage in pipeline.stages]),
        send_forward_s=column([boundary.forward_s for boundary in boundaries]),
        send_backward_s=column([boundary.backward_s for boundary in boundaries]),
    )
    spans: list[Span] = []

    def note(kind: Kind, work: _Work, start: Seconds, end: Seconds) -> None:
        for i, (stage, micro_batch) in enumerate(zip(work.stages, work.micro_batches, strict=True)):
            if kind == "recompute" and not pipeline.schedule.recomputes(micro_batch):
                continue
            spans.append(Span(kind, stage, micro_batch, float(start[i, 0]), float(end[i, 0])))

    free = _run(costs, pipeline.schedule, note)[:, 0]
    busy = [0.0] * count
    for span in spans:
        if span.kind in BUSY:
            busy[span.stage] += span.end_s - span.start_s
    updates = [
        Span("update", stage, None, float(start), float(start) + cost.update_s)
        for stage, (start, cost) in enumerate(zip(free, pipeline.stages, strict=True))
    ]
    step = max(update.end_s for update in updates)
    return Timeline(
        step_time_s=step,
        busy_s=tuple(busy),
        bubble=1 - sum(busy) / (count * step) if step else 0.0,
        spans=tuple([x for x in spans if not x.kind.startswith("send")] + [x for x in updates if x.end_s > x.start_s]),
        transfers=tuple(x for x in spans if x.kind.startswith("send")),
    )


def step_times(costs: Costs, schedule: Schedule) -> Seconds:
    """Seconds a step of each pipeline (column) of ``costs``; what ``simulate`` says of it, without the spans."""
    ends: Seconds = _run(costs, schedule, None) + costs.update_s
    longest: Seconds = ends.max(axis=0)
    return longest


@dataclass(frozen=True)
class _Work:
    """The operations of one direction on one tick: stages in equal steps, and each one's micro-batch."""

    stages: range
    micro_batches: tuple[int, ...]

    def those(self, keep: range) -> _Work:
        """What is left of it on the stages of ``keep``."""
        pairs = [(s, k) for s, k in zip(self.stages, self.micro_batches, strict=True) if s in keep]
        stages = range(pairs[0][0], pairs[-1][0] + 1, self.stages.step) if pairs else range(0)
        return _Work(stages, tuple(k for _, k in pairs))

    def rows(self, shift: int = 0) -> slice:
        """Where the stages, each moved by ``shift``, stand in an array of a row a stage."""
        return slice(self.stages.start + shift, self.stages.stop + shift, self.stages.step)


@dataclass(frozen=True)
class _Tick:
    """All operations of one tick, and those of them that send their result on."""

    forward: _Work
    backward: _Work
    send_forward: _Work
    send_backward: _Work
    recompute: NDArray[np.bool_]  # a row a backward: does it recompute first


@functools.lru_cache(maxsize=32)
def _ticks(schedule: Schedule, count: int) -> tuple[_Tick, ...]:
    """Where each operation stands.

    gpipe: forward of micro-batch k on stage s at tick s + k; 1f1b: at s + 2k.  The backwards start
    on the last stage right after its last forward (gpipe) or its first one (1f1b), and go up a
    stage a tick.
    """
    pace, m = (1, schedule.micro_batches) if schedule.name == "gpipe" else (2, schedule.micro_batches)
    turn = count + m - 1 if schedule.name == "gpipe" else count
    made = []
    for tick in range(turn + count + pace * (m - 1)):
        ahead = [(s, (tick - s) // pace) for s in range(count) if (tick - s) % pace == 0]
        back = [(s, tick - turn - (count - 1 - s)) for s in range(count)]
        back = [(s, late // pace) for s, late in back if late % pace == 0]
        if schedule.name == "gpipe" and schedule.last_first:
            back = [(s, m - 1 - k) for s, k in back]
        forward, backward = (
            _Work(
                range(work[0][0], work[-1][0] + 1, pace) if work else range(0),
                tuple(k for _, k in work),
            )
            for work in ([(s, k) for s, k in side if 0 <= k < m] for side in (ahead, back))
        )
        made.append(
            _Tick(
                forward=forward,
                backward=backward,
                send_forward=forward.those(range(count - 1)),
                send_backward=backward.those(range(1, count)),
                recompute=np.array([[schedule.recomputes(k)] for k in backward.micro_batches]).reshape(-1, 1),
            )
        )
    return tuple(made)


def _run(costs: Costs, schedule: Schedule, note: Callable[[Kind, _Work, Seconds, Seconds], None] | None) -> Seconds:
    """When each stage (row) of each pipeline (column) is through with its operations and transfers."""
    shape = costs.forward_s.shape
    # Per stage: when its last operation ended, when it may compute again, when its next inputs are there.
    # A reader stands on the tick after its writer's, so one place a stage and direction is enough.
    computed, free, activation, gradient = (np.zeros(shape) for _ in range(4))
    blocks = schedule.sends == "block"

    def send(kind: Kind, work: _Work, to: int, cost: Seconds, arrival: Seconds) -> None:
        sender, reader = work.rows(), work.rows(to)
        # Of a queue, the transfer before this one ended when its own reader's input arrived.
        start = np.maximum(computed[sender], computed[reader] if blocks else arrival[reader])
        arrival[reader] = end = start + cost
        if blocks:
            free[sender] = np.maximum(free[sender], end)
        if note:
            note(kind, work, start, end)

    for tick in _ticks(schedule, shape[0]):
        if tick.forward.micro_batches:
            rows = tick.forward.rows()
            start = np.maximum(free[rows], activation[rows])
            computed[rows] = free[rows] = end = start + costs.forward_s[rows]
            if note:
                note("forward", tick.forward, start, end)
        if tick.backward.micro_batches:
            rows = tick.backward.rows()
            start = np.maximum(free[rows], gradient[rows])
            middle = start + tick.recompute * costs.recompute_s[rows]
            computed[rows] = free[rows] = end = middle + costs.backward_s[rows]
            if note:
                note("recompute", tick.backward, start, middle)
                note("backward", tick.backward, middle, end)
        if tick.send_forward.micro_batches:
            cost = costs.send_forward_s[tick.send_forward.rows()]
            send("send_forward", tick.send_forward, 1, cost, activation)
        if tick.send_backward.micro_batches:
            cost = costs.send_backward_s[tick.send_backward.rows(-1)]
            send("send_backward", tick.send_backward, -1, cost, gradient)
    return free
