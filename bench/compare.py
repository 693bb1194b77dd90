"""Two studies, cell by cell: ``python -m bench.compare OLD NEW [--gate] [--threshold 0.05] [--across KEY,…] [--json]``.

The unit of observation is the trial, a process group of its own, of which the median step counts: steps
of one trial depend on each other and would feign a certainty that is not there.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bench.errors import UserError
from bench.jobs import to_json
from bench.merit import merits
from bench.record import Record, load_all, records_dir
from bench.registry import capabilities, libraries
from bench.table import console, telling_columns

__all__ = ["ALPHA", "Comparison", "compare", "compare_times", "gate", "holm"]

ALPHA = 0.05
POWER = 0.8
THRESHOLD = 0.05
# What must be equal for a ratio to speak of the step and not of something else.
METADATA = ("hardware", "python", "torch_version", "library_version")
# The rank test needs so many more observations than a t test where the spread is normal: 3/π of its
# efficiency (Hodges and Lehmann 1956).
RANK_EFFICIENCY = 3 / math.pi

Verdict = Literal["faster", "slower", "not significant", "not comparable"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One cell in both studies.

    ``ratio``: new over old step time, of the trials' geometric means, with its 95 % interval (Welch's t
    on logarithms) ``low`` to ``high``; ``p``: of Mann and Whitney's rank test, two-sided;
    ``detectable``: the smallest change of step time (0.03: three per cent) that these many trials of this
    spread show in four of five studies.  None where there is none.  ``reason``: why it is not comparable, or
    why it could not have been significant.
    """

    cell: str
    old_trials: int
    new_trials: int
    verdict: Verdict
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    detectable: float | None = None
    reason: str = ""


def compare_times(cell: str, old: Sequence[float], new: Sequence[float]) -> Comparison:
    """Compare trials' median step times in seconds, at least one of each study."""
    from scipy import stats

    a, b = np.log(np.asarray(old, dtype=float)), np.log(np.asarray(new, dtype=float))
    shift = float(b.mean() - a.mean())
    made = Comparison(cell=cell, old_trials=len(a), new_trials=len(b), verdict="not significant", ratio=math.exp(shift))
    least = 2 / math.comb(len(a) + len(b), len(a))
    if min(len(a), len(b)) < 2:
        return _with(made, reason="a trial alone has no spread: nothing can be significant")
    variances = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    error = math.sqrt(sum(variances))
    degrees = 1.0
    if error > 0:
        parts = variances[0] ** 2 / (len(a) - 1) + variances[1] ** 2 / (len(b) - 1)
        degrees = float(sum(variances) ** 2 / parts)
    t = float(stats.t.ppf(1 - ALPHA / 2, degrees))
    needed = (t + float(stats.t.ppf(POWER, degrees))) * error / math.sqrt(RANK_EFFICIENCY)
    # Where values are equal scipy falls back to a normal approximation, which for few trials knows no bound.
    p = max(least, float(stats.mannwhitneyu(a, b, alternative="two-sided").pvalue))
    made = _with(
        made,
        low=math.exp(shift - t * error),
        high=math.exp(shift + t * error),
        p=p,
        detectable=math.expm1(needed),
    )
    if least > ALPHA:
        return _with(made, reason=f"{len(a)} and {len(b)} trials are too few: no p below {least:.2g} can come out")
    if p < ALPHA:
        return _with(made, verdict="slower" if shift > 0 else "faster")
    return made


def _with(made: Comparison, **changes: object) -> Comparison:
    return Comparison(**{**vars(made), **changes})  # type: ignore[arg-type]


def holm(p_values: Sequence[float], alpha: float = ALPHA) -> list[bool]:
    """Which hypotheses Holm's step-down procedure (1979) rejects, at most ``alpha`` of a false one among all."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    rejected = [False] * len(p_values)
    for rank, i in enumerate(order):
        if p_values[i] > alpha / (len(p_values) - rank):
            break
        rejected[i] = True
    return rejected


def gate(found: Sequence[Comparison], threshold: float = THRESHOLD) -> list[Comparison]:
    """The cells that are slower by more than ``threshold`` and significant after Holm's correction over all cells."""
    tested = [c for c in found if c.p is not None]
    sure = holm([c.p for c in tested if c.p is not None])
    limit = 1 + threshold
    return [c for c, is_sure in zip(tested, sure, strict=True) if is_sure and c.ratio is not None and c.ratio > limit]


def compare(old: Sequence[Record], new: Sequence[Record], across: Sequence[str] = ()) -> list[Comparison]:
    """Every cell of either study, in the order of the new one's; ``across`` names metadata that may differ."""
    theirs, ours = _cells(old), _cells(new)
    columns = telling_columns([r for r in [*old, *new] if r.kind == "cell"], leave_out=("trial", "hardware"))
    found = []
    for key in dict.fromkeys([*ours, *theirs]):
        a, b = theirs.get(key, []), ours.get(key, [])
        texts = {name: text((b or a)[0][0]) for name, text in columns.items()}
        library = texts.pop("library")
        name = " ".join([library, *(f"{name}={text}" for name, text in texts.items() if text)])
        found.append(_compare_cell(name, a, b, across))
    return found


Trial = tuple[Record, float | None]


def _cells(records: Sequence[Record]) -> dict[str, list[Trial]]:
    """Runs and their median step in seconds by what was run, versions left out; of a trial's runs the last ok one."""
    derived = merits(records)
    latest: dict[tuple[str, int], Trial] = {}
    for r in sorted((r for r in records if r.kind == "cell"), key=lambda r: (r.started_at, r.run_id)):
        merit = derived.get(r.run_id)
        key = (json.dumps(to_json(r.factors), sort_keys=True), r.trial)
        if merit is not None or key not in latest:
            latest[key] = r, merit.steps.median if merit else None
    cells: dict[str, list[Trial]] = defaultdict(list)
    for (factors, _), trial in latest.items():
        cells[factors].append(trial)
    return cells


def _compare_cell(name: str, old: list[Trial], new: list[Trial], across: Sequence[str]) -> Comparison:
    a = [seconds for _, seconds in old if seconds is not None]
    b = [seconds for _, seconds in new if seconds is not None]
    counts = {"cell": name, "old_trials": len(a), "new_trials": len(b)}
    if not a or not b:
        where = " and ".join(word for word, times in (("OLD", a), ("NEW", b)) if not times)
        ended = dict.fromkeys(r.status for r, seconds in [*old, *new] if seconds is None)
        reason = f"no ok run in {where}" + (f" ({', '.join(ended)})" if ended else "")
        return Comparison(**counts, verdict="not comparable", reason=reason)  # type: ignore[arg-type]
    known = (
        [_metadata(r) for r, seconds in old if seconds is not None],
        [_metadata(r) for r, seconds in new if seconds is not None],
    )
    for what in METADATA:
        seen = [sorted({m[what] for m in side}) for side in known]
        if what not in across and (seen[0] != seen[1] or len(seen[0]) > 1):
            reason = f"{what} differs: {', '.join(seen[0])} and {', '.join(seen[1])}"
            return Comparison(**counts, verdict="not comparable", reason=reason)  # type: ignore[arg-type]
    return compare_times(name, a, b)


def _metadata(r: Record) -> dict[str, str]:
    versions = r.environment.get("versions", {})
    known = libraries().get(r.factors.library.name)
    distribution = (capabilities(known).distribution if known else None) or "torch"
    return {
        "hardware": r.hardware,
        "python": str(versions.get("python", "")),
        "torch_version": str(versions.get("torch", "")),
        "library_version": str(versions.get(distribution, "")),
    }


def _load(folder: Path, key: str) -> list[Record]:
    if not records_dir(folder).is_dir():
        raise UserError(key, folder, "holds no records", "give a results folder")
    records, errors = load_all(folder)
    for error in errors:
        print(error, file=sys.stderr)
    if not records:
        raise UserError(key, folder, "holds no records", "give a results folder")
    return records


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description="Two studies, cell by cell.")
    parser.add_argument("old", type=Path, help="results folder of the old study")
    parser.add_argument("new", type=Path, help="results folder of the new study")
    parser.add_argument("--gate", action="store_true", help="exit 1 where a cell is past the threshold and significant")
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="0.05: five per cent slower")
    parser.add_argument("--across", default="", help=f"metadata that may differ, of {', '.join(METADATA)}")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Print the comparison; exit code 1 only from the gate, 2 for a user's mistake."""
    asked = _arguments(arguments)
    try:
        if asked.threshold < 0 or not math.isfinite(asked.threshold):
            raise UserError("--threshold", asked.threshold, "must not be negative", "give a share, as 0.05")
        across = [key for key in asked.across.split(",") if key]
        for key in across:
            if key not in METADATA:
                raise UserError("--across", key, f"allowed are {', '.join(METADATA)}", "choose among them")
        found = compare(_load(asked.old, "OLD"), _load(asked.new, "NEW"), across)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    failed = gate(found, asked.threshold) if asked.gate else []
    if asked.json:
        for c in found:
            print(json.dumps(asdict(c)))
    else:
        _print(found)
    for c in failed:
        print(f"GATE: {c.cell} is {c.ratio:.3f} times as slow (p={c.p:.2g})", file=sys.stderr)
    if asked.gate and (blind := _blind(found)):
        print(blind, file=sys.stderr)
    return 1 if failed else 0


def _blind(found: Sequence[Comparison]) -> str:
    """A gate that cannot close is none, and must say so; empty for one that can."""
    tested = [c for c in found if c.p is not None]
    able = [c for c in tested if 2 / math.comb(c.old_trials + c.new_trials, c.old_trials) <= ALPHA / len(tested)]
    if able:
        return ""
    return f"GATE: it cannot fail: none of {len(found)} cells has enough trials for Holm's correction to let it count"


def _print(found: Sequence[Comparison]) -> None:
    from rich.table import Table

    table = Table(title="step time, new over old; trials are the observations", title_justify="left")
    for name in ("cell", "trials", "ratio", "95 % interval", "p", "detectable", "verdict"):
        table.add_column(name, overflow="fold", justify="left" if name in ("cell", "verdict") else "right")
    styles = {"faster": "green", "slower": "red", "not comparable": "yellow"}
    for c in found:
        table.add_row(
            c.cell,
            f"{c.old_trials}, {c.new_trials}",
            "" if c.ratio is None else f"{c.ratio:.3f}",
            "" if c.low is None or c.high is None else f"{c.low:.3f} to {c.high:.3f}",
            "" if c.p is None else f"{c.p:.2g}",
            "" if c.detectable is None else f"{c.detectable:.1%}",
            c.verdict + (f": {c.reason}" if c.reason else ""),
            style=styles.get(c.verdict),
        )
    out = console()
    out.print(table)
    counts = {v: sum(c.verdict == v for c in found) for v in ("slower", "faster", "not significant", "not comparable")}
    out.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()), highlight=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
