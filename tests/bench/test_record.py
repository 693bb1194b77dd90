"""Records: what is written is read back whole, and a bad file names itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.record import Record, RecordError, from_json, load, load_all, records_dir, write

Make = Callable[..., Record]


def test_what_is_written_is_read_back_whole(made_record: Make, tmp_path: Path) -> None:
    made = made_record("run", factors={"precision": "bf16"}, notes=("a note",), waited_s=1.25)
    path = write(made, tmp_path)
    assert path == records_dir(tmp_path) / "run.json"
    assert load(path) == made


def test_writing_leaves_no_temporary_file_and_replaces(made_record: Make, tmp_path: Path) -> None:
    write(made_record("run", trial=0), tmp_path)
    write(made_record("run", trial=1), tmp_path)
    assert [p.name for p in records_dir(tmp_path).iterdir()] == ["run.json"]
    assert load(records_dir(tmp_path) / "run.json").trial == 1


def test_keys_of_a_later_program_are_ignored(made_record: Make, tmp_path: Path) -> None:
    made = made_record("run")
    data = json.loads(write(made, tmp_path).read_text())
    assert from_json({**data, "bubble": 0.25}) == made


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) // 2], "not a record"),
        (lambda text: "[]", "not a record"),
        (lambda text: "{}", "schema_version"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 99'), "schema_version 99"),
        # A text where a number belongs used to come as far as the medians.
        (lambda text: text.replace('"trial": 0', '"trial": "0"'), "trial: '0' is no int"),
        (lambda text: text.replace('"wall_s": ', '"wall_s": "long", "was": '), "wall_s: 'long' is no float"),
        (lambda text: text.replace('"factors": {', '"factors": {"colour": "red", '), "colour"),
    ],
)
def test_a_bad_file_is_named_in_one_line(
    damage: Callable[[str], str], said: str, made_record: Make, tmp_path: Path
) -> None:
    good = made_record("good")
    write(good, tmp_path)
    path = write(made_record("bad"), tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(RecordError) as caught:
        load(path)
    assert "bad.json" in str(caught.value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    records, errors = load_all(tmp_path)
    assert records == [good]
    assert [str(e) for e in errors] == [str(caught.value)]


def test_a_half_written_record_is_not_seen(made_record: Make, tmp_path: Path) -> None:
    write(made_record("run"), tmp_path)
    (records_dir(tmp_path) / ".other.1.tmp").write_text("{")
    records, errors = load_all(tmp_path)
    assert [r.run_id for r in records] == ["run"]
    assert errors == []
