"""Where a step's time went: bubble, overlap and an account that adds up, from the spans of a traced step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from bench.jobs import SpanResult
from bench.partition.simulate import Pipeline, Schedule, StageCost, simulate

__all__ = ["Account", "Lane", "account", "ideal_bubble"]

BUSY = ("forward", "recompute", "backward", "backward_weight")
# Devices overlap where two of them are busy for more than this share of the step.
OVERLAP = 0.01

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One device in the traced step, in seconds: ``busy_s`` forwards, recomputations and backwards;
    ``idle_s`` the rest of the step's span, of which ``waiting_s`` lies between its first and its last work."""

    stage: int
    busy_s: float
    idle_s: float
    waiting_s: float


@dataclass(frozen=True, kw_only=True)
class Account:
    """The traced step of median length, in seconds.

    ``bubble``: 1 − busy/(devices × span), the span from the first forward's start to the last
    backward's end; ``ideal_bubble`` is its schedule's with even stages and free boundaries, None
    where no formula is known.  ``overlap``: were ever two devices busy at once?

    ``step_time_s`` = ``ideal_s`` (all forwards, backwards and updates, evenly over the devices)
    + ``bubble_s`` (what the schedule adds for even stages) + ``imbalance_s`` (what the measured
    stages add to that) + ``recompute_s`` (what recomputation adds to that) + ``communication_s``
    (from there to the measured end of the last update: transfers, waiting, the library's own
    work between) + ``unexplained_s`` (before the first forward and after the last update).  Where the
    schedule is not simulated ``bubble_s``, ``imbalance_s`` and ``recompute_s`` are None and all of it
    is in ``communication_s``.
    """

    step_time_s: float
    bubble: float
    ideal_bubble: float | None
    overlap: bool
    ideal_s: float
    bubble_s: float | None
    imbalance_s: float | None
    recompute_s: float | None
    communication_s: float
    unexplained_s: float
    lanes: tuple[Lane, ...]


def ideal_bubble(schedule: str, stages: int, virtual_stages: int, micro_batches: int, *, overlap: bool) -> float | None:
    """The bubble of even stages: (p−1)/(m+p−1) for gpipe and 1f1b, (p−1)/(v·m+p−1) for interleaved_1f1b.

    1 − 1/p where stages cannot overlap.  None for schedules without a formula here.  Sources:
    GPipe (Huang et al. 2019, §2.3) and PipeDream-Flush/interleaving (Narayanan et al. 2021, §2.2).
    """
    if not overlap:
        return 1 - 1 / stages
    if schedule in ("gpipe", "1f1b"):
        return (stages - 1) / (micro_batches + stages - 1)
    if schedule == "interleaved_1f1b":
        return (stages - 1) / (virtual_stages * micro_batches + stages - 1)
    return None


def union_s(intervals: Iterable[Interval]) -> float:
    """The length of a union of intervals."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        if last > end:
            total += last - max(first, end)
            end = last
    return total


def _at_once_s(intervals: Iterable[Interval]) -> float:
    """For how long at least two of the intervals, no two of which are of one device and overlap, run at once."""
    events = sorted([(t, 1) for t, _ in intervals] + [(t, -1) for _, t in intervals])
    total, running, since = 0.0, 0, 0.0
    for at, change in events:
        if running >= 2:
            total += at - since
        running, since = running + change, at
    return total


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for first, last in sorted(intervals):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def _busy(spans: Iterable[SpanResult]) -> list[Interval]:
    return _merged((s.start_s, s.end_s) for s in spans if s.kind in BUSY)


def account(
    spans: Sequence[SpanResult],
    step_times_s: Sequence[float],
    *,
    stages: int,
    schedule: Schedule | None,
    ideal: float | None,
    serial: bool,
) -> Account:
    """The account of the traced step of median length.

    ``step_times_s[i]``: the slowest rank's clock for traced step i.  ``schedule``: the cell's as the
    simulation knows it, None where it does not.  ``serial``: its stages cannot overlap, so that a step is
    the sum of their work.
    """
    order = sorted(range(len(step_times_s)), key=lambda i: step_times_s[i])
    chosen = order[len(order) // 2]
    step = [s for s in spans if s.step == chosen]
    by_device = {k: list(g) for k, g in groupby(sorted(step, key=lambda s: s.stage), key=lambda s: s.stage)}
    work = {device: _busy(of) for device, of in by_device.items()}
    begin = min(intervals[0][0] for intervals in work.values() if intervals)
    end = max(intervals[-1][1] for intervals in work.values() if intervals)
    span = end - begin
    busy = {device: union_s(intervals) for device, intervals in work.items()}
    lanes = tuple(
        Lane(
            stage=device,
            busy_s=busy[device],
            idle_s=span - busy[device],
            waiting_s=work[device][-1][1] - work[device][0][0] - busy[device],
        )
        for device in sorted(work)
    )
    costs = [_cost(by_device.get(device, []), schedule) for device in range(stages)]
    finished = max([end, *(s.end_s for s in step if s.kind == "update")])
    total = step_times_s[chosen]
    micro_batches = schedule.micro_batches if schedule is not None else 1
    work_s = sum((c.forward_s + c.backward_s) * micro_batches + c.update_s for c in costs)
    ideal_s = work_s / stages
    bubble_s = imbalance_s = recompute_s = None
    planned = ideal_s
    if schedule is not None:
        even = _even(costs)
        plain = [StageCost(forward_s=c.forward_s, backward_s=c.backward_s, update_s=c.update_s) for c in costs]
        lengths = [_length(made, schedule, serial) for made in (even, plain, costs)]
        bubble_s, imbalance_s, recompute_s = lengths[0] - ideal_s, lengths[1] - lengths[0], lengths[2] - lengths[1]
        planned = lengths[2]
    return Account(
        step_time_s=total,
        bubble=1 - sum(busy.values()) / (stages * span) if span else 0.0,
        ideal_bubble=ideal,
        overlap=_at_once_s([i for intervals in work.values() for i in intervals]) > OVERLAP * span,
        ideal_s=ideal_s,
        bubble_s=bubble_s,
        imbalance_s=imbalance_s,
        recompute_s=recompute_s,
        communication_s=finished - begin - planned,
        unexplained_s=total - (finished - begin),
        lanes=lanes,
    )


def _cost(spans: Sequence[SpanResult], schedule: Schedule | None) -> StageCost:
    """A device's time a micro-batch: what it did in the step over the number of micro-batches."""
    m = schedule.micro_batches if schedule is not None else 1

    def total(kinds: tuple[str, ...]) -> float:
        return union_s((s.start_s, s.end_s) for s in spans if s.kind in kinds)

    recompute = total(("recompute",))
    # A recomputation may lie within the backward that asked for it.
    backward = total(("recompute", "backward", "backward_weight")) - recompute
    repeats = sum(schedule.recomputes(k) for k in range(m)) if schedule is not None else 1
    return StageCost(
        forward_s=total(("forward",)) / m,
        backward_s=backward / m,
        recompute_s=recompute / max(repeats, 1),
        update_s=total(("update",)),
    )


def _even(costs: Sequence[StageCost]) -> list[StageCost]:
    def mean(of: Callable[[StageCost], float]) -> float:
        return statistics.fmean(of(c) for c in costs)

    cost = StageCost(
        forward_s=mean(lambda c: c.forward_s),
        backward_s=mean(lambda c: c.backward_s),
        update_s=mean(lambda c: c.update_s),
    )
    return [cost] * len(costs)


def _length(costs: Sequence[StageCost], schedule: Schedule, serial: bool) -> float:
    if not serial:
        return simulate(Pipeline(stages=tuple(costs), schedule=schedule)).step_time_s
    repeats = sum(schedule.recomputes(k) for k in range(schedule.micro_batches))
    return sum(
        (c.forward_s + c.backward_s) * schedule.micro_batches + c.recompute_s * repeats + c.update_s for c in costs
    )
