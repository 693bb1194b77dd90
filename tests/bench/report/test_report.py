"""The command: what it writes, twice the same, and one line where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench.collect import collect
from bench.errors import UserError
from bench.report.__main__ import main, report
from bench.report.data import load, over_trials

ROOT = Path(__file__).parents[3]
MEASURED = sorted((ROOT / "results" / "measured").glob("*/records"))


def _bytes(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] in ("tables", "figures", "report.md", "report.html")
    }


def _csvs(source: Path, target: Path, keep: str = "") -> Path:
    """The three CSVs of a folder, of runs.csv only the rows that fit a pandas query."""
    target.mkdir(exist_ok=True)
    for name in ("stages", "steps"):
        shutil.copy(source / f"{name}.csv", target)
    runs = pd.read_csv(source / "runs.csv", dtype="str", keep_default_na=False)
    (runs.query(keep) if keep else runs).to_csv(target / "runs.csv", index=False)
    return target


def test_another_process_writes_the_same_bytes_from_the_csvs_alone(made: Path, tmp_path: Path) -> None:
    """No record is read: there is none in the copy.  Rows in another order change nothing."""
    keep = "run_id in ('single-resnet18-cpu-p1-m1-uniform-2-t0-ok', 'torch-resnet18-cpu-p4-m4-uniform-2.2.2.2-t0-ok')"
    seen = []
    for i in range(2):
        folder = _csvs(made, tmp_path / str(i), keep)
        if i:
            runs = pd.read_csv(folder / "runs.csv", dtype="str", keep_default_na=False)
            runs.iloc[::-1].to_csv(folder / "runs.csv", index=False)
        command = [sys.executable, "-m", "bench.report", "."]
        variables = {**os.environ, "PYTHONHASHSEED": str(i), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        seen.append(_bytes(folder))
    assert seen[0] == seen[1]
    assert len(seen[0]) > 20


def test_what_a_former_report_left_is_gone_and_nothing_else(made: Path, tmp_path: Path) -> None:
    folder = _csvs(made, tmp_path, "status == 'unsupported'")
    for name in ("tables/2-throughput-s9-m1.csv", "tables/mine.csv", "figures/1-old.svg"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("old")
    report(folder)
    assert not (folder / "tables/2-throughput-s9-m1.csv").exists()
    assert not (folder / "figures/1-old.svg").exists()
    assert (folder / "tables/mine.csv").read_text() == "old"


def test_one_run_is_enough(made: Path, tmp_path: Path) -> None:
    folder = _csvs(made, tmp_path, "run_id == 'torch-resnet18-cpu-p2-m8-uniform-2.2-t0-ok'")
    report(folder)
    (row,) = pd.read_csv(folder / "tables" / "2-throughput-s1-m8.csv").to_dict("records")
    assert row["samples/s"] == pytest.approx(8 / 0.55)
    # Taken from runs.csv, whose baseline is not among what is left.
    assert row["speed-up"] == pytest.approx(1.02 / 0.55)
    assert "Baseline: not among these runs" in (folder / "report.md").read_text()
    assert "All 1 runs are ok." in (folder / "report.md").read_text()


@pytest.mark.parametrize("keep", ["status != 'ok'", "status == 'parity_failed'"])
def test_where_all_failed_there_is_no_figure(keep: str, made: Path, tmp_path: Path) -> None:
    folder = _csvs(made, tmp_path, keep)
    report(folder)
    found = pd.concat([pd.read_csv(p) for p in folder.glob("tables/2-*.csv")])
    assert set(found["samples/s"]) <= {"OOM", "—", "timeout", "error", "interrupted", "parity failed"}
    assert found["samples/s kind"].isna().all()
    assert list(folder.glob("figures/*")) == []
    assert len(pd.read_csv(folder / "tables" / "7-failures.csv")) == len(load(folder).runs)


def _one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([str(folder)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    return said.err


def test_mistakes_are_one_line(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no runs.csv; run python -m bench.collect" in _one_line(tmp_path / "nothing", capsys)
    empty = _csvs(made, tmp_path / "empty", "status == 'nothing'")
    assert "holds no runs; run python -m bench first" in _one_line(empty, capsys)
    collected = tmp_path / "collected"
    (collected / "records").mkdir(parents=True)
    collect(collected)
    assert "holds no runs; " in _one_line(collected, capsys)
    for name, change in {
        "column": lambda d: d.drop(columns=["throughput"]),
        "number": lambda d: d.assign(throughput="fast"),
        "status": lambda d: d.assign(status="fine"),
        "empty cell": lambda d: d.assign(stages=""),
        "twice": lambda d: pd.concat([d, d]),
    }.items():
        folder = _csvs(made, tmp_path / name)
        change(pd.read_csv(folder / "runs.csv", dtype="str", keep_default_na=False)).to_csv(  # type: ignore[no-untyped-call]
            folder / "runs.csv", index=False
        )
        said = _one_line(folder, capsys)
        expected = {
            "column": "has no column throughput",
            "number": "cannot be read",
            "status": "status: 'fine' is not ok or oom",
            "empty cell": "stages is empty in row 1",
            "twice": "stands twice in runs.csv",
        }
        assert expected[name] in said
        assert not (folder / "report.html").exists()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "runs.csv").write_bytes(bytes(range(256)) * 3)
    _one_line(tmp_path / "binary", capsys)
    assert main(["a", "b"]) == 2


def test_a_folder_that_cannot_be_written_is_one_line(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _csvs(made, tmp_path, "status == 'oom'")
    (folder / "tables").write_text("in the way")
    assert "cannot be written" in _one_line(folder, capsys)


def test_a_bad_trace_is_named_and_left_out(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_id = "torch-resnet18-cpu-p2-m4-uniform-2.2-t0-ok"
    folder = _csvs(made, tmp_path, f"run_id == '{run_id}'")
    (folder / "traces").mkdir()
    (folder / "traces" / f"{run_id}.csv").write_text("step,stage\n1\n")
    assert main([str(folder)]) == 1
    assert f"{run_id}.csv: no spans" in capsys.readouterr().err
    assert 'id="timeline"' not in (folder / "report.html").read_text()


def test_a_name_like_an_unknown_value_stays_a_name(odd: Path) -> None:
    assert {r.run_id for r in load(odd).runs} == {"nan", "None", '..%2f "<b>'}


def _published(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    source = pd.read_csv(ROOT / "results" / "published" / "resnet_vgg.csv", dtype="str")
    (folder / "published").mkdir()
    pd.DataFrame(rows, columns=source.columns).to_csv(folder / "published" / "theirs.csv", index=False)


def test_published_figures_stand_beside_ours(made: Path, tmp_path: Path) -> None:
    theirs = {
        "source": "a paper on torch",
        "benchmark": "speed",
        "model": "ResNet-18 / ImageNet",
        "experiment": "pipeline-4",
        "stages": 4,
        "chunks": 4,
        "batch_size": 8,
        "balance": "2-2-2-2",
        "metric": "speedup_vs_one",
        "value": 3.5,
        "unit": "x",
        "hardware": "4x Tesla P40",
        "checkpoint": "none",
        "devices": 4,
        "note": "3x64x64; fp32",
    }
    folder = _csvs(made, tmp_path)
    rows = [theirs, {**theirs, "batch_size": 16}, {**theirs, "note": "3x224x224"}, {**theirs, "metric": "epoch_time"}]
    _published(folder, [*rows, {**theirs, "model": "AmoebaNet-D (18,256)"}])
    report(folder)
    table = pd.read_csv(folder / "tables" / "8-published.csv", dtype="str")
    ours = pd.read_csv(folder / "tables" / "2-throughput-s1-m4.csv").query("library == 'torch' and p == 4")
    assert list(table["theirs"]) == ["3.5"] * 3
    assert float(table["ours"][0]) == pytest.approx(float(ours["speed-up"].iloc[0]))
    assert list(table["ours"][1:]) == ["—", "—"]
    assert set(table["their hardware"]) == {"4x Tesla P40"}
    # Theirs are in no table of ours.
    assert "Tesla" not in "".join(p.read_text() for p in folder.glob("tables/[0-7]-*"))


def test_the_published_file_is_read(made: Path, tmp_path: Path) -> None:
    folder = _csvs(made, tmp_path, "run_id == 'single-resnet18-cpu-p1-m1-uniform-2-t0-ok'")
    shutil.copytree(ROOT / "results" / "published", folder / "published")
    report(folder)
    table = pd.read_csv(folder / "tables" / "8-published.csv")
    assert set(table["their model"]) == {"ResNet-18 / ImageNet"}
    assert set(table["ours"]) == {"—"}


def test_a_bad_published_file_is_one_line(made: Path, tmp_path: Path) -> None:
    folder = _csvs(made, tmp_path, "status == 'oom'")
    (folder / "published").mkdir()
    (folder / "published" / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="has no column source"):
        report(folder)


def test_what_trials_say() -> None:
    one = over_trials([2.0], (1.5, 2.5))
    assert (one.value, one.low, one.high, one.kind) == (2.0, 1.5, 2.5, "steps")
    four = over_trials([1.0, 4.0, 2.0, 3.0])
    assert (four.value, four.low, four.high, four.kind) == (2.5, 1.0, 4.0, "range")
    assert over_trials([1.0, 2.0, 3.0, 4.0, 5.0]).kind == "interval"
    assert over_trials([2.0]).kind == "none"


@pytest.mark.parametrize("records", MEASURED, ids=lambda path: path.parent.name)
def test_committed_results_have_a_report(records: Path, tmp_path: Path) -> None:
    shutil.copytree(records, tmp_path / "records")
    collect(tmp_path)
    report(tmp_path)
    assert "SYNTHETIC" not in (tmp_path / "report.md").read_text()
    assert "CPU: says nothing about GPUs" in (tmp_path / "report.md").read_text()


def test_help_explains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "report.html" in capsys.readouterr().out
