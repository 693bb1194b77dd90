"""Tidy CSVs from the records alone: ``python -m bench.collect [RESULTS_DIR]``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from bench.errors import UserError
from bench.merit import Merit, merits
from bench.record import Record, load_all, records_dir
from bench.registry import capabilities
from bench.schema import RUNS, STAGES, STEPS, Column

__all__ = ["collect", "parity_word", "run_row"]

Row = dict[str, object]


def parity_word(record: Record) -> str:
    """``checked``, ``unchecked``, ``failed``, or empty where the run did not get so far."""
    if record.status == "parity_failed":
        return "failed"
    if record.parity_unchecked:
        return "unchecked"
    return "checked" if record.parity is not None and record.parity_double is not None else ""


def _runs(indices: Sequence[int]) -> str:
    """Consecutive indices as first-last: 0-4 10-14."""
    parts: list[list[int]] = []
    for i in indices:
        if parts and i == parts[-1][-1] + 1:
            parts[-1].append(i)
        else:
            parts.append([i])
    return " ".join(f"{p[0]}-{p[-1]}" for p in parts)


def run_row(r: Record, merit: Merit | None) -> Row:
    """One row of runs.csv."""
    f = r.factors
    versions = r.environment.get("versions", {})
    distribution = _distribution(r)
    a, b = r.parity, r.parity_double
    peaks = [s.peak_allocated_bytes for s in r.stages if s.peak_allocated_bytes is not None]
    return {
        "run_id": r.run_id,
        "cell_id": r.cell_id,
        "trial": r.trial,
        "synthetic": r.synthetic,
        "library": f.library.name,
        "model": f.model.name,
        "model_options": " ".join(f"{k}={v}" for k, v in f.model.options),
        "granularity": f.granularity,
        "image_size": f.image_size,
        "num_classes": f.num_classes,
        "batch_size": f.batch_size,
        "micro_batches": f.micro_batches,
        "stages": f.stages,
        "virtual_stages": f.virtual_stages,
        "nodes": f.nodes,
        "balance": f.balance.name,
        "partition": "-".join(map(str, r.partition)),
        "schedule": f.schedule,
        "checkpoint": f.checkpoint,
        "precision": f.precision,
        "data": f.data.name,
        "seed": f.seed,
        "lr": f.optimizer.lr,
        "momentum": f.optimizer.momentum,
        "device": f.device,
        "hardware": r.hardware,
        "share_devices": f.share_devices,
        "overlap": r.overlap,
        "baseline": r.baseline,
        "status": r.status,
        "fail_phase": r.fail_phase,
        "fail_reason": " ".join(r.fail_reason.split()),
        "steps": sum(not s.warmup for s in r.steps),
        "step_time_s": merit and merit.step_time_s,
        "step_time_low_s": merit and merit.step_time_low_s,
        "step_time_high_s": merit and merit.step_time_high_s,
        "throughput": merit and merit.throughput,
        "throughput_low": merit and merit.throughput_low,
        "throughput_high": merit and merit.throughput_high,
        "speedup": merit and merit.speedup,
        "ratio_to_one_stage": merit and merit.ratio_to_one_stage,
        "efficiency": merit.speedup / f.stages if merit and merit.speedup is not None else None,
        "peak_bytes": max(peaks) if peaks else None,
        "parity": parity_word(r),
        "parity_gradient_error": a and a.gradient_error,
        "parity_gradient_tolerance": a and a.gradient_tolerance,
        "parity_update_error": a and a.update_error,
        "parity_update_tolerance": a and a.update_tolerance,
        "parity_buffer_error": a and a.buffer_error,
        "parity_double_gradient_error": b and b.gradient_error,
        "parity_double_update_error": b and b.update_error,
        "parity_double_run": r.parity_double_run,
        "parity_unchecked": r.parity_unchecked,
        "fixed_cost_s": r.fixed_cost_s,
        "wall_s": r.wall_s,
        "waited_s": r.waited_s,
        "foreign_load": r.foreign_load,
        "library_version": versions.get(distribution or "torch", ""),
        "torch_version": versions.get("torch", ""),
        "host": r.environment.get("host", ""),
        "git_commit": r.environment.get("git_commit", ""),
        "git_dirty": r.environment.get("git_dirty", False),
        "started_at": r.started_at,
    }


def _distribution(r: Record) -> str | None:
    try:
        return capabilities(r.factors.library).distribution
    except ImportError:  # an adapter of another checkout: the record stays readable
        return None


def _stage_rows(records: Iterable[Record]) -> Iterable[Row]:
    for r in records:
        for s in r.stages:
            row: Row = {c.name: getattr(s, c.name, None) for c in STAGES}
            yield {**row, "run_id": r.run_id, "layers": _runs(s.layers)}


def _step_rows(records: Iterable[Record]) -> Iterable[Row]:
    for r in records:
        for s in r.steps:
            for rank, seconds in enumerate(s.rank_times_s):
                yield {
                    "run_id": r.run_id,
                    "step": s.index,
                    "warmup": s.warmup,
                    "rank": rank,
                    "time_s": seconds,
                    "step_time_s": s.time_s,
                    "loss": s.loss,
                }


_DTYPES = {"text": "object", "int": "Int64", "float": "float64", "bool": "bool"}


def _write(rows: Iterable[Row], columns: Sequence[Column], path: Path) -> None:
    names = [c.name for c in columns]
    frame = pd.DataFrame(list(rows), columns=names)
    frame = frame.astype({c.name: _DTYPES[c.kind] for c in columns if c.kind != "text"})
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    frame.to_csv(temporary, index=False, lineterminator="\n")
    os.replace(temporary, path)


def collect(results_dir: Path) -> tuple[dict[str, Path], list[str]]:
    """Write runs.csv, stages.csv and steps.csv; returns their paths and a line for each unreadable file."""
    records, errors = load_all(results_dir)
    cells = [r for r in records if r.kind == "cell"]
    derived = merits(cells)
    paths = {name: results_dir / f"{name}.csv" for name in ("runs", "stages", "steps")}
    _write((run_row(r, derived.get(r.run_id)) for r in cells), RUNS, paths["runs"])
    _write(_stage_rows(cells), STAGES, paths["stages"])
    _write(_step_rows(cells), STEPS, paths["steps"])
    return paths, [str(e) for e in errors]


def main(arguments: Sequence[str]) -> int:
    """Collect a results folder."""
    from bench.run import bury_dead

    results_dir = Path(arguments[0]) if arguments else Path("results")
    if not records_dir(results_dir).is_dir():
        print(UserError("results_dir", results_dir, "holds no records", "run python -m bench first"), file=sys.stderr)
        return 2
    bury_dead(results_dir)
    paths, errors = collect(results_dir)
    for path in paths.values():
        with open(path) as lines:
            print(f"{path}: {sum(1 for _ in lines) - 1} rows")
    for line in errors:
        print(line, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
