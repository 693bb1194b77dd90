"""A figure over trials: an interval from five on, before that a range that is called so."""

from __future__ import annotations

import numpy as np
import pytest

from bench.trials import over_trials


def test_one_trial_has_no_spread() -> None:
    figure = over_trials([2.0])
    assert (figure.value, figure.low, figure.high, figure.spread, figure.trials) == (2.0, 2.0, 2.0, "none", 1)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_below_five_it_is_the_range(n: int) -> None:
    figure = over_trials([float(i) for i in range(n)])
    assert (figure.low, figure.high, figure.words) == (0.0, n - 1.0, "range")


def test_five_by_hand() -> None:
    """Mean 3, standard deviation √2.5, t(0.975, 4) = 2.776 (a printed table's)."""
    figure = over_trials([1.0, 2.0, 3.0, 4.0, 5.0])
    assert figure.spread == "interval"
    assert figure.value == 3.0
    assert figure.high - 3.0 == pytest.approx(2.776 * 2.5**0.5 / 5**0.5, rel=1e-3)


@pytest.mark.parametrize("n", [5, 10, 20])
def test_it_covers_the_true_mean(n: int) -> None:
    generator = np.random.default_rng(n)
    tries = 1000
    covered = 0
    for _ in range(tries):
        figure = over_trials((1 + 0.02 * generator.standard_normal(n)).tolist())
        covered += figure.low <= 1 <= figure.high
    assert covered / tries == pytest.approx(0.95, abs=0.025)
