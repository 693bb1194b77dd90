"""Every figure of every table again, from the CSVs by a few lines of pandas; how runs ended; what is bold."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bench.report.layout import Notes, md_text, number
from bench.series import median_interval

MIB = 2**20
KEYS = ["library", "stages", "micro_batches", "schedule", "balance", "partition"]
SETTING = ["hardware", "batch_size"]


def _measured(folder: Path) -> pd.DataFrame:
    """The usable runs with their median step by steps.csv alone, and what follows from that."""
    steps = pd.read_csv(folder / "steps.csv")
    median = steps[~steps["warmup"]].drop_duplicates(["run_id", "step"]).groupby("run_id")["step_time_s"].median()
    runs = pd.read_csv(folder / "runs.csv", keep_default_na=False).drop(columns=["step_time_s"])
    runs = runs[runs["status"] == "ok"].join(median, on="run_id", validate="one_to_one")
    runs["throughput"] = runs["batch_size"] / runs["step_time_s"]
    base = runs[runs["baseline"]].groupby(SETTING)["throughput"].median().rename("base")
    runs = runs.join(base, on=SETTING)
    one = runs[runs["stages"] == 1].groupby([*SETTING, "library", "micro_batches"])["throughput"].median()
    runs = runs.join(one.rename("one"), on=[*SETTING, "library", "micro_batches"])
    runs["speedup"] = runs["throughput"] / runs["base"]
    runs["ratio"] = runs["throughput"] / runs["one"]
    runs["efficiency"] = runs["speedup"] / runs["stages"]
    return runs


def _settings(folder: Path) -> dict[str, tuple[str, int]]:
    """S1, S2, …: hardware and mini-batch, as the set-up tables say."""
    found = {}
    for path in sorted(folder.glob("tables/1-setup-*.csv")):
        table = pd.read_csv(path).set_index("property")["value"]
        found[path.stem.rpartition("-")[2]] = (table["hardware"], int(table["input"].split(" × ")[0]))
    return found


def _tables(folder: Path, prefix: str) -> list[tuple[tuple[str, int], pd.DataFrame]]:
    settings = _settings(folder)
    found = [(path, re.search(r"-(s\d+)", path.stem)) for path in sorted(folder.glob(f"tables/{prefix}-*.csv"))]
    return [(settings[of[1]], pd.read_csv(path, keep_default_na=False)) for path, of in found if of]


def _cell(runs: pd.DataFrame, setting: tuple[str, int], row: pd.Series) -> pd.DataFrame:
    """The usable runs of a table's row."""
    of = runs[(runs["hardware"] == setting[0]) & (runs["batch_size"] == setting[1])]
    of = of[(of["library"] == row["library"]) & (of["stages"] == row["p"]) & (of["micro_batches"] == row["m"])]
    if row.get("schedule"):
        of = of[of["schedule"] == row["schedule"]]
    if row["balance"]:
        rule, _, cut = row["balance"].partition(" ")
        of = of[(of["balance"] == rule) & (of["partition"] == cut)]
    return of


def _numeric(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """The rows that have a number there."""
    return frame[pd.to_numeric(frame[column], errors="coerce").notna()]


def test_throughput_speedup_and_efficiency(made: Path) -> None:
    runs = _measured(made)
    columns = {
        "step s": "step_time_s",
        "samples/s": "throughput",
        "speed-up": "speedup",
        "to p=1": "ratio",
        "efficiency": "efficiency",
    }
    seen = 0
    for setting, table in _tables(made, "2-throughput"):
        for _, row in _numeric(table, "samples/s").iterrows():
            of = _cell(runs, setting, row).sort_values("trial")
            assert len(of) == row["trials"]
            for column, name in columns.items():
                if row[column] == "—":
                    assert of[name].isna().all()
                    continue
                values = of[name].to_numpy()
                assert float(row[column]) == pytest.approx(np.median(values))
                if len(values) >= 5:
                    assert row[f"{column} kind"] == "interval"
                    low, high = median_interval(list(values))
                elif len(values) > 1:
                    assert row[f"{column} kind"] == "range"
                    low, high = values.min(), values.max()
                else:
                    assert row[f"{column} kind"] == "steps"
                    continue
                assert float(row[f"{column} low"]) == pytest.approx(low)
                assert float(row[f"{column} high"]) == pytest.approx(high)
                seen += 1
    assert seen > 50


def test_every_cell_has_its_row_once(made: Path) -> None:
    runs = pd.read_csv(made / "runs.csv", keep_default_na=False).query("status == 'ok'")
    for m, cells in runs.groupby("micro_batches"):
        rows = 0
        for path in made.glob(f"tables/2-throughput-*-m{m}.csv"):
            table = pd.read_csv(path)
            rows += ((table["m"] == m) & (table["trials"] > 0)).sum()
        assert rows == cells.groupby(SETTING + KEYS).ngroups


def test_one_trial_has_the_interval_of_its_own_steps(made: Path) -> None:
    steps = pd.read_csv(made / "steps.csv")
    (run_id,) = pd.read_csv(made / "runs.csv").query("library == 'torchgpipe'")["run_id"]
    times = steps[(steps["run_id"] == run_id) & ~steps["warmup"]].drop_duplicates("step")["step_time_s"]
    table = pd.read_csv(made / "tables" / "2-throughput-s1-m4.csv")
    row = table[table["library"] == "torchgpipe"].iloc[0]
    low, high = median_interval(list(times))
    assert (float(row["step s low"]), float(row["step s high"])) == pytest.approx((low, high))
    assert (float(row["samples/s low"]), float(row["samples/s high"])) == pytest.approx((8 / high, 8 / low))


def test_micro_batches(made: Path) -> None:
    runs = _measured(made)
    for column in ("bubble", "ideal_bubble"):
        runs[column] = pd.to_numeric(runs[column])
    seen = 0
    for setting, table in _tables(made, "3-micro-batches"):
        for _, row in _numeric(table, "samples/s").iterrows():
            of = _cell(runs, setting, row)
            assert float(row["samples/s"]) == pytest.approx(of["throughput"].median())
            if row["bubble"] != "—":
                bubble, ideal = of["bubble"].median(), of["ideal_bubble"].median()
                assert float(row["bubble"]) == pytest.approx(bubble)
                if row["ideal bubble"] != "—":
                    assert float(row["ideal bubble"]) == pytest.approx(ideal)
                    assert float(row["difference"]) == pytest.approx(bubble - ideal)
                    seen += 1
    assert seen > 5


def test_balance(made: Path) -> None:
    runs = _measured(made)
    peaks = pd.read_csv(made / "stages.csv").groupby("run_id")["peak_allocated_bytes"].max()
    for setting, table in _tables(made, "4-balance"):
        assert (table["p"] > 1).all()
        for _, row in _numeric(table, "samples/s").iterrows():
            of = _cell(runs, setting, row)
            assert float(row["samples/s"]) == pytest.approx(of["throughput"].median())
            assert float(row["step s"]) == pytest.approx(of["step_time_s"].median())
            assert float(row["imbalance"]) == pytest.approx(pd.to_numeric(of["imbalance"]).median())
            assert float(row["predicted step s"]) == pytest.approx(pd.to_numeric(of["predicted_step_time_s"]).median())
            assert float(row["peak MiB"]) == pytest.approx(peaks[of["run_id"]].max() / MIB)


def test_trials_that_were_cut_differently_are_not_averaged(made: Path) -> None:
    table = pd.read_csv(made / "tables" / "4-balance-s1.csv").set_index("balance")
    assert {"time 1-3", "time 2-2"} <= set(table.index)
    assert float(table.loc["time 2-2", "step s"]) == pytest.approx(0.6)


def test_memory(made: Path) -> None:
    runs = _measured(made)
    stages = pd.read_csv(made / "stages.csv").merge(runs, on="run_id", suffixes=("", "_run"))
    parts = {
        "peak MiB": "peak_allocated_bytes",
        "parameters": "peak_parameters_bytes",
        "gradients": "peak_gradients_bytes",
        "optimizer state": "peak_optimizer_state_bytes",
        "mini-batch": "peak_placed_bytes",
        "activations": "peak_activations_bytes",
    }
    seen = 0
    for setting, table in _tables(made, "5-memory"):
        for _, row in _numeric(table, "peak MiB").iterrows():
            of = stages[stages["run_id"].isin(_cell(runs, setting, row)["run_id"])]
            fullest = of.loc[of["peak_allocated_bytes"].idxmax(), "run_id"]
            stage = of[(of["run_id"] == fullest) & (of["stage"] == int(row["stage"]))].iloc[0]
            for column, name in parts.items():
                assert float(row[column]) == pytest.approx(stage[name] / MIB)
            assert row["reserved"] == "—"
            seen += 1
    assert seen > 20
    text = (made / "tables" / "5-memory-s1.md").read_text()
    assert re.search(r"\| 0 \| \*\*▲ 428\*\* \|", text)
    assert "▲ 328" not in text


def test_lost_time_adds_up(made: Path) -> None:
    runs = _measured(made)
    names = ["ideal", "bubble", "imbalance", "recompute", "communication", "unexplained"]
    for name in names:
        runs[f"{name}_s"] = pd.to_numeric(runs[f"{name}_s"])
    runs["traced_step_time_s"] = pd.to_numeric(runs["traced_step_time_s"])
    seen = 0
    for setting, table in _tables(made, "6-lost-time"):
        for _, row in table.iterrows():
            of = _cell(runs, setting, row)
            total = of["traced_step_time_s"].sum()
            assert float(row["traced step s"]) == pytest.approx(of["traced_step_time_s"].median())
            shares = [row[f"{name} %"] for name in names]
            assert sum(float(s) for s in shares if s != "—") == pytest.approx(100)
            for name, share in zip(names, shares, strict=True):
                if share == "—":
                    assert of[f"{name}_s"].isna().all()
                else:
                    assert float(share) == pytest.approx(100 * of[f"{name}_s"].sum() / total)
            seen += 1
    assert seen > 8


def test_setup(made: Path) -> None:
    table = pd.read_csv(made / "tables" / "1-setup-s1.csv").set_index("property")["value"]
    runs = pd.read_csv(made / "runs.csv").query("hardware == 'cpu-made-up' and batch_size == 8")
    assert table["runs"] == f"{len(runs)}, {(runs['status'] == 'ok').sum()} ok"
    assert table["input"] == "8 × 3 × 64 × 64, 1000 classes"
    assert table["warm-up steps a run"] == "1"
    assert table["measured steps a run"] == "3 to 9"
    assert table["trials a cell"] == "1 to 7"


def test_libraries_come_from_their_capabilities(made: Path) -> None:
    table = pd.read_csv(made / "tables" / "0-libraries.csv").set_index("library")
    assert table.loc["torch", "schedules"].startswith("1f1b, gpipe")
    assert table.loc["ddp", "process model"] == "replicas, one process a device"
    assert table.loc["torchgpipe", "overlap on CPU"] == "no"
    assert table.loc["torch", "version"] == "2.0"


def test_every_failure_and_its_reason(made: Path) -> None:
    table = pd.read_csv(made / "tables" / "7-failures.csv")
    runs = pd.read_csv(made / "runs.csv").query("status != 'ok'")
    assert sorted(table["reason"]) == sorted(runs["fail_reason"])
    assert set(table["ended"]) == {"OOM", "timeout", "error", "interrupted", "parity failed", "unsupported"}
    good = table[table["notes"] == "a later run of the same trial went well."]
    assert list(good["ended"]) == ["timeout"]


def test_how_a_cell_without_a_figure_stands_in_the_speed_table(made: Path) -> None:
    table = pd.read_csv(made / "tables" / "2-throughput-s1-m4.csv").set_index(["library", "p"])
    assert table.loc[("deepspeed", 2), "samples/s"] == "OOM"
    assert table.loc[("fairscale", 2), "samples/s"] == "parity failed"
    assert table.loc[("ddp", 8), "samples/s"] == "interrupted"
    row = table.loc[("fairscale", 4)]
    assert "parity unchecked: the reference fits nowhere." in row["notes"]
    row = table.loc[("ddp", 2)]
    assert row["trials"] == 2
    assert "1 of 3 trials failed (error), see Failures." in row["notes"]
    one = pd.read_csv(made / "tables" / "2-throughput-s1-m1.csv").set_index(["library", "p"])
    row = one.loc[("ddp", 2)]
    assert row["samples/s"] == "—"
    assert "unsupported: m=1: must be a multiple of the 2 replicas." in row["notes"]


def test_bold_only_where_no_other_interval_is_met(made: Path, tmp_path: Path) -> None:
    from bench.report.__main__ import report

    # In the study a cell with fewer than five trials stands beside the best one: nothing is sure.
    text = (made / "tables" / "2-throughput-s1-m4.md").read_text()
    assert not re.search(r"\| \*\*[\d.]", text)
    for name in ("stages", "steps"):
        (tmp_path / f"{name}.csv").write_bytes((made / f"{name}.csv").read_bytes())
    runs = pd.read_csv(made / "runs.csv", keep_default_na=False)
    enough = runs[(runs["library"].isin(["torch", "single"])) & (runs["micro_batches"].isin([1, 4]))]
    enough = enough[(enough["balance"] == "uniform") & (enough["virtual_stages"] == 1)]
    enough = enough[(enough["batch_size"] == 8) & (enough["device"] == "cpu")]
    enough = enough[(enough["library"] == "torch") | (enough["micro_batches"] == 1)]
    enough.to_csv(tmp_path / "runs.csv", index=False)
    report(tmp_path)
    lines = (tmp_path / "tables" / "2-throughput-s1-m4.md").read_text().splitlines()
    bold = [line for line in lines if re.search(r"\*\*[\d.]", line)]
    # p=4 is the fastest, and by efficiency one stage is the best.
    assert [line.split(" | ")[1] for line in bold] == ["1", "4"]
    assert bold[1].count("**") == 2 * 4


def test_the_baseline_is_named_or_missed(made: Path) -> None:
    settings = {v: k for k, v in _settings(made).items()}
    with_base = (made / "tables" / f"2-throughput-{settings['cpu-made-up', 8]}-m4.md").read_text()
    assert "Baseline: single, m=1, 7.84" in with_base
    without = (made / "tables" / f"2-throughput-{settings['cuda-made-up', 8]}-m4.md").read_text()
    assert "Baseline: missing" in without
    assert "no speed-up: the baseline of this setting is missing" in without


def test_hardware_and_mini_batches_are_never_mixed(made: Path) -> None:
    assert set(_settings(made).values()) == {("cpu-made-up", 8), ("cpu-made-up", 16), ("cuda-made-up", 8)}
    for (hardware, _), table in _tables(made, "7"):
        assert set(table["hardware"]) == {hardware}


def test_synthetic_and_cpu_are_said_in_every_table(made: Path) -> None:
    settings = _settings(made)
    for path in (made / "tables").glob("*.*"):
        text = path.read_text()
        assert "SYNTHETIC: made up, not measured" in text or text.startswith("synthetic,"), path
        if path.suffix == ".csv":
            assert set(pd.read_csv(path)["synthetic"]) <= {True}
        setting = re.search(r"-(s\d)", path.name)
        if path.suffix == ".md" and setting:
            assert ("CPU: says nothing about GPUs" in text) == (settings[setting[1]][0] == "cpu-made-up"), path


@pytest.mark.parametrize(
    ("value", "text"), [(0.12345, "0.123"), (12.345, "12.3"), (1234.5, "1234"), (None, "—"), (0, "0"), (-2.5, "-2.5")]
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_marks_go_on_after_z() -> None:
    notes = Notes()
    marks = [notes.mark(str(i)) for i in range(28)]
    assert [marks[i] for i in (0, 25, 26, 27)] == ["a", "z", "aa", "ab"]
    assert notes.mark("0") == "a"


def test_markdown_takes_nothing_for_its_own() -> None:
    assert md_text("a|b\n<i> *x* [l](http://u)") == r"a\|b &lt;i&gt; \*x\* \[l\](http:&#47;&#47;u)"
