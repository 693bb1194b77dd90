"""What is derived from raw steps: median, its interval, throughput, speed-up.

The CSVs and the tables both take their figures from here.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bench.record import Record
from bench.series import Summary, Verdict, summarise

__all__ = ["Merit", "conditions", "merits"]

# Cores that other processes may keep busy before a figure is doubtful: on CPU they are taken from the stages;
# beside GPUs a share of the host.
OTHERS_CPU, OTHERS_SHARE = 0.25, 0.5
# Throttle reasons that are faults of the machine; a power cap is how it was bought.
SLOWED = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
CLOCKS = 0.9  # lowest over highest clock seen


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
        steps = _judged(summarise(_times(r)), r)
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


def conditions(r: Record) -> list[str]:
    """What was amiss with the machine while the run was measured, of what makes its figure doubtful."""
    found = []
    allowed = OTHERS_CPU if r.factors.device == "cpu" else OTHERS_SHARE * float(r.environment.get("cores") or 1)
    if r.foreign_load is not None and r.foreign_load > allowed:
        found.append(f"other processes kept {r.foreign_load:.2f} cores busy")
    for s in r.stages:
        slowed = [reason for reason in s.throttle_reasons if reason in SLOWED]
        if slowed:
            found.append(f"the GPU of stage {s.stage} was slowed down ({', '.join(slowed)})")
        if s.clock_low_mhz is not None and s.clock_high_mhz and s.clock_low_mhz < CLOCKS * s.clock_high_mhz:
            found.append(f"the GPU of stage {s.stage} ran at {s.clock_low_mhz} to {s.clock_high_mhz} MHz")
    return found


def _judged(steps: Summary, r: Record) -> Summary:
    """The summary, never ``stable`` where the machine was not."""
    found = conditions(r)
    if not found:
        return steps
    verdict: Verdict = "noisy" if steps.verdict == "stable" else steps.verdict
    return replace(steps, verdict=verdict, reason="; ".join(filter(None, [steps.reason, *found])))


def _ratio(value: float, over: Sequence[float] | None) -> float | None:
    return value / statistics.median(over) if over else None
