"""Run cells one after the other, show how far it is, and end with the table."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench.collect import collect
from bench.errors import UserError
from bench.factors import Settings
from bench.jobs import Message
from bench.launch import Interrupted
from bench.plan import Cell
from bench.record import Record, load_all, records_dir
from bench.registry import capabilities
from bench.resolve import Unmeasured, resolve
from bench.run import Busy, Stopped, bury_dead, done, run_cell, unmeasured, unsupported
from bench.table import console, print_tables
from bench.warm import Warm, fresh

__all__ = ["check_writable", "sweep"]


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


class _Progress:
    """One line a cell that follows its phases on a terminal; a plain line a phase elsewhere."""

    def __init__(self, out: Console, label: str) -> None:
        self._out, self._label, self._last = out, label, ""
        self._live = out.status(label) if out.is_terminal else None

    def __enter__(self) -> _Progress:
        if self._live is not None:
            self._live.start()
        else:
            self._out.print(self._label, highlight=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, message: Message) -> None:
        if message.rank != 0:
            return
        text = message.note if message.waiting else message.phase
        if self._live is not None:
            step = f" step {message.index + 1}" if message.kind == "step" else ""
            self._live.update(f"{self._label}: {text}{step}")
        elif message.waiting and text != self._last:
            self._out.print(f"  {text}", highlight=False)
        self._last = text


def _label(cell: Cell, trial: int, number: int, total: int) -> str:
    f = cell.factors
    return (
        f"[{number}/{total}] {f.library.name} {f.model.name} stages={f.stages} "
        f"micro_batches={f.micro_batches} {f.device} trial={trial}"
    ).replace("[", r"\[", 1)


def _skippable(cell: Cell, trial: int, finished: set[tuple[str, int, str]]) -> bool:
    return (cell.id, trial, cell.hardware) in finished


def sweep(cells: Sequence[Cell], settings: Settings) -> list[Record]:
    """Run every cell for every trial, trials outermost so that a slow drift falls on all cells alike.

    Cells of a sweep that are done already are not run again.  Always ends with the CSVs, the table
    and the name of every failure; Interrupted passes through after that.
    """
    check_writable(settings.results_dir)
    for buried in bury_dead(settings.results_dir):
        print(f"{buried.run_id}: {buried.fail_reason}", file=sys.stderr)
    out = console()
    runs = [(cell, trial) for trial in settings.trials for cell in cells]
    finished = done(settings.results_dir) if len(runs) > 1 else set()
    made: list[Record] = []
    old = 0
    stop: Interrupted | None = None
    start = time.monotonic()
    with Warm() as warm:
        for number, (cell, trial) in enumerate(runs, 1):
            if cell.problem is not None:
                made.append(unsupported(cell, settings, trial))
                continue
            if _skippable(cell, trial, finished):
                old += 1
                continue
            try:
                with _Progress(out, _label(cell, trial, number, len(runs))) as progress:
                    made.append(_run(cell, settings, trial, progress, warm, alone=len(runs) == 1))
            except Busy as busy:
                out.print(f"skipped: {busy}", highlight=False)
                continue
            except Stopped as stopped:
                stop = stopped
                made.append(stopped.record)
                break
            except Interrupted as interrupted:  # while something was measured for a cell that has not begun
                stop = interrupted
                break
            _say(out, made[-1], number, len(runs), start)
    _report(out, cells, settings, made, old)
    if stop is not None:
        raise stop
    return made


def _run(cell: Cell, settings: Settings, trial: int, progress: _Progress, warm: Warm, *, alone: bool) -> Record:
    """Measure what the cell's balance needs, then run it; a mistake that shows only then is a row of a sweep."""
    start = warm.starter(capabilities(cell.factors.library).modules) if settings.preload else fresh
    try:
        cell = resolve(cell, settings, progress, start)
    except Unmeasured as failure:
        return unmeasured(cell, settings, trial, failure.outcome, failure.what, failure.log)
    except UserError as problem:
        if alone:
            raise
        return unsupported(replace(cell, problem=problem), settings, trial)
    return run_cell(cell, settings, trial, progress, start)


def _say(out: Console, r: Record, number: int, total: int, start: float) -> None:
    left = (time.monotonic() - start) / number * (total - number)
    tail = f", about {left:.0f} s left" if number < total else ""
    reason = f": {r.fail_reason}" if r.fail_reason else ""
    wall = f" in {r.wall_s:.0f} s" if r.wall_s is not None else ""
    out.print(f"  {r.status}{wall}{reason}{tail}", highlight=False, markup=False)


def _report(out: Console, cells: Sequence[Cell], settings: Settings, made: list[Record], old: int) -> None:
    everything, errors = load_all(settings.results_dir)
    if old:
        keys = {(c.id, trial, c.hardware) for c in cells for trial in settings.trials}
        shown = [r for r in everything if r.kind == "cell" and r.status == "ok"]
        made_ids = {r.run_id for r in made}
        made = [r for r in shown if (r.cell_id, r.trial, r.hardware) in keys and r.run_id not in made_ids] + made
    if made:
        print_tables(out, made, everything)
    if old:
        print(f"{old} runs were done already")
    for r in made:
        if r.status not in ("ok", "unsupported"):
            log = f"; log: {settings.results_dir / r.log}" if r.log else ""
            print(f"FAILED {r.run_id}: {r.status} in {r.fail_phase or 'start'}: {r.fail_reason}{log}")
    collect(settings.results_dir)
    for error in errors:
        print(error, file=sys.stderr)
    if len(made) == 1:
        print(f"record: {records_dir(settings.results_dir) / made[0].run_id}.json")
    print(f"records: {records_dir(settings.results_dir)}; CSVs: {settings.results_dir}/{{runs,stages,steps}}.csv")
