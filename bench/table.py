"""The comparison table: ``python -m bench.table [RESULTS_DIR]`` prints it from the records alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.collect import parity_word
from bench.merit import Merit, merits
from bench.record import Record, load_all

__all__ = ["comparison", "console", "footnotes"]

_MIB = 2**20


def console() -> Console:
    """A console wide enough for the tables where the output is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=190)


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def _parity(r: Record) -> str:
    word = parity_word(r)
    if word != "checked":
        return word
    assert r.parity is not None
    assert r.parity_double is not None
    return f"{max(r.parity.gradient_error, r.parity.update_error):.0e} / {r.parity_double.gradient_error:.0e}"


def _status(r: Record) -> Text:
    if r.status == "ok":
        return Text("ok", style="green")
    return Text(f"{r.status}: {r.fail_reason}", style="yellow" if r.status == "unsupported" else "red")


def _row(r: Record, merit: Merit | None) -> list[str | Text]:
    f = r.factors
    peaks = [s.peak_allocated_bytes for s in r.stages]
    interval = f" [{_number(merit.throughput_low)}, {_number(merit.throughput_high)}]" if merit else ""
    return [
        f.library.name + (" *" if not r.overlap else ""),
        f.model.name,
        str(f.stages),
        str(f.micro_batches),
        f"{f.balance.name} {'-'.join(map(str, r.partition))}" if len(r.partition) > 1 else "",
        f.schedule if f.schedule != "none" else "",
        f.checkpoint,
        _number(merit.step_time_s) if merit else "",
        f"{_number(merit.throughput)}{interval}" if merit else "",
        f"{merit.speedup:.2f}" if merit and merit.speedup is not None else "",
        f"{merit.ratio_to_one_stage:.2f}" if merit and merit.ratio_to_one_stage is not None else "",
        " | ".join(f"{p / _MIB:.0f}" for p in peaks if p is not None),
        _parity(r),
        _number(r.fixed_cost_s),
        _status(r),
    ]


def comparison(records: Sequence[Record], context: Sequence[Record] = ()) -> Table:
    """One row a run; ``context`` holds further records that may be baselines of them."""
    derived = merits({r.run_id: r for r in [*context, *records]}.values())
    settings = dict.fromkeys(
        f"batch_size={r.factors.batch_size} image_size={r.factors.image_size} {r.factors.precision} "
        f"granularity={r.factors.granularity} {r.hardware}"
        for r in records
    )
    table = Table(title="; ".join(settings), title_justify="left")
    for name in ("library", "model", "p", "m", "balance", "schedule", "checkpoint"):
        table.add_column(name, no_wrap=True)
    for name in ("step s", "samples/s", "speed-up", "to p=1", "peak MiB a stage", "parity a / b", "fixed s"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("status")
    for r in records:
        table.add_row(*_row(r, derived.get(r.run_id)))
    return table


def footnotes(records: Sequence[Record]) -> list[str]:
    """What must be said beside the table: definitions, caveats and each library's asymmetries."""
    lines = [
        "samples/s: batch_size / median step time, in brackets the interval of this run's steps; speed-up: over "
        "one plain device at m=1; to p=1: over the library's own one-stage run at the same m.",
        "parity a: worst layer's relative error in the cell's precision; b: in float64 over three steps.",
    ]
    if any(r.factors.device == "cpu" for r in records):
        lines.append("CPU: a stage is one core, peaks count live storages; it says nothing about GPUs.")
    if any(not r.overlap for r in records):
        lines.append("*: stages cannot overlap on CPU in this library; its CPU speed-up says nothing about GPUs.")
    if any(r.factors.share_devices for r in records):
        lines.append("stages shared a GPU: these rows prove correctness and say nothing of speed.")
    notes = dict.fromkeys((r.factors.library.name, note) for r in records for note in r.notes)
    lines += [f"{library}: {note}." for library, note in notes]
    reasons = {r.parity_unchecked for r in records if r.parity_unchecked}
    lines += [f"parity unchecked: {reason}" for reason in sorted(reasons)]
    if any(r.synthetic for r in records):
        lines.insert(0, "SYNTHETIC: made-up records, not measured.")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Print the table of a results folder."""
    results_dir = Path(arguments[0]) if arguments else Path("results")
    records, errors = load_all(results_dir)
    cells = sorted((r for r in records if r.kind == "cell"), key=lambda r: (r.started_at, r.run_id))
    if not cells:
        print(f"results_dir={results_dir}: holds no records; run python -m bench first", file=sys.stderr)
        return 2
    out = console()
    out.print(comparison(cells))
    for line in footnotes(cells):
        out.print(line, highlight=False)
    for error in errors:
        print(error, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
