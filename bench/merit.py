"""What is derived from raw steps: median, its interval, throughput, speed-up.

The CSVs and the tables both take their figures from here.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.record import Record
from bench.series import Summary, summarise

__all__ = ["Merit", "merits"]


@dataclass(frozen=True, kw_only=True)
class Merit:
    """A run's derived figures; None where they do not exist.  Units as in ``schema``."""

    steps: Summary
    throughput: float
    throughput_low: float
    throughput_high: float
    speedup: float | None
    ratio_to_one_stage: float | None
    efficiency: float | None


def _usable(record: Record) -> bool:
    return record.kind == "cell" and record.status == "ok" and any(not s.warmup for s in record.steps)


def _times(record: Record) -> list[float]:
    return [s.time_s for s in record.steps if not s.warmup]


def _setting(r: Record) -> tuple[object, ...]:
    """What must be equal for a speed-up to mean anything."""
    f = r.factors
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
        r.hardware,
        r.environment.get("versions", {}).get("torch"),
        r.synthetic,
    )


def _one_stage_key(r: Record) -> tuple[object, ...]:
    f = r.factors
    return (_setting(r), f.library, f.micro_batches, f.checkpoint)


def merits(records: Iterable[Record]) -> dict[str, Merit]:
    """The figures of every usable run by run id.

    The baseline is the median throughput over the trials of the baseline cell with the same model,
    input, mini-batch, precision, optimizer, data, seed, hardware and torch; the one-stage run is the
    library's own with the same micro-batches and checkpointing besides.
    """
    usable = [r for r in records if _usable(r)]
    throughput = {r.run_id: r.factors.batch_size / statistics.median(_times(r)) for r in usable}
    baselines: dict[object, list[float]] = defaultdict(list)
    one_stage: dict[object, list[float]] = defaultdict(list)
    for r in usable:
        if r.baseline:
            baselines[_setting(r)].append(throughput[r.run_id])
        if r.factors.stages == r.factors.virtual_stages == 1:
            one_stage[_one_stage_key(r)].append(throughput[r.run_id])
    result = {}
    for r in usable:
        f = r.factors
        steps = summarise(_times(r))
        # Stages that share a GPU prove correctness; a speed-up of theirs would be a wrong number.
        meaningful = not (f.share_devices and f.stages > 1)
        speedup = _ratio(throughput[r.run_id], baselines.get(_setting(r))) if meaningful else None
        result[r.run_id] = Merit(
            steps=steps,
            throughput=throughput[r.run_id],
            throughput_low=f.batch_size / steps.high,
            throughput_high=f.batch_size / steps.low,
            speedup=speedup,
            ratio_to_one_stage=_ratio(throughput[r.run_id], one_stage.get(_one_stage_key(r))) if meaningful else None,
            efficiency=speedup / f.stages if speedup is not None else None,
        )
    return result


def _ratio(value: float, over: Sequence[float] | None) -> float | None:
    return value / statistics.median(over) if over else None
