"""The run of a cell by real processes that stand in for the worker: there is always a record, and no claim is left."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import claim, run
from bench.expand import expand
from bench.hardware import Gpu
from bench.history import History
from bench.jobs import Job, Message, ParityResult, to_json
from bench.launch import launch
from bench.plan import Cell, plan
from bench.record import Record, load, load_all, records_dir
from bench.run import Busy, bury_dead, run_cell, unsupported
from bench.warm import fresh

STANDIN = Path(__file__).with_name("standin_worker.py")
OK = ["phase measure", "result"]
PASSED = ParityResult(
    precision="fp64",
    batch_size=8,
    steps=3,
    gradient_error=1e-16,
    gradient_layer=3,
    gradient_tolerance=1e-10,
    update_error=2e-16,
    update_layer=4,
    update_tolerance=1e-10,
    buffer_error=0.0,
    dropout_off=True,
    reference_device="cpu",
    passed=True,
)
FAILED = replace(PASSED, gradient_error=0.5, passed=False)
SAID = "gradient of layer 3 differs by 0.5 (allowed 1e-10), update of layer 4 by 2e-16 (allowed 1e-10)"

Script = Callable[..., None]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """Sets what the ranks do; afterwards no claim and no temporary folder may be left."""
    for name in ("pids", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("STANDIN_PIDS", str(tmp_path / "pids"))
    monkeypatch.setattr(run, "launch", functools.partial(launch, grace_s=0.3))
    monkeypatch.setattr(run, "fresh", functools.partial(fresh, worker=(str(STANDIN),)))

    def set_scripts(*scripts: list[str]) -> None:
        monkeypatch.setenv("STANDIN", json.dumps(scripts))

    yield set_scripts
    assert list((tmp_path / "tmp").iterdir()) == []
    assert list((tmp_path / "results" / "claims").glob("*.json")) == []


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., tuple[Cell, Any]]:
    """Makes a cell, and its settings, of two stages from overrides."""

    def make(*overrides: str) -> tuple[Cell, Any]:
        own = {o.partition("=")[0] for o in overrides}
        given = {"library": "torch", "stages": 2, "batch_size": 16, "device": "cpu", "baseline": "false"}
        rest = [f"{k}={v}" for k, v in given.items() if k not in own]
        sweep = expand([*overrides, *rest, f"results_dir={tmp_path / 'results'}"])
        return plan(replace(sweep, several=True))[0], sweep.settings

    return make


Make = Callable[..., tuple[Cell, Any]]


def _result(**fields: Any) -> str:
    plain = {k: to_json(v) if isinstance(v, ParityResult) else v for k, v in fields.items()}
    return f"result {json.dumps(plain)}"


def _records(settings: Any) -> list[Record]:
    records, errors = load_all(settings.results_dir)
    assert errors == []
    return records


def test_a_record_holds_the_slowest_rank_and_all_stages_in_order(script: Script, made: Make) -> None:
    cell, settings = made()
    stage = {"device": "cpu", "layers": [0], "parameters": 1, "parameter_bytes": 4, "dtype": "float32"}
    for_rank = [
        {
            "steps": [{"index": i, "warmup": i == 0, "time_s": t[rank], "loss": loss} for i, t in enumerate(times)],
            "stages": [{"stage": 1 - rank, "rank": rank, **stage}],
            "phases": {"build": 1.0 + rank, "parity": 2.0 - rank},
            "read_back": {"schedule": "1f1b", "forwards": {str(1 - rank): 4}},
            "stepping_s": 0.25,
            "foreign_load": 0.5,
        }
        for times in [[(0.9, 0.8), (0.1, 0.2)]]
        for rank, loss in ((0, None), (1, 2.5))
    ]
    script(*(["phase measure", "sleep 0.3", _result(**fields)] for fields in for_rank))
    record = run_cell(cell, settings, 3)
    assert load(records_dir(settings.results_dir) / f"{record.run_id}.json") == record
    assert (record.kind, record.status, record.trial, record.cell_id) == ("cell", "ok", 3, cell.id)
    assert [(s.warmup, s.time_s, s.rank_times_s, s.loss) for s in record.steps] == [
        (True, 0.9, (0.9, 0.8), 2.5),
        (False, 0.2, (0.1, 0.2), 2.5),
    ]
    assert [(s.stage, s.rank) for s in record.stages] == [(0, 1), (1, 0)]
    assert record.phases == {"build": 2.0, "parity": 2.0}
    assert record.resolved == {"schedule": "1f1b", "forwards": {"0": 4, "1": 4}}
    assert record.foreign_load == 0.5
    assert record.wall_s is not None
    assert record.wall_s > 0.3
    assert record.fixed_cost_s == pytest.approx(record.wall_s - 0.25)
    assert (settings.results_dir / record.log).is_file()
    assert _statuses(settings) == {(cell.id, 3, cell.hardware): "ok"}


def _statuses(settings: Any) -> dict[tuple[str, int, str], str]:
    return {key: past.status for key, past in History.read(settings.results_dir).runs.items()}


def test_two_runs_in_one_second_are_two_records(script: Script, made: Make) -> None:
    cell, settings = made()
    script(OK, OK)
    first, second = run_cell(cell, settings, 0), run_cell(cell, settings, 0)
    assert {r.run_id for r in _records(settings)} == {first.run_id, second.run_id}
    assert first.log != second.log


def test_waiting_for_the_device_is_no_cost_of_the_cell(script: Script, made: Make) -> None:
    cell, settings = made()
    script(["waiting 1", *OK], OK)
    record = run_cell(cell, settings, 0)
    assert record.waited_s > 0.8
    assert record.fixed_cost_s is not None
    assert record.fixed_cost_s < 0.9


def test_a_failed_run_is_a_record_with_phase_reason_and_log(script: Script, made: Make) -> None:
    cell, settings = made()
    script(["phase parity", "print traceback here", "oom RuntimeError: out of memory", "exit 1"], OK)
    record = run_cell(cell, settings, 0)
    assert _records(settings) == [record]
    assert (record.status, record.fail_phase, record.fail_reason) == (
        "oom", "parity", "rank 0 RuntimeError: out of memory",
    )  # fmt: skip
    assert "traceback here" in (settings.results_dir / record.log).read_text()
    assert (record.steps, record.fixed_cost_s) == ((), None)
    assert "ok" not in _statuses(settings).values()


@pytest.mark.parametrize("part", ["a", "b"])
def test_work_that_is_not_equal_is_no_result(script: Script, made: Make, part: str) -> None:
    cell, settings = made()
    script(*2 * [[_result(**{"parity" if part == "a" else "parity_double": FAILED})]])
    record = run_cell(cell, settings, 0)
    assert (record.status, record.fail_phase, record.steps) == ("parity_failed", "parity", ())
    assert record.fail_reason == f"parity ({part}) in fp64: {SAID}"
    assert "ok" not in _statuses(settings).values()


def _double_asked(script: Script, path: Path, *actions: str) -> Callable[[], bool]:
    rank = [f"job {path}", *actions]
    script(rank, rank)
    return lambda: Job.loads(path.read_text()).double_parity


def test_float64_parity_runs_once_and_stands_in_all_records_it_speaks_for(
    script: Script, made: Make, tmp_path: Path
) -> None:
    asked = _double_asked(script, tmp_path / "job", _result(parity_double=PASSED))
    cell, settings = made()
    first = run_cell(cell, settings, 0)
    assert asked()
    own = load(records_dir(settings.results_dir) / f"{first.parity_double_run}.json")
    assert (own.kind, own.status, own.run_id) == ("parity", "ok", first.parity_double_run)
    assert (own.parity_double, own.steps, own.wall_s) == (PASSED, (), None)
    assert _statuses(settings) == {(cell.id, 0, cell.hardware): "ok"}

    asked = _double_asked(script, tmp_path / "job", "result")
    other, _ = made("batch_size=32")
    assert other.id != cell.id
    second = run_cell(other, settings, 0)
    assert not asked()
    assert (second.parity_double, second.parity_double_run) == (PASSED, first.parity_double_run)

    for change in ("micro_batches=8", "checkpoint=always", "schedule=gpipe", "seed=1", "image_size=32"):
        run_cell(made(change)[0], settings, 0)
        assert asked(), change
    cut, _ = made("balance=manual", "balance.layers=[1,14]")
    assert cut.partition != cell.partition
    run_cell(cut, settings, 0)
    assert asked()


def test_a_float64_parity_that_failed_fails_all_cells_it_speaks_for(script: Script, made: Make) -> None:
    cell, settings = made()
    script(*2 * [[_result(parity_double=FAILED)]])
    first = run_cell(cell, settings, 0)
    own = load(records_dir(settings.results_dir) / f"{first.parity_double_run}.json")
    assert (own.status, own.fail_reason) == ("parity_failed", f"parity (b) in fp64: {SAID}")
    script(OK, OK)
    second = run_cell(made("batch_size=32")[0], settings, 0)
    assert (second.status, second.fail_reason) == ("parity_failed", f"parity (b) in fp64: {SAID}")


def test_a_float64_parity_that_passed_is_no_failure_where_the_cell_failed_its_own(script: Script, made: Make) -> None:
    cell, settings = made()
    script(*2 * [[_result(parity=replace(FAILED, precision="fp32"), parity_double=PASSED)]])
    record = run_cell(cell, settings, 0)
    assert record.fail_reason == f"parity (a) in fp32: {SAID}"
    own = load(records_dir(settings.results_dir) / f"{record.parity_double_run}.json")
    assert (own.status, own.fail_phase, own.fail_reason) == ("ok", "", "")


@pytest.mark.parametrize(
    ("error", "status"), [(BrokenPipeError("nobody reads"), "error"), (KeyboardInterrupt(), "interrupted")]
)
def test_an_error_of_the_harness_itself_is_recorded_and_passed_on(
    script: Script, made: Make, error: BaseException, status: str
) -> None:
    def fails(message: Message) -> None:
        raise error

    cell, settings = made()
    script(["phase build", "sleep 60"], ["sleep 60"])
    with pytest.raises(type(error)):
        run_cell(cell, settings, 0, fails)
    (record,) = _records(settings)
    assert (record.status, record.cell_id) == (status, cell.id)
    assert type(error).__name__ in record.fail_reason


def _claim(cell: Cell, settings: Any, run_id: str, record: Record, **fields: Any) -> None:
    own = replace(claim.Claim.own(run_id, to_json(replace(record, run_id=run_id))), **fields)
    with claim.lock(settings.results_dir):
        assert claim.take(settings.results_dir, f"{cell.id}-t0-{cell.hardware}", own) is None


def test_a_cell_that_another_process_runs_is_left_to_it(script: Script, made: Make) -> None:
    cell, settings = made()
    script(OK, OK)
    record = run_cell(cell, settings, 1)
    parent = psutil.Process(os.getppid())
    _claim(cell, settings, "theirs", record, pid=parent.pid, process_started=parent.create_time())
    with pytest.raises(Busy, match=rf"is being run by process {parent.pid} on .*; if it is gone, remove .*json"):
        run_cell(cell, settings, 0)
    assert run_cell(cell, settings, 2).status == "ok"
    assert sorted(r.trial for r in _records(settings)) == [1, 2]
    claim.release(settings.results_dir, f"{cell.id}-t0-{cell.hardware}")


@pytest.mark.parametrize("how", ["before a sweep", "by the next run of the cell"])
def test_a_dead_claim_becomes_an_interrupted_record(script: Script, made: Make, how: str) -> None:
    cell, settings = made()
    script(OK, OK)
    record = run_cell(cell, settings, 1)
    _claim(cell, settings, "died", record, process_started=1.0)
    if how == "before a sweep":
        assert [r.run_id for r in bury_dead(settings.results_dir)] == ["died"]
        assert bury_dead(settings.results_dir) == []
    else:
        assert run_cell(cell, settings, 0).status == "ok"
    died = load(records_dir(settings.results_dir) / "died.json")
    assert died.status == "interrupted"
    assert died.fail_reason == f"its process {os.getpid()} on {claim.Claim.own('', {}).host} is gone without a record"
    assert died.cell_id == cell.id


def test_a_record_that_was_written_is_not_replaced_by_its_dead_claim(script: Script, made: Make) -> None:
    cell, settings = made()
    script(OK, OK)
    record = run_cell(cell, settings, 0)
    _claim(cell, settings, record.run_id, record, process_started=1.0)
    assert bury_dead(settings.results_dir) == []
    assert _records(settings) == [record]


def test_an_unsupported_cell_is_a_record_with_its_reason(made: Make) -> None:
    cell, settings = made("library=deepspeed,torch", "checkpoint=except_last,never", "device=cpu")
    assert cell.reason
    record = unsupported(cell, settings, 0)
    assert _records(settings) == [record]
    assert (record.status, record.fail_phase, record.fail_reason, record.log) == (
        "unsupported", "plan", cell.reason, "",
    )  # fmt: skip


def test_stages_go_to_the_gpus_in_the_order_given(
    script: Script, made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = tuple(
        Gpu(index=i, uuid=f"GPU-{i}", name="made up", pci_address=f"0:{i}", memory_bytes=1, driver="1")
        for i in range(3)
    )
    monkeypatch.setattr(run, "visible_gpus", lambda: gpus)
    cell, settings = made()
    on_gpus = replace(cell, factors=cell.factors.replace(device="cuda"), hardware="cuda-made-up")
    rank = [f"job {tmp_path / 'job'}", f"environment {tmp_path / 'found'}", "result"]

    def job(**changes: Any) -> Job:
        script(rank, rank)
        record = run_cell(on_gpus, replace(settings, **changes), 0)
        found = Job.loads((tmp_path / "job").read_text())
        assert record.status == "ok"
        assert [g["index"] for g in record.environment["gpus"]] == list(found.device_indices)
        return found

    assert job().device_indices == (0, 1)
    chosen = job(devices=(2, 0))
    assert chosen.device_indices == (2, 0)
    assert [Path(p).name for p in chosen.lock_paths] == ["GPU-0.lock", "GPU-2.lock"]
    found = [json.loads((tmp_path / f"found.{r}").read_text()) for r in (0, 1)]
    assert [f["LOCAL_RANK"] for f in found] == ["2", "0"]
    assert job(devices=(1,)).device_indices == (1, 1)
