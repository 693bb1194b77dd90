"""The median's interval against the published ranks, and its coverage by trying."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.merit import median_interval


# Ranks (from 1) of the 95 % interval: David and Nagaraja 2003, section 7.1, by the binomial distribution.
@pytest.mark.parametrize(
    ("n", "ranks"),
    [(1, (1, 1)), (2, (1, 2)), (5, (1, 5)), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (10, (2, 9)), (20, (6, 15)),
     (30, (10, 21)), (100, (40, 61))],
)  # fmt: skip
def test_the_ranks(n: int, ranks: tuple[int, int]) -> None:
    values = [float(i) for i in range(1, n + 1)]
    random.Random(n).shuffle(values)
    assert median_interval(values) == ranks


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_it_lies_around_the_median(values: list[float]) -> None:
    low, high = median_interval(values)
    ordered = sorted(values)
    assert low <= ordered[(len(values) - 1) // 2]
    assert ordered[len(values) // 2] <= high


def test_it_covers_the_true_median_as_often_as_it_says() -> None:
    source = random.Random(0)
    hits = 0
    for _ in range(2000):
        low, high = median_interval([source.expovariate(1.0) for _ in range(10)])
        hits += low <= 0.6931471805599453 <= high
    # Exactly 97.85 % for ten values; 2000 tries scatter by 0.3 %.
    assert 0.965 < hits / 2000 < 0.99
