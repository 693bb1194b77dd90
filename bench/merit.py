"""What is derived from raw steps: median, its interval, throughput, speed-up."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scipy.stats import binom

from bench.factors import Factors
from bench.record import Record

__all__ = ["Merit", "median_interval", "merits"]


@dataclass(frozen=True, kw_only=True)
class Merit:
    """A run's derived figures; None where they do not exist.  Units as in ``schema``."""

    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    throughput: float
    throughput_low: float
    throughput_high: float
    speedup: float | None
    ratio_to_one_stage: float | None


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The distribution-free interval of the median from order statistics, by the binomial distribution.

    The narrowest symmetric pair with at least ``confidence``; with fewer than six values no pair
    attains 95 % and the range is returned.  Assumes independent steps.  Source: David and Nagaraja,
    Order Statistics, 3rd edition, 2003, section 7.1.
    """
    ordered = sorted(values)
    n = len(ordered)
    for k in range((n - 1) // 2, 0, -1):
        if 1 - 2 * binom.cdf(k, n, 0.5) >= confidence:
            return ordered[k], ordered[n - 1 - k]
    return ordered[0], ordered[-1]


def _usable(record: Record) -> bool:
    return record.kind == "cell" and record.status == "ok" and any(not s.warmup for s in record.steps)


def _times(record: Record) -> list[float]:
    return [s.time_s for s in record.steps if not s.warmup]


def _setting(f: Factors, hardware: str, synthetic: bool) -> tuple[object, ...]:
    """What must be equal for a speed-up to mean anything."""
    return (
        f.model,
        f.granularity,
        f.image_size,
        f.num_classes,
        f.batch_size,
        f.precision,
        f.optimizer,
        f.data,
        f.seed,
        f.device,
        hardware,
        synthetic,
    )


def _one_stage_key(r: Record) -> tuple[object, ...]:
    f = r.factors
    return (_setting(f, r.hardware, r.synthetic), f.library, f.micro_batches, f.checkpoint)


def merits(records: Iterable[Record]) -> dict[str, Merit]:
    """The figures of every usable run by run id.

    The baseline is the median throughput over the trials of the baseline cell with the same model,
    input, mini-batch, precision, optimizer, data, seed and hardware.
    """
    usable = [r for r in records if _usable(r)]
    throughput = {r.run_id: r.factors.batch_size / statistics.median(_times(r)) for r in usable}
    baselines: dict[object, list[float]] = defaultdict(list)
    one_stage: dict[object, list[float]] = defaultdict(list)
    for r in usable:
        if r.baseline:
            baselines[_setting(r.factors, r.hardware, r.synthetic)].append(throughput[r.run_id])
        if r.factors.stages == 1:
            one_stage[_one_stage_key(r)].append(throughput[r.run_id])
    result = {}
    for r in usable:
        low, high = median_interval(_times(r))
        base = baselines.get(_setting(r.factors, r.hardware, r.synthetic))
        own = one_stage.get(_one_stage_key(r))
        through = throughput[r.run_id]
        # Stages that share a GPU prove correctness; a speed-up of theirs would be a wrong number.
        meaningful = not r.factors.share_devices
        result[r.run_id] = Merit(
            step_time_s=statistics.median(_times(r)),
            step_time_low_s=low,
            step_time_high_s=high,
            throughput=through,
            throughput_low=r.factors.batch_size / high,
            throughput_high=r.factors.batch_size / low,
            speedup=through / statistics.median(base) if base and meaningful else None,
            ratio_to_one_stage=through / statistics.median(own) if own and meaningful else None,
        )
    return result
