"""One array task: its runs, through the same code as a sweep, with SLURM's signals in mind."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import record
from bench.errors import UserError
from bench.history import History
from bench.launch import Interrupted
from bench.nodes import gather
from bench.place import Place
from bench.plan import Cell, make_cell
from bench.run import Stopped
from bench.slurm import cluster
from bench.slurm.claims import bury
from bench.slurm.study import Run, Study, load, read_plan
from bench.sweep import sweep_runs

__all__ = ["SlurmSignals", "run_task"]

WARNING = signal.SIGUSR1
REASONS = {
    WARNING: f"ended by SLURM's warning that the time limit is near ({WARNING.name})",
    signal.SIGTERM: "ended by SLURM: preempted, cancelled or at its time limit (SIGTERM)",
}


class SlurmSignals:
    """Turns SLURM's signals into SIGINT, with which the cell that runs is ended and recorded.

    SLURM may send its signal to every process of the job.  Here it is blocked, and a blocked signal
    stays so in all that is started: the ranks leave it to this process to end them, so that none is
    taken for one that failed.  ``caught`` is the first signal that came.
    """

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None

    def __enter__(self) -> SlurmSignals:
        signal.pthread_sigmask(signal.SIG_BLOCK, REASONS)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored, as in a background shell
        threading.Thread(target=self._wait, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing: the signals stay blocked, for what is left is to say how it ended."""

    def _wait(self) -> None:
        while True:
            number = signal.Signals(signal.sigwait(REASONS))
            if self.caught is None:
                self.caught = number
                os.kill(os.getpid(), signal.SIGINT)


def run_task(plan: Path, index: int, here: Place) -> int:
    """Make the runs of a task, on node 0 of its nodes; what has been made by an earlier attempt is not made again.

    Exit code: 0 when all are ok or unsupported, 1 when one failed or is left, 128 + the signal's
    number when it was ended.
    """
    study = load(plan.resolve().parent)
    runs = [run for run in read_plan(plan) if run.task == index]
    if not runs:
        raise UserError("task", index, f"{plan.name} has no such task", "give one that the array has")
    number = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    with SlurmSignals() as signals, gather(here) as nodes:
        try:
            cells = [(make_cell(run.factors, study.settings), run.trial) for run in runs]
            _begin(study, plan.name, index, number, cells[0][0].hardware)
            made = sweep_runs(_left(study, plan.name, runs, cells), study.settings, nodes=nodes)
        except Interrupted as stop:
            return _ended(study, plan.name, runs, signals, number, stop)
        except KeyboardInterrupt:  # between two runs
            return _ended(study, plan.name, runs, signals, number, None)
    return 1 if made.failed or made.left else 0


def _begin(study: Study, plan: str, index: int, number: int, hardware: str) -> None:
    """Leave a note, and take over from earlier attempts: SLURM starts another only when they are over."""
    earlier = study.attempts(plan, index)
    study.note(plan, index, number, hardware)
    processes = {(a.host, a.pid) for a in earlier if a.number != number}
    for buried in bury(
        study.results_dir, processes, "interrupted", f"SLURM ended attempt {number - 1} of its task without a warning"
    ):
        print(f"{buried.run_id}: {buried.fail_reason}", file=sys.stderr)


def _left(study: Study, plan: str, runs: Sequence[Run], cells: Sequence[tuple[Cell, int]]) -> list[tuple[Cell, int]]:
    """The runs without those that an earlier attempt finished, whatever ``on_existing`` says of older records."""
    attempts = study.attempts(plan, runs[0].task)
    if study.settings.on_existing == "skip" or len(attempts) < 2:
        return list(cells)
    history = History.read(study.results_dir)
    return [cell for run, cell in zip(runs, cells, strict=True) if not study.finished(run, history, attempts)]


def _ended(
    study: Study, plan: str, runs: Sequence[Run], signals: SlurmSignals, number: int, stop: Interrupted | None
) -> int:
    """Say in the stopped run's record who ended it; at the time limit have the task run again."""
    caught = signals.caught
    if caught is None:  # SIGINT of its own, by hand
        return 128 + signal.SIGINT
    reason = REASONS[caught]
    if isinstance(stop, Stopped) and stop.record.status == "interrupted":
        record.write(replace(stop.record, fail_reason=reason), study.results_dir)
    print(reason, file=sys.stderr)
    if caught == WARNING:
        attempts = study.attempts(plan, runs[0].task)
        history = History.read(study.results_dir)
        left = sum(study.finished(run, history, attempts) is None for run in runs)
        _again(study, number, left)
    return 128 + caught


def _again(study: Study, number: int, left: int) -> None:
    """Requeue this task, unless nothing is left of it or it has restarted too often."""
    job = "_".join(os.environ.get(f"SLURM_ARRAY_{part}_ID", "") for part in ("JOB", "TASK"))
    if left == 0:
        return
    if number >= study.max_requeues:
        print(f"{left} runs are left; not requeued, since slurm.max_requeues={study.max_requeues}", file=sys.stderr)
        return
    print(f"{left} runs are left; requeueing {job}", file=sys.stderr, flush=True)
    refused = cluster.requeue(job)
    if refused:
        print(f"not requeued: {refused}", file=sys.stderr)
