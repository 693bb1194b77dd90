"""The tables of a report; see the function of each for what stands in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from bench.registry import capabilities, libraries
from bench.report.data import ACCOUNT, PEAKS, TRIALS, Cell, Run, Setting, Stat, Study
from bench.report.layout import DASH, Column, Entry, Notes, Row, Table, number, shown

__all__ = ["CPU", "WORDS", "cell_label", "pipelined", "slug", "tables"]

MIB = 2**20
WORDS = {
    "oom": "OOM",
    "unsupported": DASH,
    "timeout": "timeout",
    "error": "error",
    "interrupted": "interrupted",
    "parity_failed": "parity failed",
}
CPU = "CPU: says nothing about GPUs"
_ALONE = "stages of this library cannot overlap on a CPU"


def slug(text: str) -> str:
    """Part of a file's name, of any text."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:32].strip("-") or "x"


def pipelined(r: Run) -> bool:
    """Whether the run's devices are the stages of a pipeline."""
    known = libraries().get(r.library)
    return capabilities(known).stages_are == "devices" if known else r.schedule != "none"


def _replicas(r: Run) -> bool:
    known = libraries().get(r.library)
    return known is not None and capabilities(known).stages_are == "replicas"


def _balance(r: Run) -> str:
    cut = r.partition if "-" in r.partition else ""
    return f"{r.balance} {r.balance_options} {cut}".replace("  ", " ").strip() if pipelined(r) and r.stages > 1 else ""


# Columns that stand in a table only where they tell its rows apart.
_VARIANTS: dict[str, tuple[str, Callable[[Run], str]]] = {
    "v": ("virtual stages", lambda r: str(r.virtual_stages)),
    "nodes": ("machines", lambda r: str(r.nodes)),
    "schedule": ("the schedule", lambda r: r.schedule if r.schedule != "none" else ""),
    "checkpoint": ("which micro-batches recompute", lambda r: r.checkpoint),
    "options": ("the library's options", lambda r: r.library_options),
    "version": ("the library's version", lambda r: r.library_version),
}


def _varying(cells: Sequence[Cell]) -> dict[str, tuple[str, Callable[[Run], str]]]:
    """The variants in which two cells of one library differ; a version that is a library's only one tells nothing."""
    by_library: dict[str, list[Run]] = {}
    for c in cells:
        by_library.setdefault(c.head.library, []).append(c.head)
    result = {}
    for name, (doc, text) in _VARIANTS.items():
        alone = name in ("options", "version")
        groups: Iterable[Sequence[Run]] = by_library.values() if alone else [[c.head for c in cells]]
        if any(len({text(r) for r in runs} - ({""} if not alone else set())) > 1 for runs in groups):
            result[name] = (doc, text)
    return result


def cell_label(cell: Cell, cells: Sequence[Cell], *, without: Sequence[str] = ()) -> str:
    """The cell in few words among others; ``without`` names what need not be said: p, m, balance."""
    r = cell.head
    parts = [r.library + ("*" if not r.overlap else "")]
    parts += [f"{k}={v}" for k, v in (("p", r.stages), ("m", r.micro_batches)) if k not in without]
    if "balance" not in without and (text := _balance(r)):
        parts.append(text)
    for name, (_, of) in _varying(cells).items():
        text = of(r)
        if text and not (name in ("v", "nodes") and text == "1"):
            parts.append(f"{name}={text}" if name in ("v", "nodes", "version") else text)
    return " ".join(parts)


def _identity(
    cells: Sequence[Cell], notes: Notes, *, timed: bool = True
) -> tuple[list[Column], Callable[[Cell], list[Entry]]]:
    """The columns that say which cell a row is of, with what must be said of it; ``timed``: of its times, too."""
    varying = _varying(cells)
    columns = [
        Column("library", "the library"),
        Column("p", "stages; replicas for data parallelism", "number"),
        Column("m", "micro-batches", "number"),
        Column("balance", "the rule that picked the boundaries, and these: layers of each stage"),
        *(Column(name, doc) for name, (doc, _) in varying.items()),
    ]

    # What holds for every row is said once.
    said = {cell: _remarks(cell, timed=timed) for cell in cells}
    figured = [set(said[c]) for c in cells if c.status == "ok"]
    common = set.intersection(*figured) if len(figured) > 1 else set()
    for text in (t for t in dict.fromkeys(t for c in cells for t in said[c]) if t in common):
        notes.say(f"all rows: {text}")

    def entries(cell: Cell) -> list[Entry]:
        r = cell.head
        return [
            Entry(r.library, marks=tuple(notes.mark(text) for text in said[cell] if text not in common)),
            Entry(str(r.stages), r.stages),
            Entry(str(r.micro_batches), r.micro_batches),
            Entry(_balance(r)),
            *(Entry(text(r)) for _, text in varying.values()),
        ]

    return columns, entries


def _remarks(cell: Cell, *, timed: bool) -> list[str]:
    r = cell.head
    lines = []
    if timed and cell.throughput and cell.throughput.kind == "steps":
        lines.append("one trial: the interval of its own steps, their range where they are fewer than six.")
    if timed:
        doubtful = sorted({r.verdict for r in cell.ok} & {"drifting", "noisy"})
        lines += [f"{word}: the steps of a trial, see verdict_reason in runs.csv." for word in doubtful]
    if not r.overlap:
        lines.append(f"{_ALONE}: its speed there says nothing about GPUs.")
    if _replicas(r):
        lines.append("p counts replicas of the whole model, which share the micro-batches.")
    unchecked = sorted({x.parity_unchecked or "no reason given" for x in cell.ok if x.parity == "unchecked"})
    lines += [f"parity unchecked: {reason}." for reason in unchecked]
    if any(x.parity == "" for x in cell.ok):
        lines.append("parity was not recorded.")
    if cell.ok and cell.failed:
        endings = ", ".join(sorted({WORDS[x.status] if x.status != "unsupported" else x.status for x in cell.failed}))
        lines.append(f"{len(cell.failed)} of {len(cell.counted)} trials failed ({endings}), see Failures.")
    return lines


def _ending(cell: Cell, notes: Notes) -> Entry:
    """What stands in the place of a failed cell's figures."""
    reasons = sorted({r.fail_reason for r in cell.failed if r.status == cell.status})
    marks = [notes.mark(f"unsupported: {reason}.") for reason in reasons] if cell.status == "unsupported" else []
    return Entry(WORDS[cell.status], marks=tuple(marks))


def _figure(cell: Cell, stat: Stat | None, notes: Notes, missing: str = "") -> Entry:
    """A figure with its marks; of a failed cell how it ended, of a missing one a dash, and why."""
    if cell.status != "ok":
        return _ending(cell, notes)
    if stat is None:
        return Entry(DASH, marks=(notes.mark(missing),) if missing else ())
    if stat.kind == "interval":
        notes.say(
            f"[low, high]: 95 % interval of the median over the trials, from {TRIALS} trials on "
            "(of five trials it is their range, which holds the median with 93.75 %)."
        )
    if stat.kind == "range":
        notes.say("(low to high): the range of fewer than five trials; it is no interval.")
    return Entry(shown(stat), stat.value, stat)


def _plain(cell: Cell, value: float | None, notes: Notes, digits: int = 3) -> Entry:
    return _ending(cell, notes) if cell.status != "ok" else Entry(number(value, digits), value)


def _caveats(setting: Setting, notes: Notes) -> None:
    if setting.head.device == "cpu":
        notes.say(f"{CPU}; a stage is one core, peaks count live storages.")
    if setting.head.share_devices:
        notes.say("stages shared a device: these rows prove correctness and say nothing of speed.")


def _ids(cell: Cell) -> tuple[str, ...]:
    return tuple(r.run_id for r in cell.runs)


def _best(cells: Sequence[Cell], of: Callable[[Cell], Stat | None], sign: int) -> Cell | None:
    """The best cell where it is that for sure: its interval meets no other's; ranges prove nothing."""
    found = [(sign * s.value, s, c) for c in cells if (s := of(c)) is not None]
    if len(found) < 2 or any(s.kind != "interval" for _, s, _ in found):
        return None
    _, best, cell = max(found, key=lambda f: f[0])
    others = [s for _, s, c in found if c is not cell]
    clear = all(s.high < best.low if sign > 0 else s.low > best.high for s in others)
    return cell if clear else None


def _libraries(study: Study) -> Table:
    """0: what each library can do, read from its adapter; its version as the study's runs recorded it."""
    notes = Notes()
    versions: dict[str, set[str]] = {}
    for r in study.runs:
        versions.setdefault(r.library, set()).add(r.library_version)
    rows = []
    for name, library in sorted(libraries().items()):
        can = capabilities(library)
        process = {"one": "one process for all devices", "per_stage": "one process a device"}[can.ranks]
        means = {"devices": "pipeline", "replicas": "replicas", "none": "one device"}[can.stages_are]
        own = [f"{b} ({', '.join(devices)})" for b, devices in can.native_balances.items()]
        fields = [
            name,
            f"{means}, {process}",
            ", ".join(s.name for s in can.schedules) or DASH,
            ", ".join(can.checkpoints),
            "any" if can.stages_are == "devices" else DASH,
            "yes" if can.several_nodes else "no",
            "yes" if can.overlap_on_cpu else "no",
            ", ".join(own) or DASH,
            ", ".join(sorted(filter(None, versions.get(name, ())))) or DASH,
        ]
        marks = tuple(notes.mark(f"{note}.") for note in can.notes)
        rows.append(Row((Entry(fields[0], marks=marks), *map(Entry, fields[1:]))))
    for name in sorted(versions.keys() - libraries().keys()):
        mark = notes.mark("not registered here: what it can do is not known.")
        said = ", ".join(sorted(filter(None, versions[name]))) or DASH
        rows.append(Row((Entry(name, marks=(mark,)), *[Entry(DASH)] * 7, Entry(said))))
    columns = (
        Column("library", "the library"),
        Column("process model", "what its devices are, and which processes drive them"),
        Column("schedules", "the first is its own"),
        Column("checkpoint modes", "which micro-batches may recompute"),
        Column("boundaries", "which it takes from its user; read back and checked in every run"),
        Column("several nodes", "whether the harness can run it on several"),
        Column("overlap on CPU", "whether its stages can run at once there"),
        Column("own balancers", "its own routines for a partition, and the devices they run on"),
        Column("version", "installed where the runs were made; of torch for libraries in it"),
    )
    return Table("0-libraries", "Libraries", columns, tuple(rows), notes.lines, study.synthetic)


def _spread(values: Iterable[int]) -> str:
    seen = sorted(set(values))
    return f"{seen[0]}" if len(seen) == 1 else f"{seen[0]} to {seen[-1]}" if seen else DASH


def _listed(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(filter(None, values)))) or DASH


def _setup(setting: Setting) -> Table:
    """1: what is the same in all runs of a setting, and how many there are."""
    r, runs = setting.head, setting.runs
    ok = [x for x in runs if x.status == "ok"]
    notes = Notes()
    _caveats(setting, notes)
    # Replicas hold the whole model each, stages a part.
    parameters = {
        x.devices[0].parameters if _replicas(x) else sum(s.parameters for s in x.devices) for x in ok if x.devices
    }
    versions = {x.library: x.library_version for x in runs}
    shared = "yes: stages may share a device" if r.share_devices else "no"
    commits = {x.git_commit + (" with changes" if x.git_dirty else "") for x in runs if x.git_commit}
    lines = {
        "hardware": r.hardware,
        "devices": f"{r.device} ({_listed(s.device for x in ok for s in x.devices)})",
        "shared devices": shared,
        "hosts": _listed(x.host for x in runs),
        "torch": r.torch_version or DASH,
        "library versions": _listed(f"{k} {v}" for k, v in versions.items() if v),
        "harness": _listed(commits),
        "model": " ".join(filter(None, [r.model, r.model_options])),
        "built by": r.model_target,
        "granularity": r.granularity,
        "parameters": ", ".join(f"{n:,}" for n in sorted(parameters)) or DASH,
        "FLOP a step": ", ".join(f"{n:,}" for n in sorted({x.flops_per_step for x in ok if x.flops_per_step})) or DASH,
        "input": f"{r.batch_size} × 3 × {r.image_size} × {r.image_size}, {r.num_classes} classes",
        "data": " ".join(filter(None, [r.data, r.data_path])),
        "precision": r.precision,
        "optimizer": f"{r.optimizer}, lr {r.lr:g}, momentum {r.momentum:g}",
        "seed": str(r.seed),
        "measured steps a run": _spread(x.steps for x in ok),
        "warm-up steps a run": _spread(x.warmup_steps for x in ok),
        "trials a cell": _spread(len({x.trial for x in c.runs}) for c in setting.cells),
        "cells": str(len(setting.cells)),
        "runs": f"{len(runs)}, {len(ok)} ok",
    }
    rows = tuple(Row((Entry(k), Entry(v))) for k, v in lines.items())
    columns = (Column("property", "what is the same in all runs of the setting"), Column("value", "its value"))
    name, caption = f"1-setup-{setting.name.lower()}", f"Set-up of {setting.name}: {setting.label}"
    return Table(name, caption, columns, rows, notes.lines, r.synthetic)


def _throughput(setting: Setting, m: int, of_m: Sequence[Cell]) -> Table:
    """2: step time, throughput, speed-up and efficiency at one number of micro-batches."""
    notes = Notes()
    base = setting.baseline
    cells = [*([base] if base is not None and base not in of_m else []), *of_m]
    columns, identity = _identity(cells, notes)
    _caveats(setting, notes)
    missing = "no speed-up: the baseline of this setting is missing or has no figure."
    if setting.head.share_devices:
        missing = "no speed-up: stages shared a device."
    no_single = "the library's own one-stage run at this m is missing."
    figures: list[tuple[Column, Callable[[Cell], Stat | None], str, int]] = [
        (Column("step s", "median step time", "stat"), lambda c: c.step_time, "", -1),
        (Column("samples/s", "mini-batch over the median step time", "stat"), lambda c: c.throughput, "", 1),
        (Column("speed-up", "throughput over the baseline's", "stat"), lambda c: c.speedup, missing, 1),
        (Column("to p=1", "over the library's own one-stage run", "stat"), lambda c: c.ratio, no_single, 1),
        (Column("efficiency", "speed-up over p", "stat"), lambda c: c.efficiency, missing, 1),
    ]
    best = [_best(cells, of, sign) for _, of, _, sign in figures]
    rows = []
    for c in cells:
        trials = Entry(str(len(c.ok)), len(c.ok))
        entries = [*identity(c), trials]
        for (_, of, why, _), winner in zip(figures, best, strict=True):
            e = _figure(c, of(c), notes, why)
            entries.append(Entry(e.text, e.value, e.stat, c is winner, e.marks))
        rows.append(Row(tuple(entries), _ids(c)))
    if base is not None and base.throughput is not None:
        about = f"{base.head.library}, m={base.head.micro_batches}, {shown(base.throughput)} samples/s"
        notes.say("The intervals of speed-up and efficiency take the baseline as it is; its own is in its row.")
    else:
        about = "not among these runs" if any(c.speedup for c in cells) else "missing"
    notes.say(f"Bold: best of its column, its interval over {TRIALS} trials or more apart from every other one.")
    caption = f"Throughput, speed-up and efficiency at m={m} ({setting.name}: {setting.label}). Baseline: {about}"
    return Table(
        f"2-throughput-{setting.name.lower()}-m{m}",
        caption,
        (*columns, Column("trials", "process groups that gave a figure", "number"), *(f[0] for f in figures)),
        tuple(rows),
        notes.lines,
        setting.head.synthetic,
    )


def _of_setting(
    setting: Setting,
    name: str,
    caption: str,
    cells: Sequence[Cell],
    more: Mapping[Column, Callable[[Cell, Notes], Entry]],
    *said: str,
) -> Table:
    """A table with a row a cell: which it is, and further columns."""
    notes = Notes()
    columns, identity = _identity(cells, notes)
    _caveats(setting, notes)
    for line in said:
        notes.say(line)
    rows = tuple(Row((*identity(c), *(of(c, notes) for of in more.values())), _ids(c)) for c in cells)
    named = f"{caption} ({setting.name}: {setting.label})"
    return Table(f"{name}-{setting.name.lower()}", named, (*columns, *more), rows, notes.lines, setting.head.synthetic)


_SAMPLES = Column("samples/s", "mini-batch over the median step time", "stat")


def _micro_batches(setting: Setting) -> Table:
    """3: throughput and bubble over the number of micro-batches, the mini-batch being the same."""

    def excess(c: Cell) -> float | None:
        measured, ideal = c.median(lambda r: r.bubble), c.median(lambda r: r.ideal_bubble)
        return None if measured is None or ideal is None else measured - ideal

    def order(c: Cell) -> tuple[object, ...]:
        r = c.head
        return (r.library, r.stages, r.virtual_stages, r.schedule, r.checkpoint, r.balance, r.micro_batches)

    more: dict[Column, Callable[[Cell, Notes], Entry]] = {
        _SAMPLES: lambda c, n: _figure(c, c.throughput, n),
        Column("bubble", "1 − busy/(devices × span) of the traced step, median over trials", "number"): (
            lambda c, n: _plain(c, c.median(lambda r: r.bubble), n)
        ),
        Column("ideal bubble", "of its schedule with even stages and free boundaries", "number"): (
            lambda c, n: _plain(c, c.median(lambda r: r.ideal_bubble), n)
        ),
        Column("difference", "measured minus ideal", "number"): lambda c, n: _plain(c, excess(c), n),
    }
    cells = sorted(setting.cells, key=order)
    dash = "bubble: a dash where no step was traced, or no formula is known for the schedule."
    return _of_setting(setting, "3-micro-batches", "Micro-batches at a fixed mini-batch", cells, more, dash)


def _balances(setting: Setting) -> Table:
    """4: where each balance cut, how even that is by the profile, and what it gave."""
    cells = [c for c in setting.cells if pipelined(c.head) and c.head.stages > 1]

    def peak(c: Cell) -> float | None:
        return c.fullest.peak_bytes / MIB if c.fullest and c.fullest.peak_bytes is not None else None

    more: dict[Column, Callable[[Cell, Notes], Entry]] = {
        Column("imbalance", "longest model stage's profiled time over the mean", "number"): (
            lambda c, n: _plain(c, c.median(lambda r: r.imbalance), n)
        ),
        Column("predicted step s", "of the simulated schedule, from the profile", "number"): (
            lambda c, n: _plain(c, c.median(lambda r: r.predicted_step_time_s), n)
        ),
        Column("step s", "median step time", "stat"): lambda c, n: _figure(c, c.step_time, n),
        _SAMPLES: lambda c, n: _figure(c, c.throughput, n),
        Column("peak MiB", "allocated peak of the largest stage, highest trial", "number"): (
            lambda c, n: _plain(c, peak(c), n, 4)
        ),
    }
    dash = "imbalance and prediction: a dash where there was no profile."
    return _of_setting(setting, "4-balance", "Balance", cells, more, dash)


_PARTS = {
    "peak_allocated_bytes": ("peak MiB", "allocated peak of a step (CPU: live storages)"),
    PEAKS[0]: ("parameters", "of the peak: parameters and buffers"),
    PEAKS[1]: ("gradients", "of the peak: gradients of parameters"),
    PEAKS[2]: ("optimizer state", "of the peak: the optimizer's"),
    PEAKS[3]: ("mini-batch", "of the peak: the placed mini-batch"),
    PEAKS[4]: ("activations", "of the peak: all else"),
    "peak_reserved_bytes": ("reserved", "peak that the CUDA allocator held"),
    "predicted_peak_bytes": ("predicted", "counted from the profile and the schedule alone"),
}


def _memory(setting: Setting) -> Table:
    """5: the peak of every stage in MiB and what it is made of, of the trial with the highest one."""
    notes = Notes()
    columns, identity = _identity(setting.cells, notes, timed=False)
    _caveats(setting, notes)
    notes.say("MiB, of the trial with the highest peak; bold with an arrow: the largest stage of several.")
    rows = []
    for c in setting.cells:
        run = c.fullest
        if run is None:
            last = _ending(c, notes) if c.status != "ok" else Entry(DASH)
            rows.append(Row((*identity(c), Entry(DASH), *[last] * len(_PARTS)), _ids(c)))
            continue
        for s in run.devices:
            largest = len(run.devices) > 1 and s.peak_allocated_bytes == run.peak_bytes
            sizes = []
            for name in _PARTS:
                value = None if (size := getattr(s, name)) is None else size / MIB
                mark = "▲ " if largest and name == "peak_allocated_bytes" else ""
                sizes.append(Entry(mark + number(value, 4), value, bold=bool(mark)))
            rows.append(Row((*identity(c), Entry(str(s.stage), s.stage), *sizes), (run.run_id,)))
    parts = (Column(title, doc, "number") for title, doc in _PARTS.values())
    return Table(
        f"5-memory-{setting.name.lower()}",
        f"Memory of each stage ({setting.name}: {setting.label})",
        (*columns, Column("stage", "the device, from 0; the replica for data parallelism", "number"), *parts),
        tuple(rows),
        notes.lines,
        setting.head.synthetic,
    )


_LOST = {
    "ideal_s": ("ideal %", "all forwards, backwards, updates, evenly over the devices"),
    "bubble_s": ("bubble %", "what the schedule adds for even stages"),
    "imbalance_s": ("imbalance %", "what the measured stages add to that"),
    "recompute_s": ("recompute %", "what recomputation adds to that"),
    "communication_s": ("communication %", "transfers, waiting and the library's own work between"),
    "unexplained_s": ("unexplained %", "before the first forward and after the last update"),
}


def _lost_time(setting: Setting) -> Table:
    """6: the account of the traced step in per cent of it."""
    cells = [c for c in setting.cells if c.account is not None]
    more: dict[Column, Callable[[Cell, Notes], Entry]] = {
        Column("traced step s", "the traced step, median over trials", "number"): (
            lambda c, n: _plain(c, c.median(lambda r: r.traced_step_time_s), n)
        )
    }
    for key in ACCOUNT:
        title, doc = _LOST[key]
        more[Column(title, doc, "number")] = lambda c, n, key=key: _plain(c, (c.account or {})[key], n)  # type: ignore[misc]
    lines = [
        "per cent of the traced step, all trials' traced steps together; a row adds up to 100.",
        "a dash: the schedule is not simulated, and the part is within communication.",
    ]
    without = sum(c.status == "ok" for c in setting.cells) - len(cells)
    if without:
        lines.append(f"{without} cells without a traced step are left out.")
    return _of_setting(setting, "6-lost-time", "Where the time of a step went", cells, more, *lines)


def _failures(study: Study) -> Table:
    """7: every run that is not ok, and why."""
    notes = Notes()
    rows = []
    for setting in study.settings:
        for cell in setting.cells:
            for r in cell.runs:
                if r.status == "ok":
                    continue
                made_good = r not in cell.counted
                marks = (notes.mark("a later run of the same trial went well."),) if made_good else ()
                word = "unsupported" if r.status == "unsupported" else WORDS[r.status]
                fields = [setting.name, r.library, r.model, str(r.stages), str(r.micro_batches), _balance(r)]
                fields += [r.schedule, r.checkpoint, r.hardware, str(r.trial)]
                fields += ["yes" if r.synthetic else "no"] if study.synthetic else []
                entries = [*map(Entry, fields), Entry(word, marks=marks), Entry(r.fail_phase), Entry(r.fail_reason)]
                rows.append(Row(tuple(entries), (r.run_id,)))
    columns = (
        Column("setting", "see Set-up"),
        Column("library", "the library"),
        Column("model", "the model"),
        Column("p", "stages"),
        Column("m", "micro-batches"),
        Column("balance", "the rule that picked the boundaries, and these"),
        Column("schedule", "the schedule"),
        Column("checkpoint", "which micro-batches recompute"),
        Column("hardware", "fingerprint of the devices"),
        Column("trial", "which repetition"),
        *([Column("synthetic", "made up, not measured")] if study.synthetic else []),
        Column("ended", "how the run ended"),
        Column("phase", "the phase that failed"),
        Column("reason", "the root cause"),
    )
    if not rows:
        notes.say(f"All {len(study.runs)} runs are ok.")
    synthetic = any(r.synthetic and r.status != "ok" for r in study.runs)
    return Table("7-failures", "Failures", columns, tuple(rows), notes.lines, synthetic)


def tables(study: Study) -> list[Table]:
    """All tables but that of published figures, in the order of their names' numbers, then of settings."""
    found = [_libraries(study), *map(_setup, study.settings)]
    for setting in study.settings:
        by_m = sorted(setting.cells, key=lambda c: c.head.micro_batches)
        for m, of_m in groupby(by_m, lambda c: c.head.micro_batches):
            found.append(_throughput(setting, m, list(of_m)))
    for make in (_micro_batches, _balances, _memory, _lost_time):
        found += [t for t in map(make, study.settings) if t.rows]
    return [*found, _failures(study)]
