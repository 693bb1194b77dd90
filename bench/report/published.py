"""Published figures beside ours: ``published/*.csv`` of the results folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from bench.errors import UserError
from bench.registry import libraries
from bench.report.data import Cell, Setting, Study
from bench.report.layout import DASH, Column, Entry, Notes, Row, Table, shown

__all__ = ["published"]

_COLUMNS = (
    *("source", "benchmark", "model", "experiment", "stages", "chunks", "batch_size", "balance", "metric", "value"),
    *("unit", "hardware", "checkpoint", "devices", "note"),
)
Line = Mapping[str, str]


def _folder(results_dir: Path) -> Path | None:
    """``published`` in the results folder, or in the folder ``results`` that it lies in."""
    here = results_dir.resolve()
    places = [here, *(p for p in here.parents if p.name == "results")]
    return next((p / "published" for p in places if (p / "published").is_dir()), None)


def _lines(results_dir: Path) -> list[Line]:
    folder = _folder(results_dir)
    lines: list[Line] = []
    for path in sorted(folder.glob("*.csv")) if folder else []:
        try:
            frame = pd.read_csv(path, dtype="str", keep_default_na=False)
        except (OSError, ValueError) as error:
            raise UserError("published", path, f"cannot be read ({error})", "correct or remove it") from None
        missing = [name for name in _COLUMNS if name not in frame.columns]
        if missing:
            raise UserError("published", path, f"has no column {missing[0]}", f"give {', '.join(_COLUMNS)}")
        for row in frame[list(_COLUMNS)].to_dict("records"):
            line = {str(k): str(v).strip() for k, v in row.items()}
            if not line["metric"].startswith("speedup"):
                continue
            if _number(line["value"]) is None:
                raise UserError("published", path, f"value: {line['value']!r} is no number", "correct it")
            lines.append(line)
    return lines


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _model(text: str) -> str:
    """ResNet-101 (370 flat layers) → resnet101."""
    first = re.match(r"[A-Za-z]+-?\d*", text)
    return first.group().replace("-", "").lower() if first else ""


def _library(line: Line) -> str:
    """The registered library that a figure is of, by its name in what was run, or in the source; else empty."""
    for text in (line["experiment"], line["benchmark"], line["source"]):
        for name in sorted(libraries(), key=len, reverse=True):
            if re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", text.lower()):
                return name
    return ""


def _same(line: Line, setting: Setting, cell: Cell) -> bool:
    """Whether the cell is of the configuration, as far as that is published; what is not said must be the rest's."""
    r = cell.head
    numbers = {"stages": r.stages, "chunks": r.micro_batches, "batch_size": r.batch_size}
    # Stages and micro-batches must have been said: without them there is no configuration.
    if not line["stages"] or not line["chunks"] or r.library != _library(line):
        return False
    if any(line[key] and _number(line[key]) != value for key, value in numbers.items()):
        return False
    size = re.search(r"3x(\d+)x\d+|(\d+)x\2\b", f"{line['note']} {line['model']}")
    if size and int(size.group(1) or size.group(2)) != r.image_size:
        return False
    precision = re.search(r"\b(fp64|fp32|tf32|bf16)\b", line["note"])
    if precision and precision.group() != r.precision:
        return False
    mode = line["checkpoint"].partition(" ")[0].replace("none", "never")
    if mode and mode != r.checkpoint:
        return False
    # Its own routine is ours by the rule's name; a list of layers is a partition.
    balance = line["balance"].replace("balance_by_", "native_")
    return not balance or balance in (r.balance, r.partition)


def published(study: Study) -> Table | None:
    """8: every published speed-up of a model of the study, and ours where the same configuration was run.

    None where nothing is published of them.
    """
    models = {r.model for r in study.runs}
    lines = [line for line in _lines(study.folder) if _model(line["model"]) in models]
    if not lines:
        return None
    notes = Notes()
    notes.say("Published on other hardware with other versions, each over a baseline of its own: compare the shape.")
    notes.say(
        "ours: the same library, model, p, m, mini-batch, balance and checkpointing, and the same image size and "
        "precision where they are published; a dash where that was not run."
    )
    rows = []
    synthetic = False
    for line in lines:
        theirs = float(line["value"])
        names = ("benchmark", "model", "experiment", "stages", "chunks", "batch_size", "balance", "checkpoint")
        marks = (notes.mark(f"{line['source']}{'; ' if line['note'] else ''}{line['note']}."),)
        first = [Entry(line[name] or DASH) for name in names]
        first[0] = Entry(first[0].text, marks=marks)
        first += [Entry(line["metric"]), Entry(f"{theirs:g}", theirs), Entry(line["hardware"] or DASH)]
        found = [
            (s, c)
            for s in study.settings
            if s.head.model == _model(line["model"])
            for c in s.cells
            if c.speedup is not None and _same(line, s, c)
        ]
        for setting, cell in found:
            synthetic = synthetic or cell.head.synthetic
            stat = cell.speedup
            assert stat is not None
            ours = (Entry(shown(stat), stat.value, stat), Entry(setting.label))
            rows.append(Row((*first, *ours), tuple(r.run_id for r in cell.runs)))
        if not found:
            rows.append(Row((*first, Entry(DASH), Entry(DASH))))
    columns = (
        Column("benchmark", "the published one"),
        Column("their model", "as published"),
        Column("experiment", "as published"),
        Column("p", "stages", "text"),
        Column("m", "micro-batches", "text"),
        Column("mini-batch", "samples"),
        Column("balance", "as published"),
        Column("checkpoint", "as published"),
        Column("metric", "what the speed-up is over"),
        Column("theirs", "the published speed-up", "number"),
        Column("their hardware", "as published"),
        Column("ours", "our speed-up", "stat"),
        Column("our setting", "what ours was measured on"),
    )
    caption = "Published speed-ups, and ours for the same configuration"
    return Table("8-published", caption, columns, tuple(rows), notes.lines, synthetic)
