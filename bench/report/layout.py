"""What a table is made of, and its Markdown and CSV; LaTeX and HTML have modules of their own."""

from __future__ import annotations

import csv
import io
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from bench.report.data import Stat

__all__ = ["DASH", "SYNTHETIC", "Column", "Entry", "Notes", "Row", "Table", "as_csv", "markdown", "number", "shown"]

DASH = "—"
SYNTHETIC = "SYNTHETIC: made up, not measured"


@dataclass(frozen=True)
class Column:
    """``doc`` says what stands in it; a ``stat`` is a number with its interval or range."""

    name: str
    doc: str
    kind: Literal["text", "number", "stat"] = "text"


@dataclass(frozen=True)
class Entry:
    """One field: what is shown, the number behind it (None where it is none), and the marks of its notes."""

    text: str = ""
    value: float | None = None
    stat: Stat | None = None
    bold: bool = False
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """``run_ids``: the runs that it is made of."""

    entries: tuple[Entry, ...]
    run_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """``name`` is its file's; ``notes`` are (mark, text), without a mark where they are of the whole table."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[tuple[str, str], ...] = ()
    synthetic: bool = False


@dataclass
class Notes:
    """Hands out the same mark for the same text."""

    marks: dict[str, str] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)

    def mark(self, text: str) -> str:
        """a, b, …, z, aa, ab, …"""
        if text not in self.marks:
            n, letters = len(self.marks), ""
            while n >= 0:
                n, letters = n // 26 - 1, string.ascii_lowercase[n % 26] + letters
            self.marks[text] = letters
        return self.marks[text]

    def say(self, text: str) -> None:
        """A note of the whole table, once."""
        if text not in self.plain:
            self.plain.append(text)

    @property
    def lines(self) -> tuple[tuple[str, str], ...]:
        return (*(("", text) for text in self.plain), *((mark, text) for text, mark in self.marks.items()))


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, whole from a thousand on; a dash for what is unknown."""
    if value is None:
        return DASH
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def shown(stat: Stat) -> str:
    """An interval in brackets, a range in words."""
    if stat.kind == "none":
        return number(stat.value)
    if stat.kind == "range":
        return f"{number(stat.value)} ({number(stat.low)} to {number(stat.high)})"
    return f"{number(stat.value)} [{number(stat.low)}, {number(stat.high)}]"


# Whatever Markdown or the HTML within it could take for its own.
_SPECIAL = re.compile(r"([\\`*_{}\[\]|~$])")


def md_text(text: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    one_line = " ".join(text.split())
    escaped = _SPECIAL.sub(r"\\\1", one_line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))
    # A bare address would become a link.
    return escaped.replace("://", ":&#47;&#47;").replace("www.", "www&#46;").replace("@", "&#64;")


def _md_entry(entry: Entry) -> str:
    text = md_text(entry.text)
    marks = f"<sup>{','.join(entry.marks)}</sup>" if entry.marks else ""
    return f"**{text}**{marks}" if entry.bold and text else text + marks


def markdown(table: Table) -> str:
    """The table with its caption above and its notes below."""
    lines = [f"**{SYNTHETIC}**\n"] if table.synthetic else []
    lines.append(f"**{md_text(table.caption)}**\n")
    lines.append("| " + " | ".join(md_text(c.name) for c in table.columns) + " |")
    lines.append("|" + "|".join("---" if c.kind == "text" else "---:" for c in table.columns) + "|")
    lines += ["| " + " | ".join(_md_entry(e) for e in row.entries) + " |" for row in table.rows]
    lines.append("")
    lines += [f"- {f'<sup>{mark}</sup> ' if mark else ''}{md_text(text)}" for mark, text in table.notes]
    return "\n".join([*lines, ""])


def as_csv(table: Table) -> str:
    """Numbers unrounded, with low, high and what these are in columns of their own; then the notes of the row."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads: list[str] = ["synthetic"]
    for column in table.columns:
        heads.append(column.name)
        if column.kind == "stat":
            heads += [f"{column.name} {part}" for part in ("low", "high", "kind", "trials")]
    writer.writerow([*heads, "notes"])
    said = dict(table.notes)
    for row in table.rows:
        fields: list[object] = [table.synthetic]
        for column, entry in zip(table.columns, row.entries, strict=True):
            fields.append(entry.text if entry.value is None else entry.value)
            if column.kind == "stat":
                s = entry.stat
                fields += [s.low, s.high, s.kind, s.trials] if s else [""] * 4
        fields.append("; ".join(said[mark] for mark in _marks(row.entries)))
        writer.writerow(fields)
    return out.getvalue()


def _marks(entries: Sequence[Entry]) -> list[str]:
    return list(dict.fromkeys(mark for entry in entries for mark in entry.marks))
