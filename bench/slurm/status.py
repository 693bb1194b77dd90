"""What has become of each run of a study: from the records, the claims and SLURM's queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from bench import claim
from bench.history import History, Past
from bench.slurm.claims import standing
from bench.slurm.cluster import JobState
from bench.slurm.study import Array, Attempt, Run, Study, read_plan, words

__all__ = ["KINDS", "Fate", "fates", "summary"]

Kind = Literal["done", "running", "pending", "failed", "lost"]
KINDS: tuple[Kind, ...] = ("done", "running", "pending", "failed", "lost")


@dataclass(frozen=True, kw_only=True)
class Fate:
    """A run and how it stands: ``past`` is its record where it has ended, ``state`` its task's job."""

    run: Run
    kind: Kind
    array: Array
    attempts: tuple[Attempt, ...]
    state: JobState
    past: Past | None


def fates(study: Study, states: Mapping[str, JobState]) -> Iterator[Fate]:
    """Every run of the study; ``states`` as of ``cluster.job_states``.

    A run without a record is lost once its task has ended, running while a process holds its claim,
    and pending otherwise, be its task in the queue or at another run.
    """
    history = History.read(study.results_dir)
    with claim.lock(study.results_dir):
        claimed = {
            (found.record["cell_id"], found.record["trial"], found.host, found.pid)
            for _, found in standing(study.results_dir)
        }
    for array in study.arrays:
        tasks = range(array.first, array.first + array.count)
        attempts = {task: tuple(study.attempts(array.plan, task)) for task in tasks}
        for run in read_plan(study.folder / array.plan):
            if run.task not in tasks:
                continue
            state = states.get(array.key(run.task), JobState())
            past = study.finished(run, history, attempts[run.task])
            kind: Kind
            if past is not None:
                kind = "failed" if past.failed else "done"
            elif state.ended:
                kind = "lost"
            else:
                held = any((run.cell_id, run.trial, a.host, a.pid) in claimed for a in attempts[run.task])
                kind = "running" if held and state.state == "RUNNING" else "pending"
            yield Fate(run=run, kind=kind, array=array, attempts=attempts[run.task], state=state, past=past)


def summary(study: Study, found: list[Fate]) -> list[str]:
    """The lines that ``status`` prints."""
    counts = Counter(fate.kind for fate in found)
    tail = f", unsupported {study.unsupported}" if study.unsupported else ""
    lines = [
        f"study {study.folder.name}: {len(found) + study.unsupported} runs",
        ", ".join(f"{kind} {counts[kind]}" for kind in KINDS) + tail,
    ]
    for array in study.arrays:
        tasks = {fate.run.task: fate.state for fate in found if fate.array == array}
        states = Counter(state.state for state in tasks.values())
        shown = ", ".join(f"{state} {count}" for state, count in sorted(states.items()))
        lines.append(f"job {array.job} ({words(array)}, {array.count} tasks): {shown}")
    for fate in found:
        if fate.kind == "failed" and fate.past is not None:
            past = fate.past
            lines.append(f"FAILED {past.run_id}: {past.status} in {past.fail_phase or 'start'}: {past.fail_reason}")
        elif fate.kind == "lost":
            lines.append(f"LOST {_name(fate)}: job {fate.array.key(fate.run.task)} is {fate.state}")
    if counts["lost"]:
        lines.append(f"python -m bench.slurm collect {study.folder} turns what is lost into records")
    return lines


def _name(fate: Fate) -> str:
    f = fate.run.factors
    return f"{f.library.name}-{f.model.name}-p{f.stages}-m{f.micro_batches}-{fate.run.cell_id}-t{fate.run.trial}"
