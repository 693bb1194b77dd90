"""Run cells one after the other, show how far it is, and end with the table.

``python -m bench.sweep OVERRIDES`` is ``python -m bench -m OVERRIDES``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from bench.collect import collect
from bench.errors import UserError
from bench.factors import Settings
from bench.history import History, Key
from bench.jobs import Message
from bench.launch import Interrupted
from bench.nodes import Node
from bench.plan import Cell
from bench.record import Record, load_all, records_dir
from bench.registry import capabilities
from bench.resolve import Unmeasured, resolve
from bench.run import Busy, Stopped, bury_dead, run_cell, unmeasured, unsupported
from bench.schema import TABLES
from bench.table import console, print_tables
from bench.warm import Warm, fresh

__all__ = ["Result", "check_writable", "sweep", "sweep_runs"]

# A table longer than this is not printed where nothing was run.
LONG = 100


class Result(list[Record]):
    """The records of the runs that were made; ``failed`` counts the runs of the sweep that are not fine, old ones too.

    ``left``: runs that were not made since it stopped at a failure, or since another process holds their cell.
    """

    failed: int = 0
    left: int = 0


def check_writable(results_dir: Path) -> None:
    """Raise UserError where no record could be written."""
    try:
        records_dir(results_dir).mkdir(parents=True, exist_ok=True)
        probe = records_dir(results_dir) / ".probe"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise UserError(
            "results_dir", results_dir, f"cannot be written ({error.strerror})", "give a folder of your own"
        ) from None


class _View:
    """How far a sweep is: on a terminal a bar and a line that follows the cell's phases, plain lines elsewhere."""

    def __init__(self, out: Console, total: int) -> None:
        self._out, self._label, self._last = out, "", ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[said]}"),
            console=out,
        )
        self._task = self._bar.add_task("runs", total=total, said="")
        self.line = Text("")
        self._live = Live(Group(self._bar, self.line), console=out, transient=True) if out.is_terminal else None

    def __enter__(self) -> _View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(self, label: str) -> None:
        """A run begins."""
        self._label, self._last = label, ""
        if self._live is None:
            self._out.print(label, highlight=False, markup=False)
        else:
            self.line.plain = label

    def pass_over(self) -> None:
        """A run that cannot be made."""
        self._bar.update(self._task, advance=1)

    def end(self, text: str, said: str) -> None:
        """A run has ended: ``text`` stays, ``said`` is how the sweep stands."""
        self._bar.update(self._task, advance=1, said=said)
        label = f"{self._label}:" if self._live is not None else " "
        tail = f", {said}" if said and self._live is None else ""
        self._out.print(f"{label} {text}{tail}", highlight=False, markup=False)

    def __call__(self, message: Message) -> None:
        """Follow what rank 0 reports."""
        if message.rank != 0:
            return
        text = message.note if message.waiting else message.phase
        if self._live is not None:
            step = f" step {message.index + 1}" if message.kind == "step" else ""
            self.line.plain = f"{self._label}: {text}{step}"
        elif message.waiting and text != self._last:
            self._out.print(f"  {text}", highlight=False)
        self._last = text


def _label(cell: Cell, trial: int, number: int, total: int) -> str:
    f = cell.factors
    return (
        f"[{number}/{total}] {f.library.name} {f.model.name} stages={f.stages} "
        f"micro_batches={f.micro_batches} {f.device} trial={trial}"
    )


Run = tuple[Cell, int]


def _key(run: Run) -> Key:
    cell, trial = run
    return cell.id, trial, cell.hardware


class _TimeLeft:
    """How long the runs that are left may take: as the history says, else as the mean of those just made."""

    def __init__(self, history: History, runs: Sequence[Run]) -> None:
        valid = [cell for cell, _ in runs if cell.problem is None]
        self._left = [history.estimate_s(cell.id, cell.factors, cell.hardware) for cell in valid]
        self._made: list[float] = []

    def after(self, seconds: float | None) -> str:
        """One more run was made and took so long, or was not made; empty where nothing is left."""
        self._left.pop(0)
        if seconds is not None:
            self._made.append(seconds)
        if not self._left:
            return ""
        known = [s for s in self._left if s is not None]
        if not self._made and len(known) < len(self._left):
            return ""
        mean = statistics.fmean(self._made or known)
        return f"about {_duration(sum(mean if s is None else s for s in self._left))} left"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def sweep(cells: Sequence[Cell], settings: Settings, *, alone: bool = False, nodes: Sequence[Node] = ()) -> Result:
    """Run every cell for every trial, trials outermost so that a slow drift falls on all cells alike.

    ``nodes``: the others, for cells that take several.  What is done already is treated as
    ``settings.on_existing`` says; a cell ``alone`` is always run.
    Always ends with the CSVs, the table and the name of every failure; Interrupted passes through after that.
    """
    return sweep_runs(
        [(cell, trial) for trial in settings.trials for cell in cells], settings, alone=alone, nodes=nodes
    )


def sweep_runs(runs: Sequence[Run], settings: Settings, *, alone: bool = False, nodes: Sequence[Node] = ()) -> Result:
    """As ``sweep``, of these (cell, trial) in this order."""
    check_writable(settings.results_dir)
    for buried in bury_dead(settings.results_dir):
        print(f"{buried.run_id}: {buried.fail_reason}", file=sys.stderr)
    out = console()
    elsewhere = _Elsewhere(settings)
    history = History.read(settings.results_dir)
    todo = [run for run in runs if alone or not history.skips(_key(run), settings.on_existing)]
    made = Result()
    stop: Interrupted | None = None
    time_left = _TimeLeft(history, todo)
    with Warm() as warm, _View(out, len(todo)) as view:
        for number, (cell, trial) in enumerate(todo, 1):
            start = time.monotonic()
            if cell.problem is not None:
                made.append(unsupported(cell, settings, trial))
                view.pass_over()
                continue
            view.begin(_label(cell, trial, number, len(todo)))
            try:
                made.append(_run(cell, settings, trial, view, warm, nodes, None if alone else elsewhere))
            except _Done:
                view.end("done meanwhile by another process", time_left.after(None))
                continue
            except Busy as busy:
                view.end(f"skipped: {busy}", time_left.after(None))
                made.left += 1
                continue
            except Stopped as stopped:
                stop = stopped
                made.append(stopped.record)
                break
            except Interrupted as interrupted:  # while something was measured for a cell that has not begun
                stop = interrupted
                break
            left = time_left.after(time.monotonic() - start)
            failed = sum(_failed(r.status) for r in made)
            view.end(_ended(made[-1]), ", ".join(filter(None, [left, f"{failed} failed so far" if failed else ""])))
            if failed and settings.on_error == "stop" and number < len(todo):
                made.left += len(todo) - number
                break
    _report(out, runs, todo, settings, made, history)
    if stop is not None:
        raise stop
    return made


class _Done(Exception):
    """The run has a record that another process has made since the sweep began."""


class _Elsewhere:
    """What has been recorded in the folder since a sweep began, by another sweep there too."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seen = self._paths()
        self._done: set[Key] = set()

    def _paths(self) -> set[Path]:
        return set(records_dir(self._settings.results_dir).glob("*.json"))

    def done(self, key: Key) -> bool:
        """Whether the run need not be made any more; reads what is new since the last time."""
        new = self._paths() - self._seen
        self._seen |= new
        history = History.of(new)
        self._done |= {k for k in history.runs if history.skips(k, self._settings.on_existing)}
        return key in self._done


def _failed(status: str) -> bool:
    return status not in ("ok", "unsupported")


def _run(
    cell: Cell,
    settings: Settings,
    trial: int,
    view: _View,
    warm: Warm,
    nodes: Sequence[Node],
    elsewhere: _Elsewhere | None,
) -> Record:
    """Measure what the cell's balance needs, then run it; a mistake that shows only then is a row of a sweep.

    ``elsewhere`` is None for a cell alone.  Raises _Done where another process has made the run meanwhile.
    """
    start = warm.starter(capabilities(cell.factors.library).modules) if settings.preload else fresh
    try:
        _check_alike(cell, nodes)
        cell = resolve(cell, settings, view, start)
    except Unmeasured as failure:
        return unmeasured(cell, settings, trial, failure.outcome, failure.what, failure.log)
    except UserError as problem:
        if elsewhere is None:
            raise
        return unsupported(replace(cell, problem=problem), settings, trial)
    if elsewhere is not None and elsewhere.done(_key((cell, trial))):
        raise _Done
    return run_cell(cell, settings, trial, view, start, nodes)


def _check_alike(cell: Cell, nodes: Sequence[Node]) -> None:
    """Raise UserError where the cell's nodes differ: its figure would be of none of them."""
    for node in nodes[: cell.factors.nodes - 1]:
        theirs = node.facts.hardware[cell.factors.device]
        if theirs != cell.hardware:
            raise UserError(
                "nodes", cell.factors.nodes, f"{node} has {theirs}, node 0 {cell.hardware}", "take nodes of one kind"
            )


def _ended(r: Record) -> str:
    reason = f": {r.fail_reason}" if r.fail_reason else ""
    wall = f" in {r.wall_s:.0f} s" if r.wall_s is not None else ""
    return f"{r.status}{wall}{reason}"


def _report(
    out: Console, runs: Sequence[Run], todo: Sequence[Run], settings: Settings, made: Result, history: History
) -> None:
    """The table, every failure by its name, what it cost, and where things lie."""
    again = {_key(run) for run in todo}
    old = [past for run in runs if _key(run) not in again and (past := history.runs.get(_key(run)))]
    if made or len(runs) <= LONG:
        everything, errors = load_all(settings.results_dir)
        wanted = {past.run_id for past in old}
        shown = [r for r in everything if r.run_id in wanted] + list(made)
        if shown:
            print_tables(out, shown, everything)
        collect(settings.results_dir)
        for error in errors:
            print(error, file=sys.stderr)
    elif not _collected(settings.results_dir):
        collect(settings.results_dir)
    if old:
        counts = ", ".join(f"{count} {status}" for status, count in sorted(Counter(p.status for p in old).items()))
        print(f"{len(old)} runs were done already: {counts}")
    for past in old:
        if past.failed:
            print(f"FAILED before {past.run_id}: {past.status} in {past.fail_phase or 'start'}: {past.fail_reason}")
    if any(past.failed for past in old):
        print("on_existing=retry_failed runs the failed ones again")
    for r in made:
        if _failed(r.status):
            log = f"; log: {settings.results_dir / r.log}" if r.log else ""
            print(f"FAILED {r.run_id}: {r.status} in {r.fail_phase or 'start'}: {r.fail_reason}{log}")
    made.failed = sum(_failed(r.status) for r in made) + sum(past.failed for past in old)
    if made.left:
        print(f"{made.left} runs were not made")
    _say_fixed_cost(made)
    if len(made) == 1 and len(runs) == 1:
        print(f"record: {records_dir(settings.results_dir) / made[0].run_id}.json")
    print(f"records: {records_dir(settings.results_dir)}; CSVs: {settings.results_dir}/{{runs,stages,steps}}.csv")


def _say_fixed_cost(made: Sequence[Record]) -> None:
    costs = sorted(r.fixed_cost_s for r in made if r.fixed_cost_s is not None)
    if costs:
        print(
            f"outside their optimizer steps {len(costs)} runs took {statistics.fmean(costs):.1f} s each on average "
            f"(median {statistics.median(costs):.1f}, most {costs[-1]:.1f})"
        )


def _collected(results_dir: Path) -> bool:
    """Whether the CSVs are there and no record is newer."""
    try:
        oldest = min((results_dir / f"{name}.csv").stat().st_mtime_ns for name in TABLES)
        return all(path.stat().st_mtime_ns <= oldest for path in records_dir(results_dir).glob("*.json"))
    except OSError:
        return False


def main(arguments: Sequence[str]) -> int:
    """The same as ``python -m bench -m``."""
    from bench.__main__ import main as bench_main

    return bench_main(["-m", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
