"""The comparison table: ``python -m bench.table [RESULTS_DIR]`` prints it from the records alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.collect import parity_word
from bench.errors import UserError
from bench.jobs import ParityResult
from bench.merit import Merit, merits
from bench.record import Record, load_all
from bench.trials import over_trials

__all__ = ["comparison", "console", "footnotes", "lost_time", "print_tables", "telling_columns", "trials"]

_MIB = 2**20


def console() -> Console:
    """A console wide enough for the tables where the output is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=190)


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def _worst(result: ParityResult) -> str:
    worst = max(result.gradient_error, result.update_error)
    return f"{worst:.0e}" if worst else "0"


def _parity(r: Record) -> str:
    """The worst error of (a) and of (b), or why there is none."""
    word = parity_word(r)
    if word != "checked":
        return word
    return " / ".join(_worst(result) for result in (r.parity, r.parity_double) if result is not None)


def _status(r: Record) -> Text:
    if r.status == "ok":
        return Text("ok", style="green")
    where = f" in {r.fail_phase}" if r.fail_phase not in ("", "plan", r.status.partition("_")[0]) else ""
    return Text(f"{r.status}{where}: {r.fail_reason}", style="yellow" if r.status == "unsupported" else "red")


def _balance(r: Record) -> str:
    return f"{r.factors.balance.name} {'-'.join(map(str, r.partition))}" if len(r.partition) > 1 else ""


def _model(r: Record) -> str:
    shown = [f"{key}={value}" for key, value in r.factors.model.options]
    own = [r.factors.model.target] if r.factors.model.name == "custom" else []
    return " ".join([r.factors.model.name, *own, *shown])


_Text = Callable[[Record], str]

# What tells rows apart always has a column.
_ALWAYS: dict[str, _Text] = {
    "library": lambda r: r.factors.library.name + (" *" if not r.overlap else ""),
    "p": lambda r: str(r.factors.stages),
    "m": lambda r: str(r.factors.micro_batches),
    "balance": _balance,
    "schedule": lambda r: r.factors.schedule if r.factors.schedule != "none" else "",
}
# What is the same in all rows stands in the title instead.
_WHERE_IT_VARIES: dict[str, _Text] = {
    "model": _model,
    "v": lambda r: str(r.factors.virtual_stages),
    "checkpoint": lambda r: r.factors.checkpoint,
    "batch_size": lambda r: str(r.factors.batch_size),
    "image_size": lambda r: str(r.factors.image_size),
    "num_classes": lambda r: str(r.factors.num_classes),
    "granularity": lambda r: r.factors.granularity,
    "precision": lambda r: r.factors.precision,
    "data": lambda r: r.factors.data.name,
    "seed": lambda r: str(r.factors.seed),
    "trial": lambda r: str(r.trial),
    "device": lambda r: r.factors.device + (" shared" if r.factors.share_devices else ""),
    "hardware": lambda r: r.hardware,
}


# Of the pipelines that a profile says something of.
_WHERE_PREDICTED: dict[str, _Text] = {
    "imbalance": lambda r: f"{r.prediction.imbalance:.2f}" if r.prediction else "",
    "predicted s": lambda r: _number(r.prediction.step_time_s) if r.prediction else "",
}


def _figures(r: Record, merit: Merit | None) -> list[str | Text]:
    peaks = [s.peak_allocated_bytes for s in r.stages]
    interval = f" [{_number(merit.throughput_low)}, {_number(merit.throughput_high)}]" if merit else ""
    return [
        _number(merit.steps.median) if merit else "",
        f"{_number(merit.throughput)}{interval}" if merit else "",
        f"{merit.speedup:.2f}" if merit and merit.speedup is not None else "",
        f"{merit.ratio_to_one_stage:.2f}" if merit and merit.ratio_to_one_stage is not None else "",
        " | ".join("?" if p is None else f"{p / _MIB:.0f}" for p in peaks),
        _parity(r),
        _number(r.fixed_cost_s),
        _status(r),
    ]


def comparison(records: Sequence[Record], context: Sequence[Record] = ()) -> Table:
    """One row a run, in the order given; ``context`` holds further records that may be their baselines.

    Only runs that are ``ok`` have a step time, a throughput and a speed-up.
    """
    derived = merits({r.run_id: r for r in [*context, *records]}.values())
    predicted = _WHERE_PREDICTED if any(r.prediction for r in records) else {}
    columns = {**telling_columns(records), **predicted}
    title = " ".join(f"{name}={text(records[0])}" for name, text in _WHERE_IT_VARIES.items() if name not in columns)
    table = Table(title=title, title_justify="left")
    # Folded rather than cut: on a narrow terminal no digit may get lost.
    for name in columns:
        table.add_column(name, overflow="fold")
    for name in ("step s", "samples/s", "speed-up", "to p=1", "peak MiB a stage", "parity a / b", "fixed s"):
        table.add_column(name, overflow="fold", justify="right")
    table.add_column("status", overflow="fold")
    for r in records:
        table.add_row(*(text(r) for text in columns.values()), *_figures(r, derived.get(r.run_id)))
    return table


def trials(records: Sequence[Record]) -> Table | None:
    """One row a cell with several runs that are ok: its figure over trials.  None where there is no such cell."""
    derived = merits(records)
    cells: dict[tuple[str, str], list[Record]] = {}
    for r in records:
        cells.setdefault((r.cell_id, r.hardware), []).append(r)
    rows = [(of, ok) for of in cells.values() if len(ok := [r for r in of if r.run_id in derived]) > 1]
    if not rows:
        return None
    columns = telling_columns([of[0] for of, _ in rows], leave_out=("trial",))
    table = Table(title="over trials: mean of the trials' medians", title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    for name in ("trials", "step s", "samples/s", "low", "high"):
        table.add_column(name, overflow="fold", justify="right")
    table.add_column("low, high are", overflow="fold")
    for of, ok in rows:
        seconds = over_trials([derived[r.run_id].steps.median for r in ok])
        speed = over_trials([derived[r.run_id].throughput for r in ok])
        failed = f" of {len(of)}" if len(of) > len(ok) else ""
        figures = [_number(value) for value in (seconds.value, speed.value, speed.low, speed.high)]
        table.add_row(*(text(ok[0]) for text in columns.values()), f"{len(ok)}{failed}", *figures, speed.words)
    return table


# The terms of ``account.Account`` that add up to the step, in that order.
_TERMS = {
    "ideal": "ideal_s",
    "bubble": "bubble_s",
    "imbalance": "imbalance_s",
    "recomputation": "recompute_s",
    "communication, waiting, overhead": "communication_s",
    "unexplained": "unexplained_s",
}


def lost_time(records: Sequence[Record]) -> Table | None:
    """One row a traced run: where its traced step went, in per cent, and its bubble.  None without such a run."""
    traced = [r for r in records if r.status == "ok" and r.account is not None]
    if not traced:
        return None
    columns = telling_columns(traced)
    table = Table(title="where a traced step went, % of it", title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    for name in ("traced step s", *_TERMS, "measured bubble", "ideal bubble"):
        table.add_column(name, overflow="fold", justify="right")
    for r in traced:
        account = r.account
        assert account is not None
        parts = [getattr(account, name) for name in _TERMS.values()]
        table.add_row(
            *(text(r) for text in columns.values()),
            _number(account.step_time_s),
            *("" if part is None else f"{part / account.step_time_s:.1%}" for part in parts),
            f"{account.bubble:.3f}",
            "" if account.ideal_bubble is None else f"{account.ideal_bubble:.3f}",
        )
    return table


def print_tables(out: Console, records: Sequence[Record], context: Sequence[Record] = ()) -> None:
    """All that a study has to say: the comparison, its trials, where the time went, and what must be said beside."""
    for table in (comparison(records, context), trials(records), lost_time(records)):
        if table is not None:
            out.print(table)
    for line in footnotes(records, context):
        out.print(line, highlight=False, markup=False)


def telling_columns(records: Sequence[Record], leave_out: Sequence[str] = ()) -> dict[str, _Text]:
    """The columns that tell these rows apart, and the ones that every table has."""
    varying = {
        name: text
        for name, text in _WHERE_IT_VARIES.items()
        if name not in leave_out and len({text(r) for r in records}) > 1
    }
    nodes: dict[str, _Text] = {"nodes": lambda r: str(r.factors.nodes)}
    return {**_ALWAYS, **(nodes if any(r.factors.nodes > 1 for r in records) else {}), **varying}


def footnotes(records: Sequence[Record], context: Sequence[Record] = ()) -> list[str]:
    """What must be said beside ``comparison(records, context)``: definitions, caveats, asymmetries."""
    derived = merits({r.run_id: r for r in [*context, *records]}.values())
    lines = [
        "samples/s: batch_size / median step time, in brackets the interval of this run's steps; speed-up: over "
        "one plain device at m=1; to p=1: over the library's own one-stage run at the same m.",
        "parity a: worst layer's relative error in the cell's precision; b: in float64 over three steps.",
    ]
    if any(r.prediction for r in records):
        lines.append(
            "imbalance: longest stage's profiled time over the mean; predicted s: a step of the simulated schedule."
        )
    lines += _tolerances(records)
    if any(r.synthetic for r in records):
        lines.insert(0, "SYNTHETIC: made-up records, not measured.")
    shared = [r for r in records if r.factors.share_devices and r.factors.stages > 1]
    timed = [r for r in records if r.run_id in derived and r not in shared]
    if any(derived[r.run_id].speedup is None for r in timed):
        lines.append("no speed-up: the baseline at this setting has not been run; a sweep (-m) runs it as well.")
    doubtful: dict[str, list[str]] = {}
    for r in timed:
        steps = derived[r.run_id].steps
        if steps.verdict != "stable":
            doubtful.setdefault(f"{steps.verdict}: {steps.reason}", []).append(_short(r))
    for said, rows in doubtful.items():
        lines.append(f"{said} ({'all rows' if len(rows) == len(timed) else ', '.join(dict.fromkeys(rows))}).")
    costs = [r.stamp_cost_s for r in records if r.stamp_cost_s is not None]
    if costs:
        lines.append(
            f"a stamp of the trace cost the host {min(costs) * 1e6:.2g} to {max(costs) * 1e6:.2g} µs, "
            "in traced steps only."
        )
    if any(r.factors.device == "cpu" for r in records):
        lines.append("CPU: a stage is one core, peaks count live storages; it says nothing about GPUs.")
    if any(not r.overlap for r in records):
        lines.append("*: stages cannot overlap on CPU in this library; its CPU speed-up says nothing about GPUs.")
    if shared:
        lines.append("stages shared a GPU: these rows prove correctness and say nothing of speed.")
    lines += dict.fromkeys(f"parity unchecked: {r.parity_unchecked}" for r in records if r.parity_unchecked)
    lines += dict.fromkeys(f"{r.factors.library.name}: {note}." for r in records for note in r.notes)
    return lines


def _short(r: Record) -> str:
    return f"{r.factors.library.name} p={r.factors.stages} m={r.factors.micro_batches}"


def _tolerances(records: Sequence[Record]) -> list[str]:
    """What parity allowed, since it need not be the same for all rows: the wider ones name theirs."""
    lines = []
    for part, results in (("a", [r.parity for r in records]), ("b", [r.parity_double for r in records])):
        rows: dict[str, list[str]] = {}
        for r, result in zip(records, results, strict=True):
            if result is not None:
                allowed = f"{result.precision} gradient {result.gradient_tolerance:.1e}, update "
                rows.setdefault(f"{allowed}{result.update_tolerance:.1e}", []).append(_short(r))
        usual = max(rows, key=lambda allowed: len(rows[allowed]), default="")
        for allowed, labels in rows.items():
            where = "" if allowed == usual else f" for {', '.join(dict.fromkeys(labels))}"
            lines.append(f"parity {part} allowed {allowed}{where}.")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Print the table of a results folder, in the order the runs were started."""
    results_dir = Path(arguments[0]) if arguments else Path("results")
    records, errors = load_all(results_dir)
    cells = sorted((r for r in records if r.kind == "cell"), key=lambda r: (r.started_at, r.run_id))
    for error in errors:
        print(error, file=sys.stderr)
    if not cells:
        print(UserError("results_dir", results_dir, "holds no records", "run python -m bench first"), file=sys.stderr)
        return 2
    out = console()
    print_tables(out, cells)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
