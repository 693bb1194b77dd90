"""Exact contiguous min–max partitioning."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["min_max"]


def min_max(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """The numbers of layers a stage that make the costliest stage as cheap as possible.

    Exact: no contiguous partition into ``stages`` non-empty runs has a smaller largest sum.  Among
    the best the later stages are filled as far as the optimum allows, from the last one on, so
    that ties fall towards lighter early stages.  ``costs`` are non-negative; needs
    1 ≤ stages ≤ len(costs).  The optimum is the sum of one run of layers; it is found by
    bisection over such sums, not over real numbers, so that it is exact in floating point too.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} layers cannot fill {stages} stages")
    sums = [0.0, *accumulate(costs)]
    # ``high`` is always the largest run of a partition that exists, and nothing below ``low`` exists.
    low, high = 0.0, _largest_run(sums, stages, sums[-1])
    while low < (middle := low + (high - low) / 2) < high:
        if _try_fill(sums, stages, middle) is None:
            low = middle
        else:
            high = _largest_run(sums, stages, middle)
    partition = _try_fill(sums, stages, high)
    assert partition is not None
    return partition


def _largest_run(sums: Sequence[float], stages: int, limit: float) -> float:
    """The largest stage of the partition that stays within a feasible ``limit``."""
    partition = _try_fill(sums, stages, limit)
    assert partition is not None
    ends = [0, *accumulate(partition)]
    return max(sums[b] - sums[a] for a, b in zip(ends, ends[1:], strict=False))


def _try_fill(sums: Sequence[float], stages: int, limit: float) -> tuple[int, ...] | None:
    end, sizes = len(sums) - 1, []
    for left in range(stages - 1, -1, -1):
        # The earliest start that keeps the run within the limit, leaving one layer a stage before.
        start = bisect.bisect_left(sums, sums[end] - limit, left, end)
        # ``sums[end] - limit`` is rounded: settle by the comparison that counts.
        while start > left and sums[end] - sums[start - 1] <= limit:
            start -= 1
        while start < end and sums[end] - sums[start] > limit:
            start += 1
        if start == end:
            return None
        sizes.append(end - start)
        end = start
    return tuple(reversed(sizes)) if end == 0 else None
