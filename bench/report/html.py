"""report.html: one file that needs nothing beside it but the records that it links to."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bench.account import BUSY
from bench.jobs import SpanResult
from bench.report.data import Cell, Run, Study
from bench.report.figures import Figure
from bench.report.layout import SYNTHETIC, Row, Table
from bench.report.tables import cell_label
from bench.traces import read_spans, traces_dir

__all__ = ["html", "record_link", "timelines"]

# A page with more traces would be slow to open; one trial a cell is drawn.
TIMELINES = 400
LONG = 40  # characters of a text that is broken into lines
KINDS = (*BUSY, "update")


def record_link(run_id: str) -> str:
    """The record of a run, from the results folder."""
    return f"records/{quote(run_id, safe='')}.json"


def _chosen(spans: Sequence[SpanResult], r: Run) -> list[SpanResult]:
    """The step that the run's account is of: the one whose work takes as long, else that of median length."""
    lengths: dict[int, float] = {}
    steps: dict[int, list[SpanResult]] = {}
    for s in spans:
        steps.setdefault(s.step, []).append(s)
    for step, of in steps.items():
        begin = min((s.start_s for s in of if s.kind in BUSY), default=0.0)
        lengths[step] = max(s.end_s for s in of) - begin
    order = sorted(lengths, key=lambda step: (lengths[step], step))
    if not order:
        return []
    chosen = order[len(order) // 2]
    if r.traced_step_time_s is not None and r.unexplained_s is not None:
        worked = r.traced_step_time_s - r.unexplained_s
        chosen = min(order, key=lambda step: (abs(lengths[step] - worked), step))
    return steps[chosen]


def timelines(study: Study) -> tuple[list[dict[str, str]], str, list[str]]:
    """(each run's label, record and spans as JSON; what is left out, in a sentence; files that hold no spans)."""
    found: list[dict[str, str]] = []
    bad: list[str] = []
    left = 0
    for setting in study.settings:
        for cell in setting.cells:
            for r in sorted(cell.ok, key=lambda r: (r.traced_step_time_s is None, r.trial)):
                path = traces_dir(study.folder) / f"{r.run_id}.csv"
                # An id is data: it must not lead out of the folder.
                if Path(r.run_id).name != r.run_id or "\0" in r.run_id or not path.is_file():
                    continue
                if len(found) >= TIMELINES:
                    left += 1
                    break
                try:
                    spans = _chosen(read_spans(path), r)
                except (OSError, ValueError) as error:
                    bad.append(f"{path}: no spans ({' '.join(str(error).split())})")
                    continue
                if not spans:
                    continue
                rows = [
                    [s.stage, s.kind, s.micro_batch, round(s.start_s * 1e6), round((s.end_s - s.start_s) * 1e6)]
                    for s in spans
                    if s.kind in KINDS
                ]
                made_up = "SYNTHETIC " if r.synthetic else ""
                label = f"{made_up}{r.model} {cell_label(cell, setting.cells)} trial {r.trial} ({setting.name})"
                found.append(
                    {
                        "id": f"spans-{len(found)}",
                        "label": label,
                        "record": record_link(r.run_id),
                        "spans": json.dumps(rows, separators=(",", ":")),
                    }
                )
                break
    said = f"{left} further cells have a trace; python -m bench.timeline RUN draws it." if left else ""
    return found, said, bad


def _links(runs: Iterable[tuple[str, str]]) -> str:
    from markupsafe import Markup

    link = Markup('<a href="{}">{}</a>')
    return Markup(" ").join(link.format(record_link(run_id), text) for run_id, text in runs)


def _row(table: Table, row: Row, trials: dict[str, int]) -> str:
    """The row's fields; built here, since a template's loop over a large study is slow."""
    from markupsafe import escape

    fields = []
    for column, entry in zip(table.columns, row.entries, strict=True):
        value = "" if entry.value is None else f' data-v="{entry.value!r}"'
        kind = "n" if column.kind != "text" else "w" if len(entry.text) > LONG else ""
        classes = " ".join(filter(None, [kind, "best" if entry.bold else ""]))
        raised = f"<sup>{','.join(entry.marks)}</sup>" if entry.marks else ""
        attribute = f' class="{classes}"' if classes else ""
        fields.append(f"<td{attribute}{value}>{escape(entry.text)}{raised}</td>")
    if row.run_ids:
        fields.append(f"<td>{_links((i, f't{trials[i]}') for i in row.run_ids)}</td>")
    elif any(r.run_ids for r in table.rows[:1]):
        fields.append("<td></td>")
    return "".join(fields)


def _table(table: Table, trials: dict[str, int]) -> dict[str, Any]:
    from markupsafe import Markup

    linked = any(row.run_ids for row in table.rows)
    rows = []
    for row in table.rows:
        text = _row(table, row, trials)
        rows.append(Markup(text))
    return {
        "id": f"table-{table.name}",
        "caption": table.caption,
        "columns": table.columns,
        "rows": rows,
        "linked": linked,
        "notes": table.notes,
        "synthetic": SYNTHETIC if table.synthetic else "",
    }


def _figure(figure: Figure, svg: bytes) -> dict[str, Any]:
    cells: Sequence[Cell] = figure.cells
    # The size keeps the page from jumping when the picture comes.
    size = re.search(rb'width="([\d.]+)pt" height="([\d.]+)pt"', svg)
    width, height = (round(float(x)) for x in size.groups()) if size else (238, 180)
    runs = [(r.run_id, f"{cell_label(c, cells)} t{r.trial}") for c in cells for r in c.runs]
    return {
        "caption": figure.caption,
        "source": f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}",
        "width": width,
        "height": height,
        "links": _links(runs),
        "synthetic": SYNTHETIC if figure.synthetic else "",
    }


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def html(
    study: Study, tables: Sequence[Table], drawn: Sequence[tuple[Figure, bytes]], summary: str
) -> tuple[str, list[str]]:
    """The page, and a line for each trace that could not be read; ``drawn`` are figures with their SVG."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("bench.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    folder = Path(__file__).parent
    style, script = ((folder / name).read_text() for name in ("style.css", "report.js"))
    trials = {r.run_id: r.trial for r in study.runs}
    shown, left, bad = timelines(study)
    for t in shown:
        # Kinds are from a list, the rest are numbers; the page's parser must see no tag all the same.
        t["spans"] = Markup(t["spans"].replace("<", "\\u003c"))
    page = environment.get_template("report.html.j2").render(
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        synthetic=SYNTHETIC if study.synthetic else "",
        summary=summary,
        tables=[_table(t, trials) for t in tables],
        figures=[_figure(f, svg) for f, svg in drawn],
        timelines=shown,
        timelines_left=left,
        kinds=KINDS,
    )
    return page, bad
