"""The launcher against real processes that fail in every way: who is blamed, how soon, and what is left."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bench.factors import Factors, Model
from bench.jobs import Job, Message
from bench.launch import Interrupted, Outcome, launch
from bench.registry import libraries
from bench.warm import fresh

STANDIN = Path(__file__).with_name("standin_worker.py")
GRACE_S = 0.4
OK = ["phase measure", "step 0", "result", "exit 0"]
STAY = ["phase measure", "sleep 60"]
RAISE = ["error ValueError: the cause", "exit 1"]
PEER = "RuntimeError: [/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"

Run = Callable[..., Outcome]


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _gone_within(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while any(map(_alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(_alive, pids))


def _pids(folder: Path) -> list[int]:
    return [int(p.name) for p in (folder / "pids").iterdir()]


def _job(folder: Path, ranks: int, timeout_s: float) -> Job:
    return Job(
        run_id="run",
        cell_id="cell",
        factors=Factors(
            library=libraries()["torch"],
            model=Model(name="resnet18", target="models.resnet.resnet18"),
            stages=ranks,
            device="cpu",
        ),
        partition=(1,) * ranks,
        world_size=ranks,
        warmup_steps=0,
        steps=1,
        device_indices=(),
        rendezvous=str(folder / "work" / "rendezvous"),
        cache_dir=str(folder),
        lock_paths=(),
        double_parity=False,
        timeout_s=timeout_s,
        parent_pid=os.getpid(),
    )


def launch_standins(
    folder: Path,
    *scripts: list[str],
    timeout_s: float = 20,
    wall_limit_s: float = 30,
    on_message: Callable[[Message], None] | None = None,
) -> Outcome:
    """Launch one stand-in a script."""
    for name in ("pids", "work"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "work" / "rendezvous").touch()
    return launch(
        _job(folder, len(scripts), timeout_s),
        folder / "log",
        wall_limit_s=wall_limit_s,
        environment={"STANDIN": json.dumps(scripts), "STANDIN_PIDS": str(folder / "pids")},
        on_message=on_message,
        start=functools.partial(fresh, worker=(str(STANDIN),)),
        grace_s=GRACE_S,
    )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Launch stand-ins; afterwards no process, file, descriptor or signal handler may be left."""
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    descriptors = set(os.listdir("/proc/self/fd"))
    yield lambda *scripts, **options: launch_standins(tmp_path, *scripts, **options)
    pids = _pids(tmp_path)
    assert pids
    assert _gone_within(pids, 2), "a process is left behind"
    assert list((tmp_path / "work").iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_ranks_that_finish_bring_their_results(run: Run, tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []
    outcome = run(
        ["print from rank 0", *OK], ["print from rank 1", *OK], on_message=lambda m: seen.append((m.rank, m.kind))
    )
    assert (outcome.status, outcome.fail_phase, outcome.fail_reason) == ("ok", "", "")
    assert [(r.rank, r.steps[0].time_s) for r in outcome.results] == [(0, 0.5), (1, 1.5)]
    assert sorted(seen) == [(rank, kind) for rank in (0, 1) for kind in ("phase", "result", "step")]
    assert sorted((tmp_path / "log").read_text().split("\n")) == ["", "from rank 0", "from rank 1"]


def test_more_than_a_pipe_holds_is_read_whole(run: Run) -> None:
    seen: list[Message] = []
    assert run(["large 500000", *OK], on_message=seen.append).status == "ok"
    assert [len(m.note) for m in seen if m.kind == "alive"] == [500_000]


FAULTS = {
    "raises": (
        [["phase warmup", f"error {PEER}", "exit 1"], ["phase warmup", "error ValueError: the cause", "exit 1"]],
        "error", "warmup", "rank 1 ValueError: the cause",
    ),
    "peer's symptom reported first": (
        [[f"error {PEER}", "exit 1"], ["phase parity", "sleep 0.2", "error ValueError: the cause", "exit 1"]],
        "error", "parity", "rank 1 ValueError: the cause",
    ),
    "peer complains in unknown words": (
        [["sleep 0.25", "error RuntimeError: communicator was aborted", "exit 1"], RAISE],
        "error", "build", "rank 1 ValueError: the cause",
    ),
    "raises and stays": (
        [STAY, ["phase measure", "error ValueError: the cause", "sleep 60"]],
        "error", "measure", "rank 1 ValueError: the cause",
    ),
    "out of memory": (
        [[f"error {PEER}", "exit 1"], ["phase memory", "oom RuntimeError: can't allocate memory", "exit 1"]],
        "oom", "memory", "rank 1 RuntimeError: can't allocate memory",
    ),
    "killed": (
        [["sleep 0.1", f"error {PEER}", "exit 1"], ["phase measure", "signal SIGKILL"]],
        "error", "measure", "rank 1 was killed by SIGKILL, perhaps by the kernel's out-of-memory killer",
    ),
    "killed, peer complains in unknown words": (
        [["sleep 0.25", "error RuntimeError: communicator was aborted", "exit 1"], ["signal SIGKILL"]],
        "error", "build", "rank 1 was killed by SIGKILL, perhaps by the kernel's out-of-memory killer",
    ),
    "killed, peer hangs": (
        [STAY, ["phase measure", "signal SIGKILL"]],
        "error", "measure", "rank 1 was killed by SIGKILL, perhaps by the kernel's out-of-memory killer",
    ),
    "aborts": (
        [STAY, ["phase warmup", "signal SIGABRT"]],
        "error", "warmup", "rank 1 was killed by SIGABRT",
    ),
    "aborts because its peer raised": (
        [["sleep 0.25", "signal SIGABRT"], ["error ValueError: the cause", "exit 1"]],
        "error", "build", "rank 1 ValueError: the cause",
    ),
    "killed after its result": (
        [OK, ["phase measure", "result", "signal SIGKILL"]],
        "error", "measure", "rank 1 was killed by SIGKILL, perhaps by the kernel's out-of-memory killer",
    ),
    "exits silently": (
        [STAY, ["phase build", "exit 0"]],
        "error", "build", "rank 1 exited with code 0 and without a result",
    ),
    "exits with a code": (
        [STAY, ["phase build", "exit 7"]],
        "error", "build", "rank 1 exited with code 7 without a word; its log has more",
    ),
    "only symptoms": (
        [[f"error {PEER}", "exit 1"], ["sleep 0.2", "error OSError: Broken pipe", "exit 1"]],
        "error", "build", f"rank 0 {PEER}",
    ),
    "writes what is no message": (
        [["phase build", "raw {half a mess\n", *STAY]],
        "error", "build", "rank 0 sent what is no message: b'{half a mess'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_ends_the_group_within_the_grace_and_names_its_cause(run: Run, fault: str) -> None:
    scripts, status, phase, reason = FAULTS[fault]
    start = time.monotonic()
    outcome = run(*scripts)
    assert (outcome.status, outcome.fail_phase, outcome.fail_reason) == (status, phase, reason)
    assert time.monotonic() - start < GRACE_S + 5


def test_a_stopped_rank_is_a_timeout_in_its_own_phase(run: Run) -> None:
    start = time.monotonic()
    outcome = run(["phase measure", "alive 0.5", *STAY], ["phase warmup", "signal SIGSTOP"], timeout_s=1)
    assert (outcome.status, outcome.fail_phase) == ("timeout", "warmup")
    assert outcome.fail_reason == "no report for timeout_s=1 s; silent longest: rank 1"
    assert 1.4 < time.monotonic() - start < 6


def test_slow_is_no_timeout_while_it_reports(run: Run) -> None:
    assert run(["alive 2.5", *OK], timeout_s=1.5).status == "ok"


def test_the_wall_limit_ends_a_cell_that_reports(run: Run) -> None:
    start = time.monotonic()
    outcome = run(["phase measure", "alive 60"], wall_limit_s=1)
    assert (outcome.status, outcome.fail_phase, outcome.fail_reason) == (
        "timeout", "measure", "longer than wall_limit_s=1 s",
    )  # fmt: skip
    assert 0.9 < time.monotonic() - start < 6


def test_waiting_for_the_device_does_not_count(run: Run) -> None:
    outcome = run(["waiting 2.5", *OK], wall_limit_s=1.5)
    assert outcome.status == "ok"
    assert 2.3 < outcome.waited_s < 3.5


def test_time_before_and_after_waiting_counts(run: Run) -> None:
    outcome = run(["alive 0.8", "waiting 1", "alive 60"], wall_limit_s=1.5)
    assert outcome.status == "timeout"
    assert 0.8 < outcome.waited_s < 2


def test_what_a_rank_started_is_ended_with_it(run: Run, tmp_path: Path) -> None:
    assert run(["child 60", *OK]).status == "ok"
    assert len(_pids(tmp_path)) == 2


def test_a_cell_that_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    (tmp_path / "work").mkdir()
    with pytest.raises(ValueError, match="null byte"):
        launch(_job(tmp_path, 2, 5), tmp_path / "log", wall_limit_s=5, start=functools.partial(fresh, worker=("a\0b",)))
    assert list((tmp_path / "work").iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_an_error_in_the_callback_ends_the_ranks(run: Run) -> None:
    def fails(message: Message) -> None:
        raise BrokenPipeError("nobody reads")

    with pytest.raises(BrokenPipeError, match="nobody reads"):
        run(STAY, STAY, on_message=fails)


def test_a_reason_is_told_where_the_log_cannot_be_written(tmp_path: Path) -> None:
    # The traceback used to be printed first, which on a full disk raised and lost the reason.
    (tmp_path / "work").mkdir()
    job = replace(_job(tmp_path, 1, 60), task="no_such.task")
    outcome = launch(job, Path("/dev/full"), wall_limit_s=60)
    reason = "rank 0 ModuleNotFoundError: No module named 'no_such'"
    assert (outcome.status, outcome.fail_phase, outcome.fail_reason) == ("error", "build", reason)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_and_is_passed_on(run: Run, number: signal.Signals) -> None:
    started = threading.Event()

    def interrupt() -> None:
        started.wait(20)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted) as caught:
        run(["phase warmup", "sleep 60"], on_message=lambda _: started.set())
    thread.join()
    assert caught.value.number == number
    outcome = caught.value.outcome
    assert (outcome.status, outcome.fail_phase, outcome.fail_reason) == (
        "interrupted", "warmup", f"ended by {number.name}",
    )  # fmt: skip


def test_ranks_die_with_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from test_launch import launch_standins, STAY\n"
        "launch_standins(pathlib.Path(sys.argv[1]), STAY, STAY)"
    )
    paths = os.pathsep.join([str(STANDIN.parent), str(STANDIN.parents[2])])
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": paths})
    try:
        end = time.monotonic() + 30
        while not (tmp_path / "pids").is_dir() or len(_pids(tmp_path)) < 2:
            assert parent.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        assert all(map(_alive, _pids(tmp_path)))
    finally:
        parent.kill()
        parent.wait()
    assert _gone_within(_pids(tmp_path), 5)


def test_what_a_rank_finds_in_its_environment(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With it one library leaves a file in /dev/shm for ever.
    monkeypatch.setenv("LOCAL_SIZE", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    find = [f"environment {tmp_path / 'found'}", *OK]
    assert run(find, find).status == "ok"
    found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in (0, 1)]
    for rank, variables in enumerate(found):
        assert variables["RANK"] == variables["LOCAL_RANK"] == str(rank)
        assert variables["WORLD_SIZE"] == "2"
        assert variables["OMP_NUM_THREADS"] == "1"
        assert variables["CUDA_VISIBLE_DEVICES"] == ""
        assert variables["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
        assert "LOCAL_SIZE" not in variables
    if len(os.sched_getaffinity(0)) >= 2:
        assert [len(f["cores"].split(",")) for f in found] == [1, 1]
        assert found[0]["cores"] != found[1]["cores"]
