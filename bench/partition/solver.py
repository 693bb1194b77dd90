"""Exact contiguous min–max partitioning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

__all__ = ["min_max", "min_max_of"]


def min_max(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """The numbers of layers a stage that make the costliest stage as cheap as possible.

    Exact: no partition of the layers, in their order, into ``stages`` non-empty stages has a
    smaller largest sum.  Ties go to the partition that is better balanced early on: of the best by
    all p stages the one whose first p−1 stages have the smallest largest sum, of those the one
    whose first p−2 have, and so on; what is still tied (layers of no cost) has more layers in the
    later stages, the last stage first.  That names one partition for any costs.

    ``costs`` are finite and non-negative, in any unit, one a layer; floats are taken at their exact
    value, so that no tie is settled by rounding.  Raises ValueError for other costs and unless
    1 ≤ stages ≤ len(costs).  Time O(layers · stages).
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} layers cannot fill {stages} stages")
    sums = [0, *accumulate(_exact(costs))]
    bounds = _bounds(sums, stages)
    sizes: list[int] = []
    end = count
    for q in range(stages, 0, -1):
        # The fullest last stage leaves the shortest prefix, and a shorter prefix is never worse.
        start = end - 1
        while start > q - 1 and sums[end] - sums[start - 1] <= bounds[q - 1][end]:
            start -= 1
        sizes.append(end - start)
        end = start
    return tuple(reversed(sizes))


def _exact(costs: Sequence[float]) -> list[int]:
    """The costs as integers of one common unit."""
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise ValueError("costs must be finite and not negative")
    ratios = [cost.as_integer_ratio() for cost in costs]
    # The denominators of floats are powers of two: the largest is a multiple of each.
    unit = max(below for _, below in ratios)
    return [above * (unit // below) for above, below in ratios]


def _bounds(sums: Sequence[int], stages: int) -> list[list[int]]:
    """[q − 1][k]: the smallest largest sum of the first k layers in q stages, where k layers can be needed.

    The best last stage starts where the bound of the layers before it, which grows with the start,
    crosses the stage's own sum, which falls; that start only grows with k.
    """
    count = len(sums) - 1
    table = [list(sums)]
    for q in range(2, stages + 1):
        before, bound = table[-1], [0] * (count + 1)
        start = q - 1
        for k in range(q, count - (stages - q) + 1):
            while start < k - 1 and before[start] < sums[k] - sums[start]:
                start += 1
            best = max(before[start], sums[k] - sums[start])
            if start > q - 1:
                best = min(best, sums[k] - sums[start - 1])
            bound[k] = best
        table.append(bound)
    return table


def min_max_of(costs: Sequence[NDArray[np.float64]]) -> tuple[int, ...]:
    """As ``min_max``, for costs that are no sum over layers or differ from stage to stage.

    ``costs[s][i, k]``, a matrix a stage, is what stage s costs with the layers from i up to, not including, k;
    it may not fall as k grows.  Same ties.  Time O(layers² · stages).
    """
    stages, count = len(costs), costs[0].shape[0] - 1
    if not 1 <= stages <= count:
        raise ValueError(f"{count} layers cannot fill {stages} stages")
    start, end = np.meshgrid(np.arange(count + 1), np.arange(count + 1), indexing="ij")
    bound = np.where(np.arange(count + 1) == 0, 0.0, np.inf)
    bounds = []
    for cost in costs:
        through = np.where(start < end, np.maximum(bound[:, None], cost), np.inf)
        bound = through.min(axis=0)
        bounds.append(bound)
    sizes: list[int] = []
    last = count
    for q in range(stages - 1, -1, -1):
        before = bounds[q - 1] if q else np.where(np.arange(count + 1) == 0, 0.0, np.inf)
        good = np.maximum(before[:last], costs[q][:last, last]) <= bounds[q][last]
        # Of the starts that reach the bound those with the best stages before them, of those the earliest.
        least = before[:last][good].min()
        first = int(np.flatnonzero(good & (before[:last] <= least))[0])
        sizes.append(last - first)
        last = first
    return tuple(reversed(sizes))
