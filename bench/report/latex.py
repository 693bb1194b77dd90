"""A table as LaTeX that compiles with pdflatex, ``booktabs`` and ``graphicx``, whatever stands in it."""

from __future__ import annotations

import re
import unicodedata

from bench.report.layout import SYNTHETIC, Entry, Row, Table

__all__ = ["escape", "latex"]

# A float that is longer than a page would be cut; further rows stand in further floats.
ROWS = 36
# Wider than this many characters, and it is scaled to the text's width.
WIDE = 84
# The longest text of a field before it is broken into lines.
LONG = 44

_KNOWN = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\symbol{34}",
    "`": r"\textasciigrave{}",
    # What the end of a row would take for its argument.
    "[": "{[}",
    "*": "{*}",
    "—": "---",
    "–": "--",
    "…": r"\ldots{}",
    "×": r"\ensuremath{\times}",
    "·": r"\ensuremath{\cdot}",
    "−": r"\ensuremath{-}",
    "±": r"\ensuremath{\pm}",
    "≥": r"\ensuremath{\geq}",
    "≤": r"\ensuremath{\leq}",
    "→": r"\ensuremath{\rightarrow}",
    "µ": r"\ensuremath{\mu}",
    "√": r"\ensuremath{\surd}",
    "‘": "`",
    "’": "'",
    "“": "``",
    "”": "''",
    "ß": r"\ss{}",
    "æ": r"\ae{}",
    "Æ": r"\AE{}",
    "ø": r"\o{}",
    "Ø": r"\O{}",
    "ł": r"\l{}",
    "Ł": r"\L{}",
    "ı": r"\i{}",
}
# Combining characters as accents over the letter before.
_ACCENTS = {
    **{"\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0308": '"', "\u0304": "=", "\u0307": "."},
    **{"\u0306": "u", "\u030c": "v", "\u030b": "H", "\u0327": "c", "\u0328": "k", "\u030a": "r", "\u0323": "d"},
}


def escape(text: str) -> str:
    """The text in one line; a character that no plain LaTeX font has as U+ and its code point."""
    one_line = " ".join(text.split())
    # Two of these in a row would be drawn as another character.
    apart = re.sub(r"([-,'])(?=\1)", "\\1\0", one_line.replace("\0", ""))
    return "".join("{}" if c == "\0" else _character(c) for c in apart)


def _character(c: str) -> str:
    if c in _KNOWN:
        return _KNOWN[c]
    if " " <= c <= "~":
        return c
    parts = unicodedata.normalize("NFD", c)
    # k, the ogonek, is not in the fonts' first encoding.
    if len(parts) == 2 and parts[0].isascii() and parts[0].isalpha() and _ACCENTS.get(parts[1], "k") != "k":
        return f"\\{_ACCENTS[parts[1]]}{{{parts[0]}}}"
    return rf"\texttt{{U+{ord(c):04X}}}"


def _field(entry: Entry) -> str:
    text = escape(entry.text)
    if entry.bold and text:
        text = rf"\textbf{{{text}}}"
    return text + (rf"\textsuperscript{{{','.join(entry.marks)}}}" if entry.marks else "")


def _widths(table: Table) -> list[int]:
    return [max([len(c.name), *(len(row.entries[i].text) for row in table.rows)]) for i, c in enumerate(table.columns)]


def latex(table: Table) -> str:
    """One float, or as many as its rows need; the notes stand under the last."""
    chunks = [table.rows[i : i + ROWS] for i in range(0, len(table.rows), ROWS)] or [()]
    # Floats wait in a queue that is not long.
    floats = "\\clearpage\n".join(_float(table, rows, i, len(chunks)) for i, rows in enumerate(chunks))
    return f"% \\usepackage{{booktabs,graphicx}}\n{floats}"


def _float(table: Table, rows: tuple[Row, ...], index: int, count: int) -> str:
    widths = _widths(table)
    columns = "".join(
        "r" if c.kind != "text" else "l" if width <= LONG else rf"p{{{LONG * 0.45:.0f}em}}"
        for c, width in zip(table.columns, widths, strict=True)
    )
    made_up = rf"\textbf{{{escape(SYNTHETIC)}.}} " if table.synthetic else ""
    part = f" ({index + 1} of {count})" if count > 1 else ""
    label = re.sub(r"[^a-z0-9-]", "-", table.name) + (f"-{index + 1}" if count > 1 else "")
    wide = sum(min(width, LONG) + 2 for width in widths) > WIDE
    body = "\n".join(
        [
            rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}",
            r"\toprule",
            " & ".join(escape(c.name) for c in table.columns) + r" \\",
            r"\midrule",
            *(" & ".join(map(_field, row.entries)) + r" \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )
    notes = [_note(mark, text) for mark, text in table.notes] if index == count - 1 else []
    return "\n".join(
        [
            r"\begin{table}[htbp]",
            r"\centering\footnotesize",
            rf"\caption{{{made_up}{escape(table.caption + part)}}}",
            rf"\label{{tab:{label}}}",
            rf"\resizebox{{\textwidth}}{{!}}{{%{chr(10)}{body}}}" if wide else body,
            *([r"\par\smallskip\raggedright\scriptsize", *notes] if notes else []),
            r"\end{table}",
            "",
        ]
    )


def _note(mark: str, text: str) -> str:
    raised = rf"\textsuperscript{{{mark}}} " if mark else ""
    return rf"{raised}{escape(text)}\par"
