"""The table says what was measured, what failed and why, and what the rows do not say."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.account import Account
from bench.record import Record, write
from bench.table import comparison, footnotes, lost_time, trials

Make = Callable[..., Record]


def _printed(records: Sequence[Record], context: Sequence[Record] = (), width: int = 250) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(comparison(records, context))
    return out.getvalue()


def _rows(text: str) -> list[dict[str, str]]:
    """The cells of each row by column, of a table wide enough for one line a row."""
    heads = next(line for line in text.splitlines() if line.startswith("┃"))
    names = [cell.strip() for cell in heads.strip("┃").split("┃")]
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [dict(zip(names, (c.strip() for c in line.strip("│").split("│")), strict=True)) for line in lines]


def _baseline(made_record: Make, **fields: object) -> Record:
    factors = {"micro_batches": 1}
    return made_record("base", library="single", times=(1.0, 1.0), factors=factors, baseline=True, **fields)


def test_a_measured_row(made_record: Make) -> None:
    base, run = _baseline(made_record), made_record("run", overlap=False)
    rows = _rows(_printed([base, run]))
    assert [row["library"] for row in rows] == ["single", "torch *"]
    assert rows[1] == {
        "library": "torch *",
        "p": "2",
        "m": "4",
        "balance": "uniform 2-2",
        "schedule": "1f1b",
        "step s": "0.5",
        "samples/s": "16 [13.3, 20]",
        "speed-up": "2.00",
        "to p=1": "",
        "peak MiB a stage": "310 | 120",
        "parity a / b": "3e-06 / 5e-14",
        "fixed s": "6.5",
        "status": "ok",
    }
    assert rows[0]["schedule"] == rows[0]["balance"] == ""


def test_rows_keep_the_order_of_the_records(made_record: Make) -> None:
    records = [made_record(name, library=name) for name in ("torch", "ddp", "deepspeed")]
    assert [row["library"] for row in _rows(_printed(records))] == ["torch", "ddp", "deepspeed"]


def test_one_row_alone_and_a_baseline_that_is_not_shown(made_record: Make) -> None:
    run = made_record("run")
    assert _rows(_printed([run]))[0]["speed-up"] == ""
    assert any(line.startswith("no speed-up") for line in footnotes([run]))
    context = [_baseline(made_record)]
    assert _rows(_printed([run], context))[0]["speed-up"] == "2.00"
    assert not any(line.startswith("no speed-up") for line in footnotes([run], context))


@pytest.mark.parametrize("status", ["oom", "timeout", "error", "unsupported", "parity_failed", "interrupted"])
def test_a_failed_row_has_its_reason_and_no_number(status: str, made_record: Make) -> None:
    measured = made_record("careless")
    run = made_record("run", status=status, fail_phase="warmup", fail_reason="stage 1: why", steps=measured.steps)
    (row,) = _rows(_printed([run], [_baseline(made_record)]))
    assert row["status"] == f"{status} in warmup: stage 1: why"
    assert row["step s"] == row["samples/s"] == row["speed-up"] == row["to p=1"] == ""


def test_parity_in_words(made_record: Make) -> None:
    records = [
        made_record("unchecked", parity=None, parity_double=None, parity_unchecked="the reference fits nowhere"),
        made_record("failed", status="parity_failed", fail_phase="parity", fail_reason="differs"),
        made_record("early", status="oom", fail_phase="build", fail_reason="out of memory"),
    ]
    assert [row["parity a / b"] for row in _rows(_printed(records))] == ["unchecked", "failed", ""]
    assert "parity unchecked: the reference fits nowhere" in footnotes(records)


def test_what_all_rows_share_stands_in_the_title_and_what_varies_in_a_column(made_record: Make) -> None:
    same = [made_record("a"), made_record("b")]
    title = " ".join(_printed(same).partition("┏")[0].split())
    for part in ("model=resnet18", "batch_size=8", "precision=fp32", "device=cpu", "checkpoint=never"):
        assert part in title.split()
    varied = [made_record("a"), made_record("b", factors={"batch_size": 16, "checkpoint": "always"})]
    text = _printed(varied)
    assert "batch_size=" not in text
    assert [(row["batch_size"], row["checkpoint"]) for row in _rows(text)] == [("8", "never"), ("16", "always")]


def test_an_unmeasured_peak_keeps_its_stage(made_record: Make) -> None:
    run = made_record("run")
    stages = (dataclasses.replace(run.stages[0], peak_allocated_bytes=None), run.stages[1])
    assert _rows(_printed([made_record("run", stages=stages)]))[0]["peak MiB a stage"] == "? | 120"


def test_nothing_is_cut_on_a_narrow_terminal(made_record: Make) -> None:
    text = _printed([_baseline(made_record), made_record("run")], width=90)
    assert "…" not in text
    assert all(len(line) <= 90 for line in text.splitlines())


def test_caveats(made_record: Make) -> None:
    def said(*records: Record) -> str:
        return "\n".join(footnotes(records))

    cpu = made_record("run", overlap=False, notes=("copies the mini-batch",))
    assert "cannot overlap" in said(cpu)
    assert "CPU: a stage is one core" in said(cpu)
    assert "torch: copies the mini-batch." in said(cpu, cpu)
    assert said(cpu, cpu).count("copies the mini-batch") == 1
    assert said(cpu).startswith("SYNTHETIC")
    cuda = made_record("run", synthetic=False, factors={"device": "cuda"})
    for word in ("SYNTHETIC", "cannot overlap", "CPU:", "shared a GPU"):
        assert word not in said(cuda)
    assert "shared a GPU" in said(made_record("run", factors={"device": "cuda", "share_devices": True}))


def test_the_tolerances_are_said_and_whose_are_others(made_record: Make) -> None:
    usual = made_record("a")
    assert usual.parity_double is not None
    wider = dataclasses.replace(usual.parity_double, gradient_tolerance=1.5e-6)
    records = [usual, made_record("b"), made_record("c", library="deepspeed", parity_double=wider)]
    lines = [line for line in footnotes(records) if "allowed" in line]
    assert lines == [
        "parity a allowed fp32 gradient 1.0e-06, update 2.0e-05.",
        "parity b allowed fp64 gradient 1.0e-10, update 1.0e-10.",
        "parity b allowed fp64 gradient 1.5e-06, update 1.0e-10 for deepspeed p=2 m=4.",
    ]


def test_the_command_prints_the_table_of_a_folder(made_record: Make, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.table", str(tmp_path)]
    empty = subprocess.run(command, capture_output=True, text=True, check=False)
    assert empty.returncode == 2
    assert empty.stderr.startswith(f"results_dir={tmp_path}: holds no records")
    write(made_record("later", started_at="2026-01-02T00:00:00+00:00"), tmp_path)
    write(made_record("zz-first", library="ddp"), tmp_path)
    write(made_record("parity", kind="parity"), tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [row["library"] for row in _rows(done.stdout)] == ["ddp", "torch"]
    assert "SYNTHETIC" in done.stdout


def _account(**changes: Any) -> Account:
    parts = {"ideal_s": 0.25, "bubble_s": 0.1, "imbalance_s": 0.05, "recompute_s": 0.0, "communication_s": 0.075}
    made = {**parts, "unexplained_s": 0.025, **changes}
    return Account(step_time_s=0.5, bubble=0.4, ideal_bubble=0.2, overlap=True, lanes=(), **made)


def test_where_the_time_went_adds_up_to_the_step(made_record: Make) -> None:
    traced, plain = made_record("run", account=_account()), made_record("untraced")
    failed = made_record("failed", status="error", fail_reason="why", account=_account())
    table = lost_time([traced, plain, failed])
    assert table is not None
    out = io.StringIO()
    Console(file=out, width=250).print(table)
    (row,) = _rows(out.getvalue())
    shares = [row[name] for name in list(row)[6:12]]
    assert shares == ["50.0%", "20.0%", "10.0%", "0.0%", "15.0%", "5.0%"]
    assert sum(float(share.rstrip("%")) for share in shares) == 100
    assert (row["measured bubble"], row["ideal bubble"]) == ("0.400", "0.200")
    assert lost_time([plain, failed]) is None


def test_what_is_not_simulated_is_left_empty_and_not_zero(made_record: Make) -> None:
    table = lost_time([made_record("run", account=_account(bubble_s=None, imbalance_s=None, recompute_s=None))])
    assert table is not None
    out = io.StringIO()
    Console(file=out, width=250).print(table)
    (row,) = _rows(out.getvalue())
    assert row["bubble"] == row["imbalance"] == row["recomputation"] == ""


@pytest.mark.parametrize(("count", "called"), [(2, "range"), (4, "range"), (5, "95 % interval")])
def test_a_cells_figure_over_its_trials(count: int, called: str, made_record: Make) -> None:
    runs = [made_record(f"run{i}", cell_id="one", trial=i, times=(0.5 + 0.01 * i,) * 3) for i in range(count)]
    lost = made_record("lost", cell_id="one", trial=9, status="oom", fail_reason="why")
    other = made_record("other", library="deepspeed")
    table = trials([*runs, lost, other])
    assert table is not None
    out = io.StringIO()
    Console(file=out, width=250).print(table)
    (row,) = _rows(out.getvalue())
    assert row["trials"] == f"{count} of {count + 1}"
    assert row["low, high are"] == called
    assert float(row["step s"]) == pytest.approx(0.5 + 0.005 * (count - 1), abs=0.001)
    assert float(row["low"]) < float(row["samples/s"]) < float(row["high"])
    assert trials([runs[0], other]) is None
