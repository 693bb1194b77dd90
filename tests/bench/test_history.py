"""What a results folder knows of its runs: which are done under each rule, and how long another may take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.history import FINAL, History, OnExisting
from bench.jobs import to_json
from bench.record import Record, records_dir, write

Make = Callable[..., Record]


def key(record: Record) -> tuple[str, int, str]:
    return record.cell_id, record.trial, record.hardware


@pytest.mark.parametrize(
    ("rule", "skipped"),
    [
        ("skip", set(FINAL)),
        ("retry_failed", {"ok", "unsupported"}),
        ("rerun", set()),
    ],
)
def test_what_is_skipped(rule: OnExisting, skipped: set[str], made_record: Make, tmp_path: Path) -> None:
    records = [made_record(status, status=status) for status in (*FINAL, "interrupted")]
    for record in records:
        write(record, tmp_path)
    history = History.read(tmp_path)
    assert {r.status for r in records if history.skips(key(r), rule)} == skipped
    assert not history.skips(("another", 0, "hardware"), rule)


def test_a_result_of_other_hardware_or_another_trial_is_not_this_ones(made_record: Make, tmp_path: Path) -> None:
    """A CPU record must never mark a GPU cell done, nor one GPU model another's."""
    done = made_record("ok", trial=2, hardware="cuda-nvidia-a100")
    write(done, tmp_path)
    history = History.read(tmp_path)
    assert history.skips(key(done), "skip")
    for other in ((done.cell_id, 1, done.hardware), (done.cell_id, 2, "cuda-nvidia-h100"), (done.cell_id, 2, "cpu")):
        assert not history.skips(other, "skip")


@pytest.mark.parametrize("order", [("ok", "error"), ("error", "ok"), ("timeout", "interrupted"), ("oom", "error")])
def test_of_several_runs_an_ok_one_counts_or_the_last_that_ended(
    order: tuple[str, str], made_record: Make, tmp_path: Path
) -> None:
    for i, status in enumerate(order):
        write(made_record(f"run{i}", cell_id="one", status=status, started_at=f"2026-01-0{i + 1}T00:00:00"), tmp_path)
    (past,) = History.read(tmp_path).runs.values()
    assert past.status == {"ok": "ok", "timeout": "timeout"}.get(order[0], {"ok": "ok"}.get(order[1], order[1]))


def test_what_is_no_record_is_left_out(made_record: Make, tmp_path: Path) -> None:
    write(made_record("parity", kind="parity"), tmp_path)
    (records_dir(tmp_path) / "torn.json").write_text('{"kind": "cell"')
    (records_dir(tmp_path) / "list.json").write_text("[]")
    assert History.read(tmp_path).runs == {}
    assert History.read(tmp_path / "nothing here").runs == {}


def test_an_estimate_takes_the_nearest_that_is_known(made_record: Make, tmp_path: Path) -> None:
    def estimate(record: Record) -> float | None:
        return History.read(tmp_path).estimate_s(record.cell_id, record.factors, record.hardware)

    same = made_record("same", cell_id="one", wall_s=10.0)
    assert estimate(same) is None
    write(made_record("library", library="deepspeed", wall_s=40.0), tmp_path)
    assert estimate(same) == 40.0  # another library on the same workload
    write(made_record("stages", wall_s=20.0, factors={"stages": 4}), tmp_path)
    assert estimate(same) == 20.0  # the library itself
    write(same, tmp_path)
    write(made_record("failed", cell_id="one", wall_s=1.0, status="error"), tmp_path)
    assert estimate(same) == 10.0
    assert estimate(made_record("larger", factors={"batch_size": 64})) is None
    assert estimate(made_record("elsewhere", hardware="cuda-nvidia-a100")) is None


def test_it_reads_what_a_record_is_written_as(made_record: Make, tmp_path: Path) -> None:
    record = made_record("run", status="timeout", fail_phase="measure", fail_reason="why")
    write(record, tmp_path)
    past = History.read(tmp_path).runs[key(record)]
    data = to_json(record)
    assert (past.run_id, past.status, past.fail_phase, past.fail_reason, past.log, past.wall_s) == tuple(
        data[name] for name in ("run_id", "status", "fail_phase", "fail_reason", "log", "wall_s")
    )
    assert past.failed
