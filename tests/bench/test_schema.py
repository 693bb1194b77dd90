"""The schema: each column once, its check, its printed documentation, and rows that fit it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from bench.collect import run_row, stage_rows, step_rows
from bench.merit import merits
from bench.record import Record
from bench.schema import RUNS, STAGES, STEPS, TABLES, Column, problem

COLUMNS = (
    Column("name", "text", "", "", ("a", "b")),
    Column("count", "int", "", "", nullable=True),
    Column("time_s", "float", "s", "", nullable=True),
    Column("flag", "bool", "", ""),
)
GOOD = {"name": "a", "count": 3, "time_s": 0.5, "flag": False}


@pytest.mark.parametrize("columns", TABLES.values(), ids=TABLES)
def test_each_column_once_with_a_meaning_and_a_unit_where_its_name_has_one(columns: tuple[Column, ...]) -> None:
    names = [c.name for c in columns]
    assert len(names) == len(set(names))
    assert all(c.doc for c in columns)
    assert all(c.unit == "s" for c in columns if c.name.endswith("_s"))
    assert all(c.unit == "bytes" for c in columns if c.name.endswith("_bytes"))


@pytest.mark.parametrize("change", [{}, {"count": None}, {"time_s": 2}, {"time_s": None}])
def test_a_row_that_fits(change: dict[str, object]) -> None:
    assert problem({**GOOD, **change}, COLUMNS) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "c"}, "name: 'c' is not a or b"),
        ({"name": ""}, "name: '' is not a or b"),
        ({"count": True}, "count: True is not int"),
        ({"count": 1.5}, "count: 1.5 is not int"),
        ({"time_s": "fast"}, "time_s: 'fast' is not float"),
        ({"flag": 1}, "flag: 1 is not bool"),
        ({"flag": None}, "flag: None is not bool"),
        ({"colour": "red"}, "colour: there is no such column"),
    ],
)
def test_a_row_that_does_not_fit(change: dict[str, object], said: str) -> None:
    assert problem({**GOOD, **change}, COLUMNS) == said


@pytest.mark.parametrize("status", ["ok", "oom", "timeout", "error", "unsupported", "parity_failed", "interrupted"])
def test_rows_have_exactly_the_columns(status: str, made_record: Callable[..., Record]) -> None:
    record = made_record("run", status=status, fail_phase="" if status == "ok" else "build")
    row = run_row(record, merits([record]).get("run"))
    assert list(row) == [c.name for c in RUNS]
    assert problem(row, RUNS) == ""
    for rows, columns in ((stage_rows(record), STAGES), (step_rows(record), STEPS)):
        assert all(set(r) == {c.name for c in columns} for r in rows)
        assert all(problem(r, columns) == "" for r in rows)


def test_the_command_prints_every_column() -> None:
    printed = subprocess.run([sys.executable, "-m", "bench.schema"], capture_output=True, text=True, check=True).stdout
    for name, columns in TABLES.items():
        section = printed.partition(f"## {name}.csv")[2].partition("\n## ")[0]
        assert [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")][1:] == [
            c.name for c in columns
        ]
