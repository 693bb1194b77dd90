"""CSVs from records alone: rows, figures, the same bytes again, and bad records named and left out."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from bench.collect import collect
from bench.record import Record, records_dir, write
from bench.schema import TABLES

Make = Callable[..., Record]
MEASURED = sorted((Path(__file__).parents[2] / "results" / "measured").glob("*/records"))


def _study(made_record: Make) -> list[Record]:
    """A baseline, a library at one and two stages, a repetition, and each way to fail."""
    unequal = made_record("f-unequal")
    return [
        made_record("a-base", library="single", times=(1.0, 1.0), factors={"micro_batches": 1}, baseline=True),
        made_record("b-one", times=(0.8, 0.8), factors={"stages": 1}),
        made_record("c-two", times=(0.5, 0.4, 0.6)),
        made_record("d-two-again", times=(0.25,), cell_id="cell-c-two"),
        made_record("e-oom", status="oom", fail_phase="measure", fail_reason="out of memory"),
        made_record(
            "f-unequal",
            status="parity_failed",
            fail_phase="parity",
            fail_reason="gradient of layer 3 differs",
            # Steps that a careless program left there must still give no figure.
            steps=unequal.steps,
            parity=unequal.parity,
        ),
        made_record("g-unsupported", status="unsupported", fail_phase="plan", fail_reason="no", partition=()),
        made_record("parity-x", kind="parity", steps=()),
    ]


def _runs(results_dir: Path) -> pd.DataFrame:
    paths, lines = collect(results_dir)
    assert lines == []
    return pd.read_csv(paths["runs"]).set_index("run_id")


def test_one_row_a_run_with_the_derived_figures(made_record: Make, tmp_path: Path) -> None:
    for record in _study(made_record):
        write(record, tmp_path)
    runs = _runs(tmp_path)
    assert list(runs.index) == ["a-base", "b-one", "c-two", "d-two-again", "e-oom", "f-unequal", "g-unsupported"]
    two = runs.loc["c-two"]
    assert two["steps"] == 3
    assert two["step_time_s"] == 0.5
    assert (two["step_time_low_s"], two["step_time_high_s"]) == (0.4, 0.6)
    assert two["throughput"] == 16
    assert two["throughput_low"] == pytest.approx(8 / 0.6)
    assert two["speedup"] == 2
    assert two["efficiency"] == 1
    assert two["ratio_to_one_stage"] == pytest.approx(1.6)
    assert two["peak_bytes"] == 310 * 2**20
    assert two["partition"] == "2-2"
    assert two["parity"] == "checked"
    assert two["parity_double_update_error"] == 5e-14
    assert runs.loc["d-two-again"]["speedup"] == 4
    assert runs.loc["f-unequal"]["parity"] == "failed"


def test_a_failed_run_has_no_figure(made_record: Make, tmp_path: Path) -> None:
    for record in _study(made_record):
        write(record, tmp_path)
    failed = _runs(tmp_path).loc[["e-oom", "f-unequal", "g-unsupported"]]
    for column in ("step_time_s", "throughput", "throughput_low", "throughput_high", "speedup", "efficiency"):
        assert failed[column].isna().all(), column
    assert failed["fail_reason"].notna().all()


def test_stages_and_steps_are_tidy(made_record: Make, tmp_path: Path) -> None:
    write(made_record("run", times=(0.5, 0.4)), tmp_path)
    paths, _ = collect(tmp_path)
    stages = pd.read_csv(paths["stages"])
    assert list(stages["stage"]) == [0, 1]
    assert list(stages["layers"]) == ["0-1", "2-3"]
    steps = pd.read_csv(paths["steps"])
    assert list(zip(steps["step"], steps["rank"], steps["warmup"], strict=True)) == [
        (0, 0, True),
        (0, 1, True),
        (1, 0, False),
        (1, 1, False),
        (2, 0, False),
        (2, 1, False),
    ]
    slowest = steps.groupby("step")["time_s"].max()
    assert (steps["step_time_s"] == steps["step"].map(slowest)).all()


def test_the_same_records_give_the_same_bytes(made_record: Make, tmp_path: Path) -> None:
    records = _study(made_record)
    seen = []
    for seed in range(3):
        folder = tmp_path / str(seed)
        random.Random(seed).shuffle(records)
        for record in records:
            write(record, folder)
        paths, _ = collect(folder)
        again, _ = collect(folder)
        assert paths == again
        seen.append({name: path.read_bytes() for name, path in paths.items()})
        assert sorted(p.name for p in folder.iterdir()) == ["records", "runs.csv", "stages.csv", "steps.csv"]
    assert seen[0] == seen[1] == seen[2]
    assert {name: set(pd.read_csv(tmp_path / "0" / f"{name}.csv").columns) for name in TABLES} == {
        name: {c.name for c in columns} for name, columns in TABLES.items()
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"hardware": "cpu-other"},
        {"synthetic": False},
        {"environment": {"versions": {"torch": "1.0"}}},
        {"factors": {"micro_batches": 1, "batch_size": 16}},
        {"factors": {"micro_batches": 1, "precision": "bf16"}},
        {"factors": {"micro_batches": 1, "seed": 1}},
        {"factors": {"micro_batches": 1, "image_size": 96}},
    ],
)
def test_a_baseline_of_another_setting_gives_no_speedup(
    changes: dict[str, object], made_record: Make, tmp_path: Path
) -> None:
    base = {"library": "single", "factors": {"micro_batches": 1}, "baseline": True}
    write(made_record("base", **{**base, **changes}), tmp_path)
    write(made_record("run"), tmp_path)
    run = _runs(tmp_path).loc["run"]
    assert pd.isna(run["speedup"])
    assert pd.isna(run["efficiency"])
    assert run["throughput"] == 16


def test_the_baseline_is_the_median_of_its_runs(made_record: Make, tmp_path: Path) -> None:
    for i, seconds in enumerate((1.0, 2.0, 8.0)):
        base = made_record(
            f"base-{i}", library="single", times=(seconds,), factors={"micro_batches": 1}, baseline=True, trial=i
        )
        write(base, tmp_path)
    write(made_record("run", times=(0.5,)), tmp_path)
    assert _runs(tmp_path).loc["run", "speedup"] == 4


def test_stages_that_share_a_gpu_have_no_speedup(made_record: Make, tmp_path: Path) -> None:
    cuda = {"device": "cuda", "share_devices": True}
    base = {"device": "cuda", "micro_batches": 1}
    write(made_record("base", library="single", factors=base, baseline=True), tmp_path)
    write(made_record("one", factors={**cuda, "stages": 1}), tmp_path)
    write(made_record("two", factors=cuda), tmp_path)
    runs = _runs(tmp_path)
    assert runs.loc["one", "speedup"] == 1
    assert pd.isna(runs.loc["two", "speedup"])
    assert pd.isna(runs.loc["two", "ratio_to_one_stage"])


def test_bad_records_are_named_and_left_out(made_record: Make, tmp_path: Path) -> None:
    write(made_record("good"), tmp_path)
    (records_dir(tmp_path) / "cut.json").write_text('{"schema_version": 1, "run')
    for name, change in {
        "odd-status": {"status": "fine"},
        "odd-step": {"steps": [{"index": 0, "warmup": False, "time_s": "1 s", "rank_times_s": [1.0]}]},
    }.items():
        path = write(made_record(name), tmp_path)
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    paths, lines = collect(tmp_path)
    assert [Path(line.partition(": ")[0]).name for line in lines] == ["cut.json", "odd-status.json", "odd-step.json"]
    assert "status: 'fine' is not one of ok, oom" in lines[1]
    assert "steps.time_s: '1 s' is no float" in lines[2]
    for path in paths.values():
        assert set(pd.read_csv(path)["run_id"]) == {"good"}


def test_a_record_chooses_no_module_to_import(made_record: Make, tmp_path: Path) -> None:
    path = write(made_record("run"), tmp_path)
    text = path.read_text().replace('"name": "torch"', '"name": "unheard_of"')
    path.write_text(text.replace("adapters.torch", "antigravity"))
    runs = _runs(tmp_path)
    assert runs.loc["run", "library"] == "unheard_of"
    assert pd.isna(runs.loc["run", "library_version"])
    assert "antigravity" not in sys.modules


def _command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.collect", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_the_command_counts_rows_and_names_bad_files(made_record: Make, tmp_path: Path) -> None:
    write(made_record("run", times=(0.5, 0.4)), tmp_path)
    done = _command(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"{tmp_path}/runs.csv: 1 rows",
        f"{tmp_path}/stages.csv: 2 rows",
        f"{tmp_path}/steps.csv: 6 rows",
    ]
    (records_dir(tmp_path) / "cut.json").write_text("{")
    done = _command(tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "cut.json" in done.stderr


def test_a_folder_without_records_is_one_line(tmp_path: Path) -> None:
    done = _command(tmp_path / "nothing")
    assert done.returncode == 2
    assert done.stderr.startswith(f"results_dir={tmp_path}/nothing: holds no records; ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("records", MEASURED, ids=lambda path: path.parent.name)
def test_committed_results_are_measured_and_made_of_their_records(records: Path, tmp_path: Path) -> None:
    shutil.copytree(records, records_dir(tmp_path))
    paths, lines = collect(tmp_path)
    assert lines == []
    assert not pd.read_csv(paths["runs"])["synthetic"].any()
    for path in paths.values():
        assert path.read_bytes() == (records.parent / path.name).read_bytes()
