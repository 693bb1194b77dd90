"""CSVs against the schema: what is wrong is named by file, row, column and value; old versions still read."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.check_csv import check_files, main
from bench.collect import collect
from bench.record import Record, write
from bench.schema import KEYS, TABLES

Make = Callable[..., Record]
FIXTURES = sorted((Path(__file__).resolve().parents[1] / "fixtures").glob("schema_*"))


@pytest.fixture
def collected(made_record: Make, tmp_path: Path) -> Path:
    hostile = 'a "quoted", \n<script> # 100 % ünï'
    write(made_record("ok"), tmp_path)
    write(made_record("bad", status="error", fail_phase="measure", fail_reason=hostile), tmp_path)
    collect(tmp_path)
    return tmp_path


def edit(folder: Path, table: str, change: Callable[[list[list[str]]], None]) -> list[str]:
    path = folder / f"{table}.csv"
    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    change(rows)
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    return list(check_files([folder / f"{name}.csv" for name in TABLES]))


def test_what_collect_writes_is_well(collected: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(collected)]) == 0
    assert main([str(collected / "runs.csv"), str(collected / "steps.csv")]) == 0
    assert capsys.readouterr().out == "ok\nok\n"


def put(column: str, value: str, row: int = 1) -> Callable[[list[list[str]]], None]:
    def change(rows: list[list[str]]) -> None:
        rows[row][rows[0].index(column)] = value

    return change


@pytest.mark.parametrize(
    ("table", "column", "value", "said"),
    [
        ("runs", "micro_batches", "4.0", "micro_batches='4.0' is not int, never empty"),
        ("runs", "micro_batches", "", "micro_batches='' is not int, never empty"),
        ("runs", "status", "fine", "status='fine' is not ok or oom"),
        ("runs", "overlap", "yes", "overlap='yes' is not bool"),
        ("runs", "step_time_s", "fast", "step_time_s='fast' is not float"),
        ("runs", "schema_version", "99", "schema_version=99: this program knows up to"),
        ("stages", "run_id", "nobody", "run_id=nobody: is no run of runs.csv"),
        ("steps", "rank", "-x", "rank='-x' is not int"),
    ],
)
def test_a_wrong_value_is_named(collected: Path, table: str, column: str, value: str, said: str) -> None:
    problems = edit(collected, table, put(column, value))
    assert any(str(collected / f"{table}.csv") in p and said in p for p in problems), problems


def test_rows_that_stand_there_twice(collected: Path) -> None:
    for table in TABLES:
        problems = edit(collected, table, lambda rows: rows.append(rows[1]))
        key = KEYS[table][0]
        assert any(f"{table}.csv: {key}=" in p and "stands there 2 times" in p for p in problems), problems


def test_columns_that_are_unknown_or_missing(collected: Path) -> None:
    problems = edit(collected, "runs", lambda rows: [row.append("?") for row in rows] and None)
    assert any("column ?: there is no such column" in p for p in problems)

    def drop(rows: list[list[str]]) -> None:
        place = rows[0].index("cell_id")
        for row in rows:
            del row[place]

    assert any("column cell_id: is missing" in p for p in edit(collected, "runs", drop))


def test_half_a_row_and_an_empty_file(collected: Path) -> None:
    problems = edit(collected, "steps", lambda rows: rows[2].pop())
    assert any("row 2: 6 cells for 7 columns" in p for p in problems)
    (collected / "steps.csv").write_text("")
    assert any("is empty, even of a header" in p for p in check_files([collected / "steps.csv"]))
    text = (collected / "runs.csv").read_bytes()
    (collected / "runs.csv").write_bytes(text[: text.index(b'"a ""quoted') + 5])
    assert any("cannot be read" in p or "cells for" in p for p in check_files([collected / "runs.csv"]))


def test_many_mistakes_of_a_kind_do_not_flood(collected: Path) -> None:
    problems = edit(collected, "steps", lambda rows: rows.extend([["x"] * len(rows[0])] * 100))
    assert len(problems) < 30
    assert any("more" in p for p in problems)


@pytest.mark.parametrize(
    ("arguments", "said"), [(["nowhere.csv"], "its name is none of"), (["nowhere/runs.csv"], "is not there"), ([], "")]
)
def test_a_mistake_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("folder", FIXTURES, ids=lambda path: path.name)
def test_files_of_every_version_so_far_still_read(folder: Path) -> None:
    """Made-up records, collected by the program of that version; never changed, only added to with a new version."""
    assert list(check_files([folder / f"{name}.csv" for name in TABLES])) == []
    with open(folder / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["status"] for row in rows} >= {"ok", "oom", "unsupported", "parity_failed"}
    assert all(row["synthetic"] == "True" for row in rows)
    assert all(f"schema_{row['schema_version']}" == folder.name for row in rows)


def test_there_is_a_fixture_of_this_version() -> None:
    from bench.record import SCHEMA_VERSION

    assert FIXTURES[-1].name == f"schema_{SCHEMA_VERSION}"
