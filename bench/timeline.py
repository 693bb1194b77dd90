"""Draw a run's traced step: ``python -m bench.timeline RUN [RESULTS_DIR] [step=0]``.

RUN is a run's id, or enough of its beginning.  Writes PNG and SVG and a trace that Perfetto and
chrome://tracing open, beside the run's spans, and prints the account of where the time went.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.errors import UserError
from bench.jobs import SpanResult
from bench.record import Record, RecordError, load, records_dir
from bench.traces import read_spans

__all__ = ["chrome_trace", "draw", "lines_of_account"]

# Okabe and Ito's colours, told apart by readers with any colour vision.
COLOURS = {
    "forward": "#0072B2",
    "recompute": "#E69F00",
    "backward": "#009E73",
    "backward_weight": "#56B4E9",
    "update": "#999999",
}


def chrome_trace(spans: Sequence[SpanResult]) -> dict[str, object]:
    """The Trace Event Format: a process a step, a thread a device, times in microseconds."""
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": step, "tid": stage, "args": {"name": f"stage {stage}"}}
        for step, stage in sorted({(s.step, s.stage) for s in spans})
    ]
    events += [
        {
            "ph": "X",
            "name": s.kind if s.micro_batch < 0 else f"{s.kind} {s.micro_batch}",
            "cat": s.kind,
            "pid": s.step,
            "tid": s.stage,
            "ts": s.start_s * 1e6,
            "dur": (s.end_s - s.start_s) * 1e6,
            "args": {"micro_batch": s.micro_batch, "model_stage": s.model_stage},
        }
        for s in spans
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw(spans: Sequence[SpanResult], title: str, paths: Sequence[Path]) -> None:
    """One traced step: a row a device, the number of its micro-batch in each span that has room for it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    devices = sorted({s.stage for s in spans})
    end = max(s.end_s for s in spans)
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.55 * len(devices)), layout="constrained")
    kinds = [kind for kind in COLOURS if any(s.kind == kind for s in spans)]
    # What lies within another span (a recomputation within its backward) is drawn on top of it.
    for s in sorted(spans, key=lambda s: s.start_s - s.end_s):
        bar = (s.start_s * 1e3, (s.end_s - s.start_s) * 1e3)
        axes.broken_barh([bar], (s.stage - 0.4, 0.8), facecolors=COLOURS[s.kind], edgecolor="white", linewidth=0.4)
        if s.micro_batch >= 0 and s.end_s - s.start_s > 0.015 * end:
            axes.text(
                bar[0] + bar[1] / 2, s.stage, str(s.micro_batch), ha="center", va="center", color="white", fontsize=7
            )
    axes.set_yticks(devices, [f"stage {d}" for d in devices])
    axes.invert_yaxis()
    axes.set_xlim(0, end * 1e3)
    axes.set_xlabel("ms from the step's start; the numbers are micro-batches")
    axes.set_title(title, fontsize=9)
    handles = [Patch(color=COLOURS[kind], label=kind.replace("_", " ")) for kind in kinds]
    figure.legend(handles=handles, ncols=len(kinds), fontsize=8, loc="outside lower center", frameon=False)
    for spine in ("top", "right"):
        axes.spines[spine].set_visible(False)
    for path in paths:
        figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def lines_of_account(record: Record) -> list[str]:
    """Each part of the traced step in seconds and per cent of it."""
    a = record.account
    if a is None:
        return []
    parts = [
        ("ideal: all work spread evenly over the devices", a.ideal_s),
        ("bubble of the schedule", a.bubble_s),
        ("imbalance of the stages", a.imbalance_s),
        ("recomputation", a.recompute_s),
        ("communication, waiting and library overhead", a.communication_s),
        ("unexplained: before the first forward, after the last update", a.unexplained_s),
    ]
    shown = [f"{'traced step':62} {a.step_time_s:9.4f} s"]
    shown += [
        f"  {name:60} {seconds:9.4f} s {100 * seconds / a.step_time_s:6.1f} %"
        for name, seconds in parts
        if seconds is not None
    ]
    ideal = "no formula for this schedule" if a.ideal_bubble is None else f"ideal {a.ideal_bubble:.3f}"
    shown.append(f"bubble {a.bubble:.3f} ({ideal}); devices overlapped: {'yes' if a.overlap else 'no'}")
    if record.stamp_cost_s is not None:
        stamps = f"a stamp costs {record.stamp_cost_s * 1e6:.1f} µs of the host"
        shown.append(f"{stamps}; measured steps, without stamps, are in steps.csv")
    return shown


def _spans(path: Path) -> tuple[SpanResult, ...]:
    try:
        return read_spans(path)
    except ValueError as error:
        raise UserError("RUN", path, f"holds no spans ({error})", "run the cell again") from None


def _load(path: Path) -> Record:
    try:
        return load(path)
    except RecordError as error:
        raise UserError("RUN", path, str(error), "run the cell again") from None


def _record(name: str, results_dir: Path) -> Record:
    given = Path(name)
    if given.suffix == ".json" and given.exists():
        return _load(given)
    found = sorted(p for p in records_dir(results_dir).glob("*.json") if p.stem.startswith(name))
    if len(found) != 1:
        said = f"{len(found)} runs of {results_dir} begin so" if found else f"no run of {results_dir} begins so"
        raise UserError("RUN", name, said, "give a run_id of runs.csv")
    return _load(found[0])


def main(arguments: Sequence[str]) -> int:
    """Exit code 2 for a run that is not there, or has no trace."""
    if any(a in ("-h", "--help") for a in arguments):
        print((__doc__ or "").strip())
        return 0
    try:
        wanted = [a for a in arguments if not a.startswith("step=")]
        step = next((a.removeprefix("step=") for a in arguments if a.startswith("step=")), "0")
        if not 1 <= len(wanted) <= 2:
            raise UserError("RUN", " ".join(wanted), "one run is needed", "python -m bench.timeline RUN [RESULTS_DIR]")
        results_dir = Path(wanted[1]) if len(wanted) == 2 else Path("results")
        record = _record(wanted[0], results_dir)
        if wanted[0].endswith(".json"):
            results_dir = Path(wanted[0]).parent.parent
        path = results_dir / record.trace
        if not record.trace or not path.exists():
            raise UserError("RUN", record.run_id, "has no trace", "run it with trace=true")
        spans = _spans(path)
        chosen = [s for s in spans if str(s.step) == step]
        if not chosen:
            raise UserError("step", step, f"the trace has steps 0 to {spans[-1].step}", "choose one of them")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    f = record.factors
    title = (
        f"{'SYNTHETIC ' if record.synthetic else ''}{f.library.name} {f.model.name} p={f.stages} m={f.micro_batches} "
        f"{f.schedule} checkpoint={f.checkpoint} {record.hardware}"
    )
    pictures = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    draw(chosen, title, pictures)
    trace = path.with_suffix(".trace.json")
    trace.write_text(json.dumps(chrome_trace(spans)))
    print("\n".join([title, *lines_of_account(record)]))
    print(f"drawn: {', '.join(map(str, pictures))}; for Perfetto: {trace}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
