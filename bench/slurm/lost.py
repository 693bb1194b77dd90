"""Runs whose task has ended without a word of them become records, with SLURM's reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bench import record
from bench.collect import collect
from bench.jobs import Status
from bench.plan import make_cell
from bench.record import Record, load_all
from bench.registry import capabilities
from bench.slurm import cluster
from bench.slurm.claims import bury
from bench.slurm.cluster import JobState
from bench.slurm.status import Fate
from bench.slurm.study import Study

__all__ = ["collect_study", "record_lost"]

# These ends are the run's own doing, and another attempt would end so too; the others are not.
_OWN_FAULT = ("FAILED", "OUT_OF_MEMORY")


def collect_study(study: Study, found: Iterable[Fate]) -> tuple[list[Record], list[str]]:
    """Record what is lost and write the CSVs; the new records, and a line for each that does not fit the CSVs."""
    made = record_lost(study, [fate for fate in found if fate.kind == "lost"])
    _, lines = collect(study.results_dir)
    return made, lines


def record_lost(study: Study, lost: Sequence[Fate]) -> list[Record]:
    """A record for each lost run that has none of this study with SLURM's reason.

    The run that was under way gets ``error`` where it brought its job down, else ``interrupted``; one
    that had not begun is ``interrupted``.  Both leave it to a later ``submit`` to make the
    interrupted ones.
    """
    made: list[Record] = []
    reasons: dict[str, str] = {}
    for fate in lost:
        key = fate.array.key(fate.run.task)
        if key not in reasons:
            reasons[key] = _reason(key, fate.state)
            processes = {(a.host, a.pid) for a in fate.attempts}
            made += bury(study.results_dir, processes, _status(fate.state), reasons[key])
    records, _ = load_all(study.results_dir)
    for fate in lost:
        before = made_before(fate, study, records)
        reason = reasons[fate.array.key(fate.run.task)]
        if before is None:
            made.append(_never_begun(study, fate, reason))
        elif "SLURM" not in before.fail_reason:
            made.append(replace(before, status=_status(fate.state), fail_reason=reason))
        else:
            continue
        record.write(made[-1], study.results_dir)
    return made


def made_before(fate: Fate, study: Study, records: Iterable[Record]) -> Record | None:
    """The run's latest record since the study was submitted."""
    own = [
        r
        for r in records
        if (r.kind, r.cell_id, r.trial) == ("cell", fate.run.cell_id, fate.run.trial)
        and r.started_at >= study.submitted_at
    ]
    return max(own, key=lambda r: (r.started_at, r.run_id), default=None)


def _status(state: JobState) -> Status:
    return "error" if state.state in _OWN_FAULT else "interrupted"


def _reason(key: str, state: JobState) -> str:
    code = cluster.exit_code(key)
    said = ", ".join(s for s in (state.reason, code if code not in state.reason else "") if s)
    if state.state == "UNKNOWN":
        return f"SLURM no longer knows job {key}, which left no record"
    return f"SLURM ended job {key} without a record: {state.state}" + (f" ({said})" if said else "")


def _never_begun(study: Study, fate: Fate, reason: str) -> Record:
    """A record that claims nothing of devices or versions: no process of the run has ever been."""
    f, can = fate.run.factors, capabilities(fate.run.factors.library)
    cell = make_cell(f, study.settings, here=False)
    hardware = fate.attempts[-1].hardware if fate.attempts else cell.hardware
    name = f"{f.library.name}-{f.model.name}-p{f.stages}-m{f.micro_batches}-{fate.run.cell_id}-t{fate.run.trial}"
    return Record(
        # The same name each time: collecting twice leaves one record.
        run_id=re.sub(r"[^A-Za-z0-9_.-]", "_", f"{name}-lost-{fate.array.key(fate.run.task)}"),
        cell_id=fate.run.cell_id,
        trial=fate.run.trial,
        hardware=hardware,
        status="interrupted",
        fail_phase="plan",
        fail_reason=f"{reason}; it had not begun",
        started_at=study.submitted_at,
        factors=f,
        baseline=cell.baseline,
        partition=cell.partition,
        overlap=f.device != "cpu" or can.overlap_on_cpu,
        notes=can.notes,
        log=str(study.log(fate.array, fate.run.task).relative_to(study.results_dir)),
    )
