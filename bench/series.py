"""What a series of step times says, and how sure it is: median, interval, verdict.

Steps are not independent: a machine that is slow now is slow in the next step as well.  The interval
widens with the autocorrelation that is seen, and the verdict says where a series is no basis for a
figure at all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["Summary", "Verdict", "median_interval", "summarise"]

Verdict = Literal["stable", "drifting", "noisy"]
Series = NDArray[np.float64]

RESAMPLES = 500
# Fewer steps than this are no series: their range is reported, and the verdict says so.
FEWEST = 6
# A trend counts from this share of the median over the whole series, and from this many standard errors.
DRIFT, SURE = 0.02, 2.58
DEPENDENT = 0.4  # lag-1 autocorrelation, where it is significant too
WIDE = 0.05  # half the interval over the median
OUTLIER, OUTLIERS = 4.0, 0.03  # median absolute deviations (as standard deviations) above the median; share of steps
APART, TWO_MODES = 4.0, 0.2  # gap over the spread of either side; share of steps on the smaller side


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A series of seconds.  ``low``, ``high``: 95 % interval of the median.  ``autocorrelation``: lag 1,
    corrected for its bias, 0 where too few steps tell.  ``reason`` is empty for ``stable``."""

    count: int
    median: float
    mean: float
    p5: float
    p95: float
    low: float
    high: float
    autocorrelation: float
    verdict: Verdict
    reason: str


def summarise(values: Sequence[float]) -> Summary:
    """The summary of at least one step time, in the order of the steps; the same each time."""
    series = np.asarray(values, dtype=np.float64)
    low, high = median_interval(values)
    verdict, reason = _verdict(series, low, high)
    p5, median, p95 = np.percentile(series, [5, 50, 95])
    return Summary(
        count=len(series),
        median=float(median),
        mean=float(series.mean()),
        p5=float(p5),
        p95=float(p95),
        low=low,
        high=high,
        autocorrelation=_autocorrelation(series),
        verdict=verdict,
        reason=reason,
    )


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The interval of the median: the hull of two, each of which errs where the other does not.

    One is from order statistics by the binomial distribution (David and Nagaraja, Order Statistics,
    2003, §7.1), its distance from the middle stretched by √((1+ρ)/(1−ρ)) for a lag-1
    autocorrelation ρ > 0; the other a circular block bootstrap (Politis and Romano 1992) of the
    median with blocks of ⌈n^(1/3)⌉ (1 where ρ ≤ 0).  With fewer than six values no pair of order
    statistics attains 95 % and the range is returned.
    """
    series = np.asarray(values, dtype=np.float64)
    n = len(series)
    ordered = np.sort(series)
    k = _rank(n, confidence)
    rho = _autocorrelation(series)
    if rho > 0:
        distance = (n - 1) / 2 - k
        k = max(0, math.floor((n - 1) / 2 - distance * math.sqrt((1 + rho) / (1 - rho))))
    low, high = float(ordered[k]), float(ordered[n - 1 - k])
    if n < FEWEST:
        return low, high
    below, above = _bootstrap(series, math.ceil(n ** (1 / 3)) if rho > 0 else 1, confidence)
    return min(low, below), max(high, above)


def _rank(n: int, confidence: float) -> int:
    """The k of the narrowest symmetric pair (k from 0, n − 1 − k) with at least ``confidence``, or 0."""
    outside, best = 0, 0  # 2^n times the probability that the median lies below the k-th smallest
    for k in range((n + 1) // 2):
        outside += math.comb(n, k)
        if 1 - 2 * outside / 2**n < confidence:
            break
        best = k
    return best


@functools.lru_cache(maxsize=64)
def _resamples(n: int, block: int) -> NDArray[np.intp]:
    """The same each time, so that the same steps give the same interval."""
    generator = np.random.default_rng(0)
    starts = generator.integers(n, size=(RESAMPLES, math.ceil(n / block)))
    return (starts[:, :, None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :n] % n


def _bootstrap(series: Series, block: int, confidence: float) -> tuple[float, float]:
    n = len(series)
    picked = _resamples(n, block)
    middle = sorted({(n - 1) // 2, n // 2})
    # np.median does the same with more ado, and a study has thousands of series.
    medians = np.sort(np.partition(series[picked], middle, axis=1)[:, middle].mean(axis=1))
    tail = (1 - confidence) / 2
    return float(medians[math.floor(tail * RESAMPLES)]), float(medians[math.ceil((1 - tail) * RESAMPLES) - 1])


def _autocorrelation(series: Series) -> float:
    """Lag-1 autocorrelation, corrected for its bias in short series (Kendall 1954: −(1 + 4ρ)/n), within ±0.9."""
    n = len(series)
    centred = series - series.mean()
    square = float((centred**2).sum())
    if n < FEWEST or square <= 0:
        return 0.0
    raw = float((centred[1:] * centred[:-1]).sum()) / square
    return min(0.9, max(-0.9, (n * raw + 1) / (n - 4)))


def _verdict(series: Series, low: float, high: float) -> tuple[Verdict, str]:
    n, median = len(series), float(np.median(series))
    if n < FEWEST:
        return "noisy", f"only {n} steps: no interval can be had"
    trend, z = _trend(series)
    if abs(trend) > DRIFT * median and abs(z) > SURE:
        word = "slower" if trend > 0 else "faster"
        return "drifting", f"from the first to the last step it got {abs(trend) / median:.1%} {word}"
    if (gap := _modes(series)) is not None:
        return "noisy", f"steps fall into two groups, {gap / median:.1%} apart"
    spread = 1.4826 * float(np.median(np.abs(series - median)))
    far = int((np.abs(series - median) > OUTLIER * spread).sum())
    if far >= max(2, OUTLIERS * n):
        return "noisy", f"{far} of {n} steps lie far from the others"
    rho = _autocorrelation(series)
    if rho > DEPENDENT and rho > SURE / math.sqrt(n):
        return "noisy", f"steps depend on the ones before (autocorrelation {rho:.2f})"
    if (high - low) / 2 > WIDE * median:
        return "noisy", f"the median is known to ±{(high - low) / 2 / median:.1%} only"
    return "stable", ""


def _trend(series: Series) -> tuple[float, float]:
    """(rise from the first to the last step by Theil and Sen's slope, standard errors of Mann and Kendall's test).

    The test's variance is widened for the autocorrelation of what the slope leaves over.
    """
    n = len(series)
    i, j = _pairs(n)
    slope = float(np.median((series[j] - series[i]) / (j - i)))
    score = float(np.sign(series[j] - series[i]).sum())
    rho = max(0.0, _autocorrelation(series - slope * np.arange(n)))
    variance = n * (n - 1) * (2 * n + 5) / 18 * (1 + rho) / (1 - rho)
    return slope * (n - 1), (score - math.copysign(1, score)) / math.sqrt(variance) if score else 0.0


@functools.lru_cache(maxsize=64)
def _pairs(n: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    return np.triu_indices(n, 1)


def _modes(series: Series) -> float | None:
    """The gap between two groups of steps, where there are two; None otherwise."""
    ordered = np.sort(series)
    n = len(ordered)
    least = max(2, math.ceil(TWO_MODES * n))
    if n < 2 * least:
        return None
    gaps = np.diff(ordered)[least - 1 : n - least]
    place = int(np.argmax(gaps)) + least
    within = max(float(np.std(ordered[:place])), float(np.std(ordered[place:])))
    gap = float(ordered[place] - ordered[place - 1])
    return gap if gap > APART * within and gap > 0.01 * float(np.median(series)) else None
