"""The spans of a run's traced steps, a CSV beside its record."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bench.atomic import replacing
from bench.jobs import SpanResult

__all__ = ["read_spans", "traces_dir", "write_spans"]

_FIELDS = tuple(f.name for f in dataclasses.fields(SpanResult))
_TYPES = {"int": int, "float": float, "str": str}


def traces_dir(results_dir: Path) -> Path:
    """Where a results folder keeps its runs' spans."""
    return results_dir / "traces"


def write_spans(spans: Sequence[SpanResult], path: Path) -> None:
    """Write atomically, in the order of time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, open(temporary, "w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(_FIELDS)
        for span in sorted(spans, key=lambda s: (s.step, s.start_s, s.stage)):
            row = dataclasses.asdict(span) | {"start_s": f"{span.start_s:.6f}", "end_s": f"{span.end_s:.6f}"}
            writer.writerow(row.values())


def read_spans(path: Path) -> tuple[SpanResult, ...]:
    """Read the spans back; raises ValueError where the file holds none."""
    types = {f.name: _TYPES[str(f.type)] for f in dataclasses.fields(SpanResult)}
    try:
        with open(path, newline="") as lines:
            return tuple(
                SpanResult(**{key: types[key](value) for key, value in row.items()}) for row in csv.DictReader(lines)
            )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: no spans ({type(error).__name__}: {error})") from error
