"""Before a cell runs: measure what its balance needs, once, and pick its partition."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from bench.atomic import replacing
from bench.factors import Factors, Settings
from bench.jobs import Job, Message
from bench.launch import Outcome, launch
from bench.partition.prediction import predict
from bench.partition.profile import LayerProfile, Profile, profile_key, write_profile
from bench.partition.rules import NATIVE, PROFILED, schedule_of
from bench.plan import Cell, cut, known_profile, native_path, profile_file, versions_of
from bench.registry import capabilities
from bench.run import make_job, worker_environment
from bench.warm import Start, fresh
from models.table import layer_table, source_hash

__all__ = ["Unmeasured", "measure_profile", "resolve"]

OnMessage = Callable[[Message], None] | None


class Unmeasured(Exception):
    """What a balance needs could not be measured; ``outcome`` is of the process that tried, ``log`` its output."""

    def __init__(self, what: str, outcome: Outcome, log: Path) -> None:
        self.what, self.outcome, self.log = what, outcome, log
        super().__init__(f"{what}: {outcome.fail_reason}")


def resolve(cell: Cell, settings: Settings, on_message: OnMessage = None, start: Start = fresh) -> Cell:
    """The cell with its partition and, where there is a profile, what it predicts.

    Measures a profile only where the balance needs it or ``settings.profile`` asks for it.  Raises
    UserError where no partition can be had, and Unmeasured.
    """
    factors = cell.factors
    can = capabilities(factors.library)
    if cell.problem is not None or can.stages_are != "devices":
        return cell
    if settings.profile or factors.balance.name in PROFILED:
        measure_profile(cell, settings, on_message, start)
    if factors.balance.name.startswith(NATIVE):
        _measure_native(cell, settings, on_message, start)
    picked = cut(factors, settings.results_dir)
    profile = known_profile(factors, settings.results_dir)
    if profile is None:
        return replace(cell, partition=picked)
    overlap = factors.device != "cpu" or can.overlap_on_cpu
    predicted = predict(profile, picked, schedule_of(factors), overlap=overlap, recomputes_ahead=can.recomputes_ahead)
    return replace(cell, partition=picked, prediction=predicted)


def measure_profile(cell: Cell, settings: Settings, on_message: OnMessage = None, start: Start = fresh) -> None:
    """Measure the profile of the cell's model, unless it is there already."""
    path = profile_file(cell.factors, settings.results_dir)
    if path.exists():
        return
    lock = settings.results_dir / ".cache" / "profiles.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    # Another sweep that needs the same profile waits for this one's.
    with FileLock(lock):
        if not path.exists():
            write_profile(_profiled(cell, settings, on_message, start), path)


def _profiled(cell: Cell, settings: Settings, on_message: OnMessage, start: Start) -> Profile:
    factors = cell.factors
    found = _run(cell, settings, "profile", _neighbours(cell, settings), on_message, start)
    table = layer_table(
        factors.model,
        granularity=factors.granularity,
        num_classes=factors.num_classes,
        cache_dir=settings.results_dir / ".cache",
    )
    torch = versions_of(factors.library)["torch"] or "none"
    return Profile(
        key=profile_key(factors, source_hash(factors.model.target), cell.hardware, torch),
        layers=tuple(
            LayerProfile(layer=row.index, kind=row.kind, parameters=row.parameters, **measured)
            for row, measured in zip(table, found["layers"], strict=True)
        ),
        link_latency_s=found["link_latency_s"],
        link_bytes_per_s=found["link_bytes_per_s"],
        processes=_neighbours(cell, settings),
        repetitions=found["repetitions"],
    )


def _neighbours(cell: Cell, settings: Settings) -> int:
    """How many processes profile at once: two stages, if there are devices for them."""
    if cell.factors.device == "cuda":
        return min(2, len({*make_job(cell, settings, "", "", double=False).device_indices}))
    return min(2, len(os.sched_getaffinity(0)))


def _measure_native(cell: Cell, settings: Settings, on_message: OnMessage, start: Start) -> None:
    path = native_path(cell.factors, settings.results_dir)
    if path.exists():
        return
    found = _run(cell, settings, "native", cell.world_size, on_message, start)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(found["partition"]))


def _run(
    cell: Cell,
    settings: Settings,
    task: str,
    world_size: int,
    on_message: OnMessage,
    start: Start,
) -> dict[str, Any]:
    """What rank 0 of a job of its own found out."""
    log = settings.results_dir / "logs" / f"{task}-{cell.id}-{os.getpid()}.log"
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        job = make_job(cell, settings, f"{task}-{cell.id}", folder, double=False)
        outcome = launch(
            _job(job, task, world_size),
            log,
            wall_limit_s=settings.wall_limit_s,
            environment=worker_environment(cell.factors),
            on_message=on_message,
            start=start,
        )
    if outcome.status != "ok":
        what = "its profile could not be measured" if task == "profile" else "the library's own routine failed"
        raise Unmeasured(what, outcome, log)
    return min(outcome.results, key=lambda r: r.rank).read_back


def _job(job: Job, task: str, world_size: int) -> Job:
    factors: Factors = job.factors
    if task == "profile":
        factors = factors.replace(stages=world_size)
    return replace(job, task=f"bench.worker.{task}", world_size=world_size, factors=factors)
