"""A study's figure: what the trials of one cell say together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

__all__ = ["FEWEST", "Figure", "over_trials"]

# Fewer trials than these give no interval worth the name: their range is told instead.
FEWEST = 5

Spread = Literal["interval", "range", "none"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The mean over ``trials`` process groups; ``low`` and ``high`` are its 95 % interval, or the trials' range.

    ``spread`` says which of both; ``none`` for a single trial, where they equal the value.
    """

    value: float
    low: float
    high: float
    spread: Spread
    trials: int

    @property
    def words(self) -> str:
        """What low and high are, for people."""
        return {"interval": "95 % interval", "range": "range", "none": ""}[self.spread]


def over_trials(values: Sequence[float]) -> Figure:
    """The figure of at least one trial, each of them its own steps' median.

    From five trials on Student's t interval of the mean: trials are process groups of their own, so
    that they do not depend on each other as steps do, and a median of many steps is nearly normal.
    """
    n, mean = len(values), statistics.fmean(values)
    if n < FEWEST:
        spread: Spread = "none" if n == 1 else "range"
        return Figure(value=mean, low=min(values), high=max(values), spread=spread, trials=n)
    from scipy import stats  # slow to import, and needed by few

    half = float(stats.t.ppf(0.975, n - 1)) * float(np.std(values, ddof=1)) / n**0.5
    return Figure(value=mean, low=mean - half, high=mean + half, spread="interval", trials=n)
