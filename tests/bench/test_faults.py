"""Real faults in real cells of a three-layer model: what is recorded, what is left, and that a rerun completes it."""

from __future__ import annotations

import collections
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pandas as pd
import psutil
import pytest

from bench.record import Record, load_all

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PHASES = ("parity", "build", "warmup", "measure", "memory", "trace")
# What is recorded of each: status and reason, of the rank.  Of one that hangs, its peer may have been silent longer,
# having waited for it since its own last report.
SAID = {
    "kill": ("error", r"rank {rank} was killed by SIGKILL, perhaps by the kernel's out-of-memory killer"),
    "crash": ("error", r"rank {rank} was killed by SIGSEGV"),
    "allocator": ("oom", r"rank {rank} RuntimeError: .*can't allocate memory.*"),
    "limit": ("oom", r"rank {rank} MemoryError"),
    "hang": ("timeout", r"no report for timeout_s=8 s; silent longest: rank [01]"),
    "stop": ("timeout", r"no report for timeout_s=8 s; silent longest: rank [01]"),
    "raise": ("error", r"rank {rank} ValueError: the planted cause"),
    "silent": ("error", r"rank {rank} exited with code 0 and without a result"),
    "code": ("error", r"rank {rank} exited with code 3 without a word; its log has more"),
}
RANKS = {"torch": 2, "deepspeed": 2, "ddp": 2, "torchgpipe": 1, "fairscale": 1, "single": 1}


class User:
    """Someone with a model that does harm, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.results = folder, folder / "results"
        (folder / "faulty.py").write_text((HERE / "faulty.py").read_text())
        (folder / "tmp").mkdir()
        self.arm({})
        self.started: list[subprocess.Popen[str]] = []
        self.shared_before = set(os.listdir("/dev/shm"))

    def arm(self, faults: dict[int, str]) -> None:
        """From now on the cells with these seeds fail so, and no others."""
        (self.folder / "faults.json").write_text(json.dumps(faults))

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        """Start ``python -m bench -m``."""
        command = [
            *(sys.executable, "-m", "bench", "-m", "model=custom", "model.target=faulty.build", "device=cpu"),
            *("num_classes=4", "image_size=8", "batch_size=8", "micro_batches=2", "warmup_steps=1", "steps=2"),
            *("baseline=false", "results_dir=results", "timeout_s=8", *overrides),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder / "tmp"),
        }
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.started.append(process)
        return process

    def run(self, *overrides: str, code: int) -> str:
        """What it says; it must end with this code."""
        process = self.start(*overrides)
        said, _ = process.communicate(timeout=900)
        assert process.returncode == code, said
        return said

    def records(self) -> list[Record]:
        """The records of cells."""
        return [r for r in load_all(self.results)[0] if r.kind == "cell"]

    def check_nothing_is_left(self) -> None:
        """No process, shared memory, claim, half-written file or half row."""
        end = time.monotonic() + 30
        while (left := self._processes()) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left
        assert set(os.listdir("/dev/shm")) <= self.shared_before
        assert list((self.results / "claims").glob("*.json")) == []
        # A killed parent used to leave its ranks' meeting place there for ever.
        assert list((self.folder / "tmp").glob("bench-*")) == []
        assert [p for p in self.results.rglob("*") if p.suffix == ".tmp"] == []
        runs = pd.read_csv(self.results / "runs.csv")
        assert sorted(runs["run_id"]) == sorted(r.run_id for r in self.records())
        assert runs["status"].notna().all()
        steps = pd.read_csv(self.results / "steps.csv")
        measured = {r.run_id: len(r.steps) * len(r.steps[0].rank_times_s) for r in self.records() if r.steps}
        assert steps.groupby("run_id").size().to_dict() == measured

    def _processes(self) -> list[int]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.cwd() == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    """A user whose processes are ended afterwards."""
    made = User(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


def _strike(user: User, library: str, faults: Sequence[str]) -> list[Record]:
    """Cells with these faults between two good ones; each is checked, then all are completed."""
    first = 1 + max((r.factors.seed for r in user.records()), default=0)
    planned = dict(enumerate(faults, first + 1))
    seeds = range(first, first + len(faults) + 2)
    options = (f"library={library}", f"seed={','.join(map(str, seeds))}")
    user.arm(planned)
    before = {r.run_id for r in user.records()}
    user.run(*options, code=1)
    made = [r for r in user.records() if r.run_id not in before]
    found = {r.factors.seed: r for r in made}
    assert set(found) == set(seeds)
    assert [found[seed].status for seed in (seeds[0], seeds[-1])] == ["ok", "ok"]
    for seed, fault in planned.items():
        kind, phase, rank = fault.split("-")
        status, reason = SAID[kind]
        record = found[seed]
        assert (record.status, record.fail_phase) == (status, phase), (fault, record.fail_reason)
        assert re.fullmatch(reason.format(rank=rank), record.fail_reason), (fault, record.fail_reason)
        assert record.steps == ()
        assert (user.results / record.log).is_file()
    user.check_nothing_is_left()
    user.arm({})
    user.run(*options, "on_existing=retry_failed", code=0)
    done = before | {r.run_id for r in made}
    again = [r for r in user.records() if r.run_id not in done]
    assert sorted((r.factors.seed, r.status) for r in again) == [(seed, "ok") for seed in planned]
    assert {r.run_id for r in user.records()} >= done
    user.check_nothing_is_left()
    return made


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("library", "faults"),
    [
        (
            "torch",
            ("kill-parity-0", "kill-build-1", "kill-warmup-0", "kill-measure-1", "kill-memory-0", "kill-trace-1"),
        ),
        ("torch", ("allocator-measure-0", "limit-warmup-1", "hang-measure-1", "silent-measure-0", "raise-trace-1")),
        ("deepspeed", ("kill-measure-0", "raise-warmup-1")),
        ("torchgpipe", ("raise-measure-0", "silent-build-0")),
    ],
)
def test_each_fault_is_recorded_with_its_cause_and_completed_later(
    user: User, library: str, faults: tuple[str, ...]
) -> None:
    (user.results / "records").mkdir(parents=True)
    (user.results / "records" / "foreign.json").write_text('{"schema_version": 1, "run_id": 3}')
    (user.results / "records" / "cut.json").write_text('{"schema_version": 1, "run')
    _strike(user, library, faults)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_soak(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    """200 faults; the seed makes them the same each time."""
    rng = random.Random(20261205)
    start, kinds = time.monotonic(), collections.Counter[str]()
    plan = [("torch", 20)] * 5 + [("deepspeed", 20), ("ddp", 20), ("torchgpipe", 20), ("fairscale", 20), ("single", 20)]
    for library, count in plan:
        faults = [f"{kind}-{phase}-{rank}" for kind in SAID for phase in PHASES for rank in range(RANKS[library])]
        rng.shuffle(faults)
        _strike(user, library, faults[:count])
        kinds.update(fault.partition("-")[0] for fault in faults[:count])
    seconds = time.monotonic() - start
    with capsys.disabled():
        print(f"\n{sum(kinds.values())} faults in {seconds:.0f} s: {dict(sorted(kinds.items()))}")
    assert sum(kinds.values()) >= 200


def _wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("number", "phase"),
    [(signal.SIGKILL, "parity"), (signal.SIGKILL, "measure"), (signal.SIGTERM, "warmup"), (signal.SIGTERM, "trace")],
)
def test_the_parent_is_ended_in_a_phase(user: User, number: signal.Signals, phase: str) -> None:
    user.arm({1: f"wait-{phase}-1"})
    process = user.start("library=torch", "seed=1", "timeout_s=60")
    _wait_for((user.folder / "reached").exists, process)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    user.arm({})
    user.run("library=torch", "seed=1", code=0)
    found = {r.status: r for r in user.records()}
    assert set(found) == {"interrupted", "ok"}
    if number == signal.SIGKILL:
        assert re.fullmatch(r"its process \d+ on \S+ is gone without a record", found["interrupted"].fail_reason)
    else:
        assert (found["interrupted"].fail_reason, found["interrupted"].fail_phase) == ("ended by SIGTERM", phase)
    user.check_nothing_is_left()


@pytest.mark.timeout(200)
def test_two_sweeps_in_one_folder_make_each_run_once(user: User) -> None:
    # The second sweep used to make again what the first had made after both had begun.
    options = ("library=torch", "seed=1,2,3,4")
    processes = [user.start(*options), user.start(*options)]
    said = [p.communicate(timeout=150)[0] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], said
    assert sorted(r.factors.seed for r in user.records()) == [1, 2, 3, 4]
    assert {r.status for r in user.records()} == {"ok"}
    user.check_nothing_is_left()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("phase", ["warmup", "trace"])
def test_a_disk_that_fills_up_loses_no_row(user: User, phase: str) -> None:
    # The record used to be lost, with the claim left behind, when there was no byte left for it.
    user.results.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(user.results)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no small file system: {done.stderr.strip()}")
    try:
        user.arm({2: f"fill-{phase}-1"})
        options = ("library=torch", "seed=1,2,3")
        said = user.run(*options, code=1)
        assert "No space left on device; what is recorded there stays: make room" in said
        assert "Traceback" not in said
        found = {r.factors.seed: r for r in user.records()}
        assert set(found) == {1, 2}
        full = found[2]
        assert (found[1].status, full.status) == ("ok", "error")
        assert re.search("No space left on device", full.fail_reason)
        assert list((user.results / "claims").glob("*.json")) == []
        (user.results / "filler").unlink()
        user.arm({})
        user.run(*options, "on_existing=retry_failed", code=0)
        assert collections.Counter(r.status for r in user.records()) == {"ok": 3, "error": 1}
        user.check_nothing_is_left()
    finally:
        subprocess.run(["umount", "-l", str(user.results)], check=True)
