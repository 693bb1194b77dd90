"""Ranks forked from a warm process are as good as fresh interpreters, and it never costs a cell that it is gone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.jobs import Message, to_json
from bench.launch import Outcome, launch
from bench.record import Record, load_all
from bench.registry import capabilities, libraries
from bench.warm import Warm
from tests.bench.test_launch import _job

pytestmark = pytest.mark.timeout(300)

PROJECT = Path(__file__).resolve().parents[2]
SMALL = [
    *("model=custom", "model.target=mine.build", "num_classes=10", "image_size=8", "batch_size=8", "device=cpu"),
    *("micro_batches=2", "warmup_steps=1", "steps=2", "baseline=false"),
]
LIBRARIES = sorted(libraries())
# What differs between two runs of the same cell.
TIMES = {"run_id", "started_at", "wall_s", "fixed_cost_s", "phases", "foreign_load", "log", "waited_s", "settings"}
# The trace's spans are times too; how often each kind is seen is test_trace's.
TIMES |= {"account", "stamp_cost_s", "trace"}


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text((PROJECT / "tests/bench/worker/tiny.py").read_text())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), str(folder)])}
    command = [sys.executable, "-m", "bench", "-m", *SMALL, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)


def without_times(record: Record) -> dict[str, Any]:
    data = {k: v for k, v in to_json(record).items() if k not in TIMES}
    data["environment"].pop("command")
    data["steps"] = [{k: v for k, v in step.items() if not k.endswith(("time_s", "times_s"))} for step in data["steps"]]
    return data


# One library in CI, the others where all tests are run.
@pytest.mark.parametrize(
    "library",
    [name if name == "torch" else pytest.param(name, marks=pytest.mark.slow) for name in LIBRARIES],
)
def test_the_record_is_the_same_as_of_fresh_interpreters(tmp_path: Path, library: str) -> None:
    # Several cells in a row, so that what one left behind would show in the next: losses after
    # momentum and dropout, peaks, parity.
    axes = [f"library={library}", "seed=0,1"]
    if capabilities(libraries()[library]).stages_are != "none":
        axes.append("stages=2")
    found = {}
    for preload in ("true", "false"):
        (tmp_path / preload).mkdir()
        done = bench(tmp_path / preload, *axes, f"preload={preload}")
        assert done.returncode == 0, done.stdout + done.stderr
        records, errors = load_all(tmp_path / preload / "results")
        assert not errors
        cells = [r for r in records if r.kind == "cell"]
        assert {r.status for r in cells} == {"ok"}
        assert len(cells) == 2
        found[preload] = {r.factors.seed: without_times(r) for r in cells}
    assert found["true"] == found["false"]


STANDIN_MODULE = """
import os, sys, time
from bench.jobs import Job
from pathlib import Path

def run_rank(job, rank, channel):
    channel.phase("measure")
    exec(Path("does.py").read_text())
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs a job of two ranks, each doing ``does`` (Python text), from a warm process."""
    (tmp_path / "standin.py").write_text(STANDIN_MODULE)
    monkeypatch.chdir(tmp_path)

    def run_once(
        warm: Warm, does: str, modules: tuple[str, ...] = (), on_message: Callable[[Message], None] | None = None
    ) -> Outcome:
        folder = tmp_path / f"job-{time.monotonic_ns()}"
        (folder / "work").mkdir(parents=True)
        (folder / "work" / "rendezvous").touch()
        (tmp_path / "does.py").write_text(does)
        job = dataclasses.replace(_job(folder, 2, 60), parent_pid=os.getpid())
        return launch(
            job,
            tmp_path / "log",
            wall_limit_s=60,
            on_message=on_message,
            start=warm.starter(("standin_hook", *modules)),
            grace_s=0.5,
        )

    # A module that the warm process imports and that puts the stand-in in the place of a cell.
    (tmp_path / "standin_hook.py").write_text(
        "import sys, standin, bench.worker\nsys.modules['bench.worker.cell'] = standin\nbench.worker.cell = standin\n"
    )
    return run_once


def ours() -> list[psutil.Process]:
    """Warm processes and ranks that are children of this one, or of those."""
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("raise ValueError('the cause') if rank else time.sleep(50)", "rank 1 ValueError: the cause"),
        ("os._exit(0) if rank else time.sleep(50)", "rank 1 exited with code 0 and without a result"),
        ("os._exit(7) if rank else time.sleep(50)", "rank 1 exited with code 7"),
        ("os.kill(os.getpid(), 9) if rank else time.sleep(50)", "rank 1 was killed by SIGKILL"),
        ("os.kill(os.getpid(), 11) if rank else time.sleep(50)", "rank 1 was killed by SIGSEGV"),
    ],
)
def test_a_forked_ranks_end_is_told_as_a_fresh_ones(run: Callable[..., Outcome], does: str, reason: str) -> None:
    with Warm() as warm:
        started = time.monotonic()
        outcome = run(warm, does)
        assert outcome.status == "error"
        assert reason in outcome.fail_reason
        assert outcome.fail_phase == "measure"
        # All ranks are gone, the warm process is there for the next cell.
        (left,) = ours()
        assert left.children() == []
        assert run(warm, "raise ValueError('again')").fail_reason.endswith("ValueError: again")
        assert ours() == [left]
        assert time.monotonic() - started < 45
    assert ours() == []


def test_a_warm_process_that_dies_is_an_error_of_the_cell_and_replaced_for_the_next(
    run: Callable[..., Outcome],
) -> None:
    with Warm() as warm:

        def kill(message: Message) -> None:
            if message.phase == "measure" and message.rank == 0:
                for process in psutil.Process().children():
                    process.kill()

        outcome = run(warm, "time.sleep(50)", on_message=kill)
        assert outcome.status == "error"
        assert "was killed by SIGKILL" in outcome.fail_reason
        assert run(warm, "raise ValueError('next')").fail_reason.endswith("ValueError: next")
    assert ours() == []


def test_what_must_not_be_forked_is_not(run: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    with Warm() as warm:
        # In a fresh interpreter there is no stand-in: the real cell fails on the made-up job.
        outcome = run(warm, "raise ValueError('forked')", modules=("threaded",))
        assert outcome.status == "error"
        assert "forked" not in outcome.fail_reason
    assert "in a fresh interpreter, since: the warm process has 2 threads" in (tmp_path / "log").read_text()


def test_nothing_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        (PROJECT / "tests/bench/worker/tiny.py").read_text()
        + "\n\nclass Slow(nn.Module):\n    def forward(self, x):\n"
        + "        import time\n\n        open('began', 'w').close()\n        time.sleep(60)\n"
        + "\n\ndef slow(num_classes):\n    return nn.Sequential(*build(num_classes), Slow())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), str(tmp_path)])}
    command = [sys.executable, "-m", "bench", *SMALL, "library=torch", "model.target=mine.slow"]
    parent = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "began").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        family = psutil.Process(parent.pid).children(recursive=True)
        assert family
        parent.send_signal(signal.SIGKILL)
        gone, alive = psutil.wait_procs(family, timeout=10)
        assert not alive
        assert gone
    finally:
        with contextlib.suppress(ProcessLookupError):
            parent.kill()
        parent.wait()
