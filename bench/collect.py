"""Tidy CSVs from the records alone: ``python -m bench.collect [RESULTS_DIR]``.

The same records give the same bytes, whatever the order they were made in.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from bench.atomic import replacing
from bench.errors import UserError
from bench.factors import Options
from bench.hardware import peak_flops
from bench.merit import Merit, merits
from bench.record import Record, load_all, records_dir
from bench.registry import capabilities, libraries
from bench.schema import STAGES, TABLES, Column, problem

__all__ = ["collect", "parity_word", "run_row", "stage_rows", "step_rows"]

Row = dict[str, object]


def parity_word(record: Record) -> str:
    """``checked``, ``unchecked``, ``failed``, or empty where the run did not get so far."""
    if record.status == "parity_failed":
        return "failed"
    if record.parity_unchecked:
        return "unchecked"
    return "checked" if record.parity is not None and record.parity_double is not None else ""


def run_row(r: Record, merit: Merit | None) -> Row:
    """One row of runs.csv; ``merit`` is the run's figures, None where it has none."""
    f = r.factors
    versions = r.environment.get("versions", {})
    a, b = r.parity, r.parity_double
    account = r.account
    peaks = [s.peak_allocated_bytes for s in r.stages if s.peak_allocated_bytes is not None]
    return {
        "run_id": r.run_id,
        "cell_id": r.cell_id,
        "trial": r.trial,
        "schema_version": r.schema_version,
        "synthetic": r.synthetic,
        "library": f.library.name,
        "library_options": _options(f.library.options),
        "model": f.model.name,
        "model_target": f.model.target,
        "model_options": _options(f.model.options),
        "granularity": f.granularity,
        "image_size": f.image_size,
        "num_classes": f.num_classes,
        "batch_size": f.batch_size,
        "micro_batches": f.micro_batches,
        "stages": f.stages,
        "virtual_stages": f.virtual_stages,
        "nodes": f.nodes,
        "balance": f.balance.name,
        "balance_options": _options(f.balance.options),
        "partition": "-".join(map(str, r.partition)),
        "imbalance": r.prediction.imbalance if r.prediction else None,
        "predicted_step_time_s": r.prediction.step_time_s if r.prediction else None,
        "schedule": f.schedule,
        "checkpoint": f.checkpoint,
        "precision": f.precision,
        "optimizer": f.optimizer.name,
        "lr": f.optimizer.lr,
        "momentum": f.optimizer.momentum,
        "data": f.data.name,
        "data_path": f.data.path,
        "seed": f.seed,
        "device": f.device,
        "share_devices": f.share_devices,
        "hardware": r.hardware,
        "overlap": r.overlap,
        "baseline": r.baseline,
        "status": r.status,
        "fail_phase": r.fail_phase,
        "fail_reason": r.fail_reason,
        "steps": sum(not s.warmup for s in r.steps),
        "step_time_s": merit and merit.steps.median,
        "step_time_low_s": merit and merit.steps.low,
        "step_time_high_s": merit and merit.steps.high,
        "step_time_mean_s": merit and merit.steps.mean,
        "step_time_p5_s": merit and merit.steps.p5,
        "step_time_p95_s": merit and merit.steps.p95,
        "autocorrelation": merit and merit.steps.autocorrelation,
        "verdict": merit and merit.steps.verdict,
        "verdict_reason": merit and merit.steps.reason,
        "throughput": merit and merit.throughput,
        "throughput_low": merit and merit.throughput_low,
        "throughput_high": merit and merit.throughput_high,
        "speedup": merit and merit.speedup,
        "ratio_to_one_stage": merit and merit.ratio_to_one_stage,
        "efficiency": merit and merit.efficiency,
        "bubble": account.bubble if account else None,
        "ideal_bubble": account.ideal_bubble if account else None,
        "overlapped": account.overlap if account else None,
        "traced_step_time_s": account.step_time_s if account else None,
        "ideal_s": account.ideal_s if account else None,
        "bubble_s": account.bubble_s if account else None,
        "imbalance_s": account.imbalance_s if account else None,
        "recompute_s": account.recompute_s if account else None,
        "communication_s": account.communication_s if account else None,
        "unexplained_s": account.unexplained_s if account else None,
        "stamp_cost_s": r.stamp_cost_s,
        **_flops(r, merit),
        "peak_bytes": max(peaks) if peaks else None,
        "parity": parity_word(r),
        "parity_gradient_error": a and a.gradient_error,
        "parity_gradient_tolerance": a and a.gradient_tolerance,
        "parity_update_error": a and a.update_error,
        "parity_update_tolerance": a and a.update_tolerance,
        "parity_buffer_error": a and a.buffer_error,
        "parity_double_gradient_error": b and b.gradient_error,
        "parity_double_gradient_tolerance": b and b.gradient_tolerance,
        "parity_double_update_error": b and b.update_error,
        "parity_double_update_tolerance": b and b.update_tolerance,
        "parity_double_run": r.parity_double_run,
        "parity_unchecked": r.parity_unchecked,
        "fixed_cost_s": r.fixed_cost_s,
        "wall_s": r.wall_s,
        "waited_s": r.waited_s,
        "foreign_load": r.foreign_load,
        "library_version": versions.get(_distribution(f.library.name), ""),
        "torch_version": versions.get("torch", ""),
        "host": r.environment.get("host", ""),
        "git_commit": r.environment.get("git_commit", ""),
        "git_dirty": r.environment.get("git_dirty"),
        "started_at": r.started_at,
    }


def _flops(r: Record, merit: Merit | None) -> Row:
    """FLOPs of a step, known where there is a profile; recomputation is work, but not the model's."""
    if r.prediction is None:
        return dict.fromkeys(("flops_per_step", "recompute_flops_per_step", "flop_rate", "utilisation"))
    f, m = r.factors, r.factors.micro_batches
    repeats = {"never": 0, "except_last": m - 1, "always": m}[f.checkpoint]
    flops = sum(r.prediction.stage_flops) * m
    achieved = flops / merit.steps.median if merit else None
    peak = peak_flops(r.hardware, f.precision) if f.device == "cuda" else None
    return {
        "flops_per_step": flops,
        "recompute_flops_per_step": sum(r.prediction.stage_forward_flops) * repeats,
        "flop_rate": achieved,
        "utilisation": achieved / (peak * f.stages) if achieved and peak and not f.share_devices else None,
    }


def stage_rows(r: Record) -> list[Row]:
    """The run's rows of stages.csv."""
    traced = ("busy_s", "idle_s", "waiting_s")
    made = ("run_id", "layers", "predicted_peak_bytes", "throttle_reasons", *traced)
    copied = [c.name for c in STAGES if c.name not in made]
    counted = r.prediction.memory if r.prediction else ()
    lanes = {lane.stage: lane for lane in r.account.lanes} if r.account else {}
    return [
        {
            "run_id": r.run_id,
            "layers": _ranges(s.layers),
            "predicted_peak_bytes": counted[s.stage].total if s.stage < len(counted) else None,
            "throttle_reasons": " ".join(s.throttle_reasons),
            **{name: getattr(s, name) for name in copied},
            **{name: getattr(lanes[s.stage], name) if s.stage in lanes else None for name in traced},
        }
        for s in r.stages
    ]


def step_rows(r: Record) -> list[Row]:
    """The run's rows of steps.csv, one for each step and rank."""
    return [
        {
            "run_id": r.run_id,
            "step": s.index,
            "warmup": s.warmup,
            "rank": rank,
            "time_s": seconds,
            "step_time_s": s.time_s,
            "loss": s.loss,
        }
        for s in r.steps
        for rank, seconds in enumerate(s.rank_times_s)
    ]


def _options(options: Options) -> str:
    return " ".join(f"{key}={value}" for key, value in options)


def _ranges(indices: Sequence[int]) -> str:
    """Consecutive indices as first-last: 0-4 10-14."""
    parts: list[list[int]] = []
    for i in indices:
        if parts and i == parts[-1][-1] + 1:
            parts[-1].append(i)
        else:
            parts.append([i])
    return " ".join(f"{p[0]}-{p[-1]}" for p in parts)


def _distribution(library: str) -> str:
    """The pip name whose version is the library's; empty for a library that is not registered here.

    Goes by name: a record must not choose a module to import.
    """
    known = libraries().get(library)
    return (capabilities(known).distribution or "torch") if known else ""


_DTYPES = {"int": "Int64", "float": "float64", "bool": "boolean"}


def _write(rows: Sequence[Row], columns: Sequence[Column], path: Path) -> None:
    frame = pd.DataFrame(rows, columns=[c.name for c in columns])
    frame = frame.astype({c.name: _DTYPES[c.kind] for c in columns if c.kind != "text"})
    with replacing(path) as temporary:
        frame.to_csv(temporary, index=False, lineterminator="\n")


def collect(results_dir: Path) -> tuple[dict[str, Path], list[str]]:
    """Write runs.csv, stages.csv and steps.csv, each atomically.

    Returns their paths by name, and one line for each file that is no record and for each run that
    does not fit the schema; such a run is in no CSV.
    """
    with _turn(results_dir):
        return _collect(results_dir)


def _collect(results_dir: Path) -> tuple[dict[str, Path], list[str]]:
    records, errors = load_all(results_dir)
    lines = [str(e) for e in errors]
    cells = []
    for r in records:
        wrong = _problem(r) if r.kind == "cell" else ""
        if wrong:
            lines.append(f"{records_dir(results_dir) / r.run_id}.json: {wrong}")
        elif r.kind == "cell":
            cells.append(r)
    derived = merits(cells)
    rows = {
        "runs": [run_row(r, derived.get(r.run_id)) for r in cells],
        "stages": [row for r in cells for row in stage_rows(r)],
        "steps": [row for r in cells for row in step_rows(r)],
    }
    paths = {name: results_dir / f"{name}.csv" for name in TABLES}
    for name, path in paths.items():
        _write(rows[name], TABLES[name], path)
    return paths, lines


@contextlib.contextmanager
def _turn(results_dir: Path) -> Iterator[None]:
    """One collector of a folder at a time, so that its CSVs are all of the same records; the kernel ends the turn
    with the process."""
    folder = os.open(results_dir, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _problem(r: Record) -> str:
    """Where the record does not fit the schema; what is derived comes after, of records that fit."""
    # Of its many steps one of each combination of types will do: no column of steps.csv lists its values.
    steps = {tuple(map(type, row.values())): row for row in step_rows(r)}
    made = {"runs": [run_row(r, None)], "stages": stage_rows(r), "steps": list(steps.values())}
    found = (problem(row, TABLES[name]) for name, rows in made.items() for row in rows)
    return next(filter(None, found), "")


def main(arguments: Sequence[str]) -> int:
    """Collect a results folder."""
    from bench.run import bury_dead

    results_dir = Path(arguments[0]) if arguments else Path("results")
    if not records_dir(results_dir).is_dir():
        print(UserError("results_dir", results_dir, "holds no records", "run python -m bench first"), file=sys.stderr)
        return 2
    try:
        bury_dead(results_dir)
        paths, lines = collect(results_dir)
    except OSError as error:
        why = f"cannot be written ({error.strerror})"
        print(UserError("results_dir", results_dir, why, "copy it to a folder of your own"), file=sys.stderr)
        return 2
    for path in paths.values():
        with open(path) as rows:
            print(f"{path}: {sum(1 for _ in rows) - 1} rows")
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
