"""Sweeps: order, what is skipped, what is said; and whole commands that are interrupted or killed."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from bench import claim, run
from bench import sweep as sweep_module
from bench.errors import UserError
from bench.expand import expand
from bench.history import History
from bench.jobs import Message, to_json
from bench.launch import Interrupted, launch
from bench.plan import Cell, plan
from bench.record import Record, load_all, write
from bench.run import bury_dead
from bench.sweep import _TimeLeft, _View, check_writable, sweep
from bench.warm import fresh

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OK = ["phase measure", "result"]
FAILS = ["phase warmup", "error ValueError: the cause", "exit 1"]

Expanded = tuple[list[Cell], Any]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, list[str]]], None]:
    """Sets what the ranks of each library do."""
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("STANDIN_PIDS", str(tmp_path / "pids"))
    worker = (str(HERE / "standin_worker.py"),)
    monkeypatch.setattr(run, "launch", functools.partial(launch, grace_s=0.3))
    monkeypatch.setattr(sweep_module, "fresh", functools.partial(fresh, worker=worker))
    return lambda does: monkeypatch.setenv("STANDIN", json.dumps({k: [v, v] for k, v in does.items()}))


def _expand(results: Path, *overrides: str) -> Expanded:
    given = ["batch_size=8", "micro_batches=4", "stages=2", "device=cpu", "baseline=false", "preload=false"]
    given.append(f"results_dir={results}")
    keys = {o.partition("=")[0] for o in overrides}
    expanded = expand([*overrides, *(g for g in given if g.partition("=")[0] not in keys)])
    return plan(replace(expanded, several=True)), expanded.settings


def _runs(results: Path) -> list[tuple[str, int, str]]:
    """(library, trial, status) of all cells' records in the order of their start."""
    records, errors = load_all(results)
    assert errors == []
    cells = sorted((r for r in records if r.kind == "cell"), key=lambda r: int(r.run_id.rpartition(".")[2]))
    return [(r.factors.library.name, r.trial, r.status) for r in cells]


Script = Callable[[dict[str, list[str]]], None]


def test_trials_are_outermost_and_a_failure_stops_nothing(
    script: Script, results: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script({"torch": FAILS, "ddp": OK})
    cells, settings = _expand(results, "library=torch,ddp", "trial=0,1")
    made = sweep(cells, settings)
    expected = [("torch", 0, "error"), ("ddp", 0, "ok"), ("torch", 1, "error"), ("ddp", 1, "ok")]
    assert _runs(results) == [(r.factors.library.name, r.trial, r.status) for r in made] == expected
    said = capfd.readouterr().out
    assert "[1/4] torch resnet18 stages=2 micro_batches=4 cpu trial=0" in said
    for record in made[::2]:
        log = results / record.log
        # Both ranks fail at the same moment, so either may be the first.
        assert re.search(rf"FAILED {record.run_id}: error in warmup: rank [01] ValueError: the cause; log: {log}", said)
        assert log.is_file()
    assert f"records: {results / 'records'}; CSVs: {results}" in said
    assert all((results / f"{name}.csv").is_file() for name in ("runs", "stages", "steps"))


def test_what_is_done_is_not_run_again_and_stands_in_the_table(
    script: Script, results: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script({"torch": FAILS, "ddp": OK})
    cells, settings = _expand(results, "library=torch,ddp")
    assert sweep(cells, settings).failed == 1
    capfd.readouterr()
    script({"torch": OK, "ddp": FAILS})
    again = sweep(cells, settings)
    assert (list(again), again.failed) == ([], 1)
    said = capfd.readouterr().out
    assert "2 runs were done already: 1 error, 1 ok" in said
    assert re.search(r"FAILED before torch\S+: error in warmup: rank [01] ValueError: the cause", said)
    assert "on_existing=retry_failed runs the failed ones again" in said
    again = sweep(cells, replace(settings, on_existing="retry_failed"))
    assert ([r.status for r in again], again.failed) == (["ok"], 0)
    assert _runs(results) == [("torch", 0, "error"), ("ddp", 0, "ok"), ("torch", 0, "ok")]
    said = capfd.readouterr().out
    assert "1 runs were done already: 1 ok" in said
    rows = [line for line in said.splitlines() if "│" in line]
    assert [sum(name in row for row in rows) for name in ("torch", "ddp")] == [1, 1]
    assert "FAILED" not in said
    again = sweep(cells, replace(settings, on_existing="rerun"))
    assert ([r.status for r in again], again.failed) == (["ok", "error"], 1)


def test_a_cell_that_cannot_run_gets_one_record_however_often_it_is_swept(script: Script, results: Path) -> None:
    script({"torch": OK})
    cells, settings = _expand(results, "library=deepspeed,torch", "checkpoint=except_last")
    sweep(cells, settings)
    sweep(cells, settings)
    assert sorted(_runs(results)) == [("deepspeed", 0, "unsupported"), ("torch", 0, "ok")]


def test_it_stops_at_a_failure_where_that_is_asked_for(
    script: Script, results: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script({"torch": FAILS, "ddp": OK})
    cells, settings = _expand(results, "library=ddp,torch,deepspeed", "on_error=stop", "trial=0,1")
    made = sweep(cells, settings)
    assert _runs(results) == [("ddp", 0, "ok"), ("torch", 0, "error")]
    assert (made.failed, made.left) == (1, 4)
    assert "4 runs were not made" in capfd.readouterr().out
    assert (results / "runs.csv").is_file()


def test_a_cell_alone_is_run_again(script: Script, results: Path) -> None:
    script({"torch": OK})
    cells, settings = _expand(results, "library=torch")
    sweep(cells, settings, alone=True)
    sweep(cells, settings, alone=True)
    assert _runs(results) == [("torch", 0, "ok")] * 2
    assert list(sweep(cells, settings)) == []  # as a sweep it is done


def test_a_cell_that_cannot_run_is_a_row_with_its_reason(
    script: Script, results: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script({"torch": OK})
    cells, settings = _expand(results, "library=deepspeed,torch", "checkpoint=except_last")
    made = sweep(cells, settings)
    assert [(r.factors.library.name, r.status) for r in made] == [("deepspeed", "unsupported"), ("torch", "ok")]
    assert made[0].fail_reason.startswith("checkpoint=except_last: ")
    assert "FAILED" not in capfd.readouterr().out


def test_a_cell_that_a_live_process_runs_is_skipped_and_named(
    script: Script, results: Path, capfd: pytest.CaptureFixture[str], made_record: Callable[..., Record]
) -> None:
    script({"torch": OK, "ddp": OK})
    cells, settings = _expand(results, "library=torch,ddp")
    parent = psutil.Process(os.getppid())
    theirs = claim.Claim.own("theirs", to_json(made_record("theirs")))
    theirs = replace(theirs, pid=parent.pid, process_started=parent.create_time())
    with claim.lock(results):
        claim.take(results, f"{cells[0].id}-t0-{cells[0].hardware}", theirs)
    assert [r.factors.library.name for r in sweep(cells, settings)] == ["ddp"]
    assert f"is being run by process {parent.pid}" in " ".join(capfd.readouterr().out.split())


def test_a_dead_claim_is_buried_and_named_first(
    script: Script, results: Path, capfd: pytest.CaptureFixture[str], made_record: Callable[..., Record]
) -> None:
    script({"torch": OK})
    cells, settings = _expand(results, "library=torch")
    died = replace(claim.Claim.own("died", to_json(made_record("died"))), process_started=1.0)
    with claim.lock(results):
        claim.take(results, "some-cell", died)
    sweep(cells, settings)
    assert "died: its process" in capfd.readouterr().err
    assert {r.run_id: r.status for r in load_all(results)[0]}["died"] == "interrupted"


def test_an_interrupted_sweep_ends_with_table_and_csvs(
    script: Script, results: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script({"torch": OK, "ddp": ["phase warmup", "sleep 60"], "deepspeed": OK})
    cells, settings = _expand(results, "library=torch,ddp,deepspeed")

    def interrupt(progress: _View, message: Message) -> None:
        if message.phase == "warmup":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(_View, "__call__", interrupt)
    with pytest.raises(Interrupted, match="SIGTERM"):
        sweep(cells, settings)
    assert _runs(results) == [("torch", 0, "ok"), ("ddp", 0, "interrupted")]
    said = capfd.readouterr().out
    # The phase is that of the rank furthest behind, which may not have got to the warm-up yet.
    assert re.search(r"FAILED ddp\S+: interrupted in (build|warmup): ended by SIGTERM", said)
    assert "ddp" in (results / "runs.csv").read_text()
    assert list((results / "claims").glob("*.json")) == []


def test_a_folder_that_cannot_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^results_dir=.*/file/results: cannot be written \(Not a directory\); "):
        check_writable(tmp_path / "file" / "results")
    check_writable(tmp_path / "new" / "results")
    assert list((tmp_path / "new" / "results" / "records").iterdir()) == []


def test_progress_follows_phases_and_steps_on_a_terminal_and_is_short_elsewhere() -> None:
    messages = [
        Message(kind="phase", rank=0, phase="warmup"),
        Message(kind="step", rank=0, phase="measure", index=4),
        Message(kind="phase", rank=1, phase="memory"),
        *[Message(kind="alive", rank=0, phase="warmup", note="waiting for the device", waiting=True)] * 2,
    ]
    screen = io.StringIO()
    with _View(Console(file=screen, force_terminal=True, width=100), 3) as view:
        view.begin("cell 1")
        shown = []
        for message in messages:
            view(message)
            shown.append(view.line.plain)
        view.end("ok in 3 s", "about 9 s left, 1 failed so far")
        view._live.refresh()  # type: ignore[union-attr]
    assert shown[:3] == ["cell 1: warmup", "cell 1: measure step 5", "cell 1: measure step 5"]
    assert shown[-1] == "cell 1: waiting for the device"
    assert "cell 1: ok in 3 s" in screen.getvalue()
    assert "1/3" in screen.getvalue()
    assert "1 failed so far" in screen.getvalue()
    out = io.StringIO()
    with _View(Console(file=out, width=100), 3) as view:
        view.begin("cell [1]")
        for message in messages:
            view(message)
        view.end("ok in 3 s", "about 9 s left")
    assert out.getvalue().splitlines() == ["cell [1]", "  waiting for the device", "  ok in 3 s, about 9 s left"]


def test_time_left_takes_what_is_known_and_else_what_was_just_seen(
    results: Path, made_record: Callable[..., Record]
) -> None:
    cells, _ = _expand(results, "library=torch,ddp,deepspeed", "micro_batches=4,8")
    known = made_record("known", cell_id=cells[-1].id, hardware=cells[-1].hardware, wall_s=500.0)
    known = replace(known, factors=cells[-1].factors)
    write(known, results)
    left = _TimeLeft(History.read(results), [(cell, 0) for cell in cells])
    assert left.after(None) == "about 42 min left"  # five more of the same workload
    unknown = _TimeLeft(History([]), [(cell, 0) for cell in cells])
    assert unknown.after(None) == ""
    assert unknown.after(10.0) == "about 40 s left"
    assert [unknown.after(20.0) for _ in range(4)][-1] == ""


# Whole commands, with the worker of the project on a small model of the user's own.


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``python -m bench`` as a user would, from a folder with a model of his own."""
    (tmp_path / "mine.py").write_text((HERE / "worker" / "tiny.py").read_text())
    started: list[subprocess.Popen[str]] = []

    def start(*overrides: str) -> subprocess.Popen[str]:
        command = [
            *(sys.executable, "-m", "bench", "model=custom", "model.target=mine.build", "device=cpu"),
            *("num_classes=10", "image_size=16", "batch_size=8", "micro_batches=2", "warmup_steps=1"),
            *("results_dir=results", *overrides),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _wait_for(what: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    end = time.monotonic() + 60
    while not (found := what()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def _workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The warm process and the two ranks that it forked, once they are there."""
    workers = [c for c in psutil.Process(process.pid).children(recursive=True) if "bench.worker.warm" in c.cmdline()]
    return workers if len(workers) == 3 else []


def _gone(processes: list[psutil.Process]) -> bool:
    # What survives does so for ever; what is killed may take seconds to go on a machine that is busy.
    return not psutil.wait_procs(processes, timeout=30)[1]


@pytest.mark.timeout(110)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_all_that_was_started_and_is_recorded(
    bench: Callable[..., subprocess.Popen[str]], results: Path, number: signal.Signals
) -> None:
    process = bench("library=torch", "stages=2", "steps=1000000")
    workers = _wait_for(lambda: _workers(process), process)
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number, said
    assert _gone(workers)
    assert _runs(results) == [("torch", 0, "interrupted")]
    assert list((results / "claims").glob("*.json")) == []
    assert f"interrupted by {number.name}" in said
    assert "Traceback" not in said


@pytest.mark.timeout(110)
def test_a_killed_command_leaves_no_process_and_its_run_is_recorded_by_the_next(
    bench: Callable[..., subprocess.Popen[str]], results: Path
) -> None:
    process = bench("library=torch", "stages=2", "steps=1000000")
    workers = _wait_for(lambda: _workers(process), process)
    process.kill()
    process.wait()
    assert _gone(workers)
    assert _runs(results) == []
    (buried,) = bury_dead(results)
    assert (buried.status, buried.factors.stages) == ("interrupted", 2)
    assert _runs(results) == [("torch", 0, "interrupted")]


@pytest.mark.timeout(110)
def test_a_cell_of_real_workers_is_measured_and_recorded(
    bench: Callable[..., subprocess.Popen[str]], results: Path
) -> None:
    process = bench("library=torch", "stages=2", "steps=3")
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 0, said
    (record,) = [r for r in load_all(results)[0] if r.kind == "cell"]
    assert (record.status, len(record.steps), len(record.stages)) == ("ok", 4, 2)
    assert record.parity is not None
    assert record.parity.passed
    assert record.parity_double is not None
    assert record.fixed_cost_s is not None
