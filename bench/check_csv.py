"""CSVs against the schema: ``python -m bench.check_csv RESULTS_DIR_OR_FILE …``.

One line for each problem: file, row, column, value, what is allowed.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.errors import UserError
from bench.record import SCHEMA_VERSION
from bench.schema import KEYS, TABLES, Column

__all__ = ["check_files", "check_rows"]

Row = dict[str, str]
# Lines of one file and kind of mistake, after which the rest is only counted.
MOST = 20


def _parses(column: Column, text: str) -> bool:
    """Whether the text of a cell is a value of the column."""
    if text == "":
        return column.nullable
    try:
        if column.kind == "int":
            return str(int(text)) == text
        if column.kind == "float":
            float(text)
    except ValueError:
        return False
    if column.kind == "bool":
        return text in ("True", "False")
    return not column.allowed or text in column.allowed


def check_rows(table: str, header: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    """What is wrong with one table: row (from 1, the header being none), column, value, what is allowed."""
    columns = {c.name: c for c in TABLES[table]}
    for name in header:
        if name not in columns:
            yield f"column {name}: there is no such column"
    if len(set(header)) < len(header):
        yield "a column stands there twice"
    # A column that an older version did not have may be missing where it may be empty.
    missing = [c for c in columns.values() if c.name not in header and not c.nullable]
    for column in missing:
        yield f"column {column.name}: is missing"
    for number, row in enumerate(rows, 1):
        for name, text in row.items():
            if name in columns and not _parses(columns[name], text):
                column = columns[name]
                allowed = " or ".join(column.allowed) or f"{column.kind}{'' if column.nullable else ', never empty'}"
                yield f"row {number}: {name}={text!r} is not {allowed}"
        if "schema_version" in row and row["schema_version"].isdigit() and int(row["schema_version"]) > SCHEMA_VERSION:
            yield f"row {number}: schema_version={row['schema_version']}: this program knows up to {SCHEMA_VERSION}"
    if all(key in header for key in KEYS[table]):
        seen = Counter(tuple(row[key] for key in KEYS[table]) for row in rows)
        for values, count in seen.items():
            if count > 1:
                key = " ".join(f"{k}={v}" for k, v in zip(KEYS[table], values, strict=True))
                yield f"{key}: stands there {count} times"


def _read(path: Path) -> tuple[list[str], list[Row], list[str]]:
    """(header, rows, problems) with every cell as text, so that no reader's idea of a type comes between."""
    problems = []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader)
        except StopIteration:
            return [], [], ["is empty, even of a header"]
        rows = []
        try:
            for number, cells in enumerate(reader, 1):
                if len(cells) != len(header):
                    problems.append(f"row {number}: {len(cells)} cells for {len(header)} columns")
                else:
                    rows.append(dict(zip(header, cells, strict=True)))
        except (csv.Error, UnicodeDecodeError) as error:
            problems.append(f"line {reader.line_num}: cannot be read ({error})")
    return header, rows, problems


def check_files(paths: Sequence[Path]) -> Iterator[str]:
    """The problems of CSVs of one results folder; their names say which table each is."""
    runs: set[str] | None = None
    for path in sorted(paths, key=lambda p: list(TABLES).index(p.stem)):
        header, rows, problems = _read(path)
        problems += check_rows(path.stem, header, rows) if header else []
        if path.stem == "runs" and "run_id" in header:
            runs = {row["run_id"] for row in rows}
        elif runs is not None and "run_id" in header:
            unknown = dict.fromkeys(row["run_id"] for row in rows if row["run_id"] not in runs)
            problems += [f"run_id={run}: is no run of runs.csv" for run in unknown]
        yield from (f"{path}: {problem}" for problem in problems[:MOST])
        if len(problems) > MOST:
            yield f"{path}: and {len(problems) - MOST} more"


def _files(argument: str) -> list[Path]:
    path = Path(argument)
    if path.is_dir():
        found = [path / f"{name}.csv" for name in TABLES]
        if not any(f.is_file() for f in found):
            raise UserError("results_dir", path, "holds no runs.csv", "run python -m bench.collect first")
        return found
    if path.stem not in TABLES:
        raise UserError("file", path, f"its name is none of {', '.join(TABLES)}", "name the table")
    return [path]


def main(arguments: Sequence[str]) -> int:
    """Exit code 0 where all is well, 1 for a problem, 2 for a user's mistake."""
    if not arguments or any(a.startswith("-") for a in arguments):
        print((__doc__ or "").strip())
        return 0 if any(a in ("-h", "--help") for a in arguments) else 2
    lines: list[str] = []
    try:
        for argument in arguments:
            paths = _files(argument)
            for path in paths:
                if not path.is_file():
                    raise UserError("file", path, "is not there", "run python -m bench.collect first")
            lines += check_files(paths)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(UserError("file", error.filename, f"cannot be read ({error.strerror})", "look there"), file=sys.stderr)
        return 2
    for line in lines:
        print(line)
    if not lines:
        print("ok")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
