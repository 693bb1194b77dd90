"""Every table compiles, whatever stands in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import unicodedata
from pathlib import Path

import pytest

from bench.report.latex import escape, latex
from bench.report.layout import Column, Entry, Row, Table

# Where CI is set these run and fail without it.
pdflatex = pytest.mark.skipif(
    shutil.which("pdflatex") is None and not os.environ.get("CI"),
    reason="pdflatex is not installed (scripts/install_report_tools.sh)",
)


def _compile(texts: list[str], folder: Path) -> str:
    """pdflatex's log; the test fails where it does."""
    body = "\n\\clearpage\n".join(texts)
    document = f"\\documentclass{{article}}\n\\usepackage{{booktabs,graphicx}}\n\\begin{{document}}\n{body}\n"
    (folder / "all.tex").write_text(document + "\\end{document}\n", encoding="utf-8")
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "all.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=100)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pdflatex
@pytest.mark.parametrize("name", ["made", "odd"])
def test_every_table_of_a_report_compiles(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder: Path = request.getfixturevalue(name)
    texts = [path.read_text(encoding="utf-8") for path in sorted((folder / "tables").glob("*.tex"))]
    assert len(texts) > 5
    log = _compile(texts, tmp_path)
    assert "Overfull" not in log


def _table(rows: list[str]) -> Table:
    entries = tuple(Row((Entry(text, bold=i % 2 == 0, marks=("a",)), Entry(text))) for i, text in enumerate(rows))
    columns = (Column("x_1 & 2", ""), Column("y %", "", "number"))
    return Table("0-odd", "caption # {", columns, entries, (("a", "$ ~ ^"), ("", "\\")), True)


@pdflatex
def test_any_text_compiles(tmp_path: Path) -> None:
    ascii_texts = [chr(c) * 3 + "x" + chr(c) for c in range(32, 127)]
    others = [chr(c) for c in range(0x80, 0x3000, 7) if unicodedata.category(chr(c)) not in ("Cs", "Co", "Cn")]
    texts = [
        *ascii_texts,
        *("".join(others[i : i + 12]) for i in range(0, len(others), 12)),
        "[1] at a row's start",
        "",
    ]
    _compile([latex(_table(texts))], tmp_path)


def test_a_long_table_is_cut_into_floats() -> None:
    text = latex(_table(["x"] * 100))
    assert text.count(r"\begin{table}") == 3
    assert text.count(r"\bottomrule") == 3
    assert text.count("(2 of 3)") == 1
    assert text.count(r"\scriptsize") == 1


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a_b & 50%", r"a\_b \& 50\%"),
        ("--x ''y''", "-{}-x '{}'y'{}'"),
        ("é ñ ł", r"\'{e} \~{n} \l{}"),
        ("日", r"\texttt{U+65E5}"),
        ("a\n\\b", r"a \textbackslash{}b"),
        ("8-7 × —", r"8-7 \ensuremath{\times} ---"),
    ],
)
def test_escapes(text: str, escaped: str) -> None:
    assert escape(text) == escaped
