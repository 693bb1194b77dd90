"""The median's interval against the published ranks, its coverage by trying, and verdicts on made-up series."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import series
from bench.series import median_interval, summarise


# Ranks (from 1) of the 95 % interval: David and Nagaraja 2003, section 7.1, by the binomial distribution.
@pytest.mark.parametrize(
    ("n", "ranks"),
    [(1, (1, 1)), (2, (1, 2)), (5, (1, 5)), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (10, (2, 9)), (20, (6, 15)),
     (30, (10, 21)), (100, (40, 61))],
)  # fmt: skip
def test_the_ranks_of_steps_that_do_not_depend_on_each_other(n: int, ranks: tuple[int, int]) -> None:
    # Alternating low and high, so that no autocorrelation widens it, from the middle outwards, so that the
    # bootstrap is no wider.
    outwards = sorted(range(1, n + 1), key=lambda i: abs(i - (n + 1) / 2))
    low, high = median_interval([float(i) for i in outwards])
    assert low <= ranks[0]
    assert high >= ranks[1]
    assert series._rank(n, 0.95) == ranks[0] - 1


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_it_lies_around_the_median(values: list[float]) -> None:
    low, high = median_interval(values)
    ordered = sorted(values)
    assert low <= ordered[(len(values) - 1) // 2]
    assert ordered[len(values) // 2] <= high


def made(kind: str, n: int, generator: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A step of about a second whose true median is 1, with 1 % noise (heavy-tailed: 5 %, without a mean)."""
    noise = generator.standard_normal(n)
    if kind == "dependent":
        noise = generator.standard_normal(n + 50)
        for i in range(1, n + 50):
            noise[i] += 0.5 * noise[i - 1]
        noise = noise[50:]
    if kind == "drifting":
        return 1 + 0.01 * noise + 0.1 * np.arange(n) / n
    if kind == "bimodal":
        return 1 + 0.01 * noise + 0.15 * (generator.random(n) < 0.4)
    if kind == "heavy-tailed":
        return 1 + 0.05 * np.abs(generator.standard_t(1, n))
    return 1 + 0.01 * noise


# The bar is 94 % of 10,000 series where steps are independent, 90 % where each leans on the one before by a half;
# CI tries a tenth of them, whose scatter (0.8 %) lies within what is left to the bar.
@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "bar"), [("independent", 0.94), ("dependent", 0.90)])
@pytest.mark.parametrize("n", [10, 30, 100])
@pytest.mark.timeout(400)
def test_it_covers_the_true_median(n: int, kind: str, bar: float, count: int) -> None:
    generator = np.random.default_rng(n)
    hits = 0
    for _ in range(count):
        low, high = median_interval(made(kind, n, generator).tolist())
        hits += low <= 1 <= high
    assert hits / count >= bar


@pytest.mark.parametrize(
    ("kind", "verdict", "said"),
    [
        ("independent", "stable", ""),
        ("drifting", "drifting", "slower"),
        ("bimodal", "noisy", "two groups"),
        ("heavy-tailed", "noisy", ""),
    ],
)
@pytest.mark.parametrize("n", [30, 100])
def test_a_series_gets_the_right_verdict(kind: str, n: int, verdict: str, said: str) -> None:
    generator = np.random.default_rng(n)
    found = [summarise(made(kind, n, generator).tolist()) for _ in range(200)]
    right = [s for s in found if s.verdict == verdict and said in s.reason]
    assert len(right) >= 180
    assert all(bool(s.reason) == (s.verdict != "stable") for s in found)


def test_a_few_steps_are_no_series() -> None:
    few = summarise([1.0, 1.01, 0.99])
    assert (few.low, few.high, few.verdict) == (0.99, 1.01, "noisy")
    assert "only 3 steps" in few.reason
    assert summarise([2.0] * 10).verdict == "stable"


def test_the_same_series_has_the_same_summary() -> None:
    steps = made("dependent", 30, np.random.default_rng(0)).tolist()
    assert summarise(steps) == summarise(steps)
