"""Claims judged against real processes: alive, killed, zombies, and ids that were given again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from bench.claim import Claim, claims_dir, dead, lock, release, take

CLAIMER = """
import sys, time
from pathlib import Path
from bench.claim import Claim, lock, take
results, name = Path(sys.argv[1]), sys.argv[2]
with lock(results):
    holder = take(results, name, Claim.own("run", {}))
print("mine" if holder is None else holder.pid, flush=True)
time.sleep(60)
"""
ROOT = Path(__file__).parents[2]

Claimer = Callable[[Path], "subprocess.Popen[str]"]


@pytest.fixture
def claimer() -> Iterator[Claimer]:
    """Starts processes that try to take the claim ``cell`` and stay."""
    started: list[subprocess.Popen[str]] = []

    def start(results_dir: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CLAIMER, str(results_dir), "cell"]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_live_claim_holds_and_names_its_process(claimer: Claimer, tmp_path: Path) -> None:
    process = claimer(tmp_path)
    assert _said(process) == "mine"
    with lock(tmp_path):
        holder = take(tmp_path, "cell", Claim.own("other", {}))
        assert dead(tmp_path) == []
        assert take(tmp_path, "another-cell", Claim.own("other", {})) is None
    assert holder is not None
    assert (holder.pid, holder.run_id) == (process.pid, "run")


def test_of_many_that_race_one_gets_the_claim(claimer: Claimer, tmp_path: Path) -> None:
    racers = [claimer(tmp_path) for _ in range(6)]
    said = [_said(process) for process in racers]
    winner = racers[said.index("mine")]
    assert sorted(said) == sorted(["mine", *[str(winner.pid)] * 5])


@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
def test_a_killed_process_claims_nothing(claimer: Claimer, tmp_path: Path, reaped: bool) -> None:
    process = claimer(tmp_path)
    assert _said(process) == "mine"
    process.send_signal(signal.SIGKILL)
    if reaped:
        process.wait()
    else:
        end = time.monotonic() + 10
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end
            time.sleep(0.02)
    with lock(tmp_path):
        assert [(name, claim.pid) for name, claim in dead(tmp_path)] == [("cell", process.pid)]
        assert take(tmp_path, "cell", Claim.own("next", {})) is None
        assert dead(tmp_path) == []


def test_what_the_same_process_id_means() -> None:
    own = Claim.own("run", {})
    assert own.alive()
    assert not replace(own, process_started=own.process_started - 100).alive(), "the id was given again"
    assert not replace(own, boot_id="before the restart").alive()
    assert replace(own, host="another host", pid=2**22 + 1).alive(), "cannot be judged from here"


def test_a_claim_is_whole_or_not_there_and_goes_with_release(tmp_path: Path) -> None:
    own = Claim.own("run", {"status": "interrupted"})
    with lock(tmp_path):
        assert take(tmp_path, "cell", own) is None
        path = claims_dir(tmp_path) / "cell.json"
        assert json.loads(path.read_text()) == asdict(own)
        release(tmp_path, "cell")
        release(tmp_path, "cell")
    assert [p.name for p in claims_dir(tmp_path).iterdir() if p.name != ".lock"] == []


def test_a_file_that_is_no_claim_stands_in_nobodys_way(tmp_path: Path) -> None:
    with lock(tmp_path):
        (claims_dir(tmp_path) / "cell.json").write_text('{"pid": 1')
        assert dead(tmp_path) == []
        assert take(tmp_path, "cell", Claim.own("run", {})) is None
