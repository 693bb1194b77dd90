"""The exact partitioner against brute force."""

from __future__ import annotations

import random
import time
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.partition.solver import min_max


def largest(costs: list[float], partition: tuple[int, ...]) -> float:
    start, worst = 0, 0.0
    for size in partition:
        worst, start = max(worst, sum(costs[start : start + size])), start + size
    return worst


def brute_force(costs: list[float], stages: int) -> float:
    count = len(costs)
    best = float("inf")
    for cuts in combinations(range(1, count), stages - 1):
        ends = (0, *cuts, count)
        best = min(best, max(sum(costs[a:b]) for a, b in zip(ends, ends[1:], strict=False)))
    return best


def test_equals_brute_force_on_2000_random_vectors() -> None:
    generator = random.Random(0)
    for _ in range(2000):
        count = generator.randint(1, 14)
        stages = generator.randint(1, min(6, count))
        # Integers as well as reals: ties and zeros are where a bisection goes wrong.
        if generator.random() < 0.5:
            costs: list[float] = [generator.randint(0, 5) for _ in range(count)]
        else:
            costs = [generator.lognormvariate(0, 1) for _ in range(count)]
        found = largest(costs, min_max(costs, stages))
        assert found == pytest.approx(brute_force(costs, stages), rel=1e-12)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=60), st.data())
def test_every_layer_once_and_no_empty_stage(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    partition = min_max(costs, stages)
    assert len(partition) == stages
    assert sum(partition) == len(costs)
    assert min(partition) >= 1


def test_2000_layers_into_256_stages_in_under_2_s() -> None:
    costs = [random.Random(1).lognormvariate(0, 1) for _ in range(2000)]
    start = time.monotonic()
    min_max(costs, 256)
    assert time.monotonic() - start < 2


def test_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="2 layers cannot fill 3 stages"):
        min_max([1, 1], 3)
