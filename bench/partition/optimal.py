"""The partition with the shortest simulated step, found by trying all of them or by a search.

A small problem is settled by simulating every partition.  Beyond that, partitions that are good by
simple bounds (how long the slowest stage takes, what crosses the boundaries) come from dynamic
programming, and the best of them by simulation are improved by moving boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from bench.errors import UserError
from bench.partition.predict import Problem

__all__ = ["Choice", "Infeasible", "optimal"]

Ends = NDArray[np.int64]  # a row a partition: its p + 1 boundaries, 0 … number of layers
Numbers = NDArray[np.float64]

# Up to so many partitions all are simulated, within tenths of a second.
ENUMERATED = 2_000
# How many limits on the slowest stage are tried, and how far above the least one.
LIMITS, WIDEST = 8, 1.5
# How far the limit of the first stage lies above that of the last, and how far from the model's own
# ratio of backward to forward the limits on the two are set.
SLOPES, RATIOS = (-0.3, 0.3), (0.85, 1.0, 1.2)
# How much a limit's partitions value even stages over free boundaries.
EVENNESS, TINY = 1e-3, 1e-300
# From how many of the partitions found boundaries are moved, and how many rounds of moves there are:
# as many as simulate so many operations, within bounds.
STARTS, OPERATIONS, ROUNDS = 6, 40_000_000, (10, 300)
# A gain that is more than rounding.
GAIN = 1e-12


class Infeasible(UserError):
    """No partition keeps every stage within ``max_memory``; ``layer`` is the first that finds no place."""

    def __init__(self, max_memory_bytes: float, layer: int, problem: str) -> None:
        self.layer = layer
        super().__init__("balance.max_memory", f"{max_memory_bytes:.0f}", problem, "allow more, or use more stages")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A partition and what is predicted of it; ``proven``: all partitions were tried, none is faster."""

    partition: tuple[int, ...]
    step_time_s: float
    memory_bytes: tuple[float, ...]
    proven: bool


def optimal(problem: Problem, max_memory_bytes: float | None = None) -> Choice:
    """The partition with the shortest simulated step among those that keep every stage within the limit.

    The same problem always has the same answer.  Raises Infeasible where no partition fits.
    """
    fits = _fits(problem, max_memory_bytes)
    proven = math.comb(len(problem.layers) - 1, problem.stages - 1) <= ENUMERATED
    best = _best_of_all(problem, fits) if proven else _search(problem, fits)
    partition = tuple(int(b - a) for a, b in pairwise(best))
    return Choice(
        partition=partition,
        step_time_s=problem.step_time_s(partition),
        memory_bytes=problem.memory_bytes(partition),
        proven=proven,
    )


def _fits(problem: Problem, max_memory_bytes: float | None) -> NDArray[np.bool_]:
    """[stage, start, end]: may the stage hold the layers from ``start`` up to ``end``?"""
    count, stages = len(problem.layers), problem.stages
    start, end = np.meshgrid(np.arange(count + 1), np.arange(count + 1), indexing="ij")
    fits = np.broadcast_to(start < end, (stages, count + 1, count + 1))
    if max_memory_bytes is None:
        return fits
    memory = np.stack([problem.memory(stage, start, end) for stage in range(stages)])
    fits = fits & (memory <= max_memory_bytes)
    _must_be_feasible(fits, memory, max_memory_bytes)
    return fits


def _must_be_feasible(fits: NDArray[np.bool_], memory: Numbers, max_memory_bytes: float) -> None:
    stages, count = fits.shape[0], fits.shape[1] - 1
    reached = np.zeros(count + 1, dtype=bool)
    reached[0] = True
    furthest = 0
    for stage in range(stages):
        reached = np.logical_or.reduce(fits[stage][reached], axis=0)
        # Each stage still to come needs a layer.
        reached[count - (stages - 1 - stage) + 1 :] = False
        furthest = max([furthest, *np.flatnonzero(reached).tolist()])
    if reached[count]:
        return
    # With other layers a layer can need less than alone, where less enters the stage than enters the layer.
    for layer in range(count):
        least = float(memory[:, : layer + 1, layer + 1 :].min())
        if least > max_memory_bytes:
            raise Infeasible(max_memory_bytes, layer, f"any stage with layer {layer} needs {least:.0f} bytes or more")
    raise Infeasible(
        max_memory_bytes,
        furthest,
        f"layer {furthest} finds no place: {stages} stages filled in order hold at most the {furthest} before it",
    )


def _allowed(fits: NDArray[np.bool_], ends: Ends) -> NDArray[np.bool_]:
    """Which of the partitions have no empty stage and fit."""
    stages = np.arange(fits.shape[0])
    allowed: NDArray[np.bool_] = np.logical_and.reduce(fits[stages, ends[:, :-1], ends[:, 1:]], axis=1)
    return allowed


def _best_of_all(problem: Problem, fits: NDArray[np.bool_]) -> Ends:
    count = len(problem.layers)
    cuts = combinations(range(1, count), problem.stages - 1)
    ends = np.array([(0, *inner, count) for inner in cuts], dtype=np.int64)
    ends = ends[_allowed(fits, ends)]
    best: Ends = ends[np.argmin(problem.step_times(ends))]
    return best


def _search(problem: Problem, fits: NDArray[np.bool_]) -> Ends:
    ends = np.unique(np.array(list(_candidates(problem, fits))), axis=0)
    times = problem.step_times(ends)
    climb = _Climb(problem, fits)
    order = np.argsort(times, kind="stable")
    best = min((climb.improved(ends[i], float(times[i])) for i in order[:STARTS]), key=lambda found: found[0])
    # Then from places around the best one, as long as there are rounds.
    generator = np.random.default_rng(0)
    while climb.rounds > 0:
        start = climb.kicked(best[1], generator)
        best = min(best, climb.improved(start, math.inf), key=lambda found: found[0])
    return best[1]


def _candidates(problem: Problem, fits: NDArray[np.bool_]) -> Iterator[Ends]:
    """For each of several limits on the slowest stage, the partition within it that crosses cheapest."""
    works = _works(problem)
    for work, slope in [*((work, 0.0) for work in works), *((works[0], slope) for slope in SLOPES)]:
        # The least limit within which there is a partition is the work of some stage.
        values = np.unique(work[fits.any(axis=0)])
        shape = np.linspace(1 + slope / 2, 1 - slope / 2, problem.stages)
        low, high = 0, len(values) - 1
        while low < high:
            middle = (low + high) // 2
            if _cheapest_crossing(problem, fits, work, values[middle] * shape) is None:
                low = middle + 1
            else:
                high = middle
        for limit in np.geomspace(1, WIDEST, LIMITS) * values[low]:
            found = _cheapest_crossing(problem, fits, work, limit * shape)
            if found is not None:
                yield found


def _works(problem: Problem) -> list[Numbers]:
    """[start, end]: what the layers weigh as one stage, in the senses that limit a schedule's pace.

    1f1b goes at the pace of the stage with the most forward and backward work.  gpipe goes through
    its forwards and its backwards one after the other, each at the pace of its own slowest stage,
    and blocking sends make 1f1b's neighbours wait for each other in turn: there, beside the sum,
    several ratios between a limit on the forwards and one on the backwards.
    """
    schedule, sums, crossing = problem.schedule, problem.sums, problem.transfer_s.copy()
    crossing[[0, -1]] = 0
    forward = sums["forward_s"][None, :] - sums["forward_s"][:, None]
    backward = sums["backward_s"][None, :] - sums["backward_s"][:, None]
    if schedule.micro_batches > 1 and schedule.checkpoint != "never":
        backward = backward + forward
    if schedule.sends == "block":
        forward, backward = (side + crossing[:, None] + crossing[None, :] for side in (forward, backward))
    works = [forward + backward]
    usual = float(backward[0, -1] / forward[0, -1]) if forward[0, -1] else 0.0
    if usual and (schedule.name == "gpipe" or schedule.sends == "block"):
        works += [np.maximum(forward, backward / (usual * ratio)) for ratio in RATIOS]
    return works


def _cheapest_crossing(problem: Problem, fits: NDArray[np.bool_], work: Numbers, limits: Numbers) -> Ends | None:
    """The partition with the least time on its boundaries, of those whose stages weigh at most their limits.

    None if there is no such partition.
    """
    count, stages = len(problem.layers), problem.stages
    there_and_back = 2 * problem.transfer_s
    there_and_back[count] = 0
    # Where crossings tie, for want of transfer times above all, even stages: the sum of squares.
    evenness = EVENNESS * work * (work / max(float(work[0, count]), TINY))
    score = np.full(count + 1, np.inf)
    score[count] = 0
    after = []
    for stage in reversed(range(stages)):
        through = np.where(fits[stage] & (work <= limits[stage]), evenness + (there_and_back + score), np.inf)
        after.append(np.argmin(through, axis=1))
        score = through.min(axis=1)
    if not math.isfinite(score[0]):
        return None
    ends = [0]
    for step in reversed(after):
        ends.append(int(step[ends[-1]]))
    return np.array(ends, dtype=np.int64)


class _Climb:
    """Moves boundaries as long as that shortens the step and there are rounds left."""

    def __init__(self, problem: Problem, fits: NDArray[np.bool_]) -> None:
        self.problem, self.fits, self.moves = problem, fits, _moves(problem.stages)
        operations = 2 * problem.schedule.micro_batches * problem.stages * len(self.moves)
        self.rounds = min(max(OPERATIONS // operations, ROUNDS[0]), ROUNDS[1])

    def improved(self, ends: Ends, time: float) -> tuple[float, Ends]:
        """(step time, boundaries) reached by the best move, again and again."""
        while self.rounds > 0:
            self.rounds -= 1
            near = self._possible(ends + self.moves)
            if not len(near):
                break
            times = self.problem.step_times(near)
            best = int(np.argmin(times))
            if times[best] >= time * (1 - GAIN):
                break
            ends, time = near[best], float(times[best])
        return time, ends

    def kicked(self, ends: Ends, generator: np.random.Generator) -> Ends:
        """The boundaries after three moves at random, as far as they are possible."""
        for _ in range(3):
            near = self._possible(ends + self.moves)
            if len(near):
                ends = generator.choice(near)
        return ends

    def _possible(self, ends: Ends) -> Ends:
        ends = ends[((ends[:, :-1] >= 0) & (ends[:, 1:] <= len(self.problem.layers))).all(axis=1)]
        return ends[_allowed(self.fits, ends)]


def _moves(stages: int) -> Ends:
    """Each boundary by up to four layers, each run of boundaries by one, any two boundaries by one each."""
    inner = range(1, stages)
    moves: set[tuple[tuple[int, int], ...]] = set()
    moves |= {((boundary, step),) for boundary in inner for step in (-4, -3, -2, -1, 1, 2, 3, 4)}
    moves |= {tuple((b, step) for b in range(a, z + 1)) for a, z in combinations(inner, 2) for step in (-1, 1)}
    moves |= {((a, one), (z, two)) for a, z in combinations(inner, 2) for one in (-1, 1) for two in (-1, 1)}
    rows = np.zeros((len(moves), stages + 1), dtype=np.int64)
    for row, move in zip(rows, sorted(moves), strict=True):
        for boundary, step in move:
            row[boundary] = step
    return rows
