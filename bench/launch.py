"""One process group for one cell: started, watched and ended by a parent that never imports torch."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from bench.jobs import Job, Message, RankResult, Status, rank_result_from_json
from bench.warm import Process, Start, fresh

__all__ = ["Interrupted", "Outcome", "launch", "pin"]

GRACE_S = 3.0
POLL_S = 0.05
KILL_S = 10.0
PROJECT = Path(__file__).resolve().parent.parent

# What a rank reports when it only suffers another's end.
_SYMPTOMS = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "connection refused",
    "timed out waiting",
    "application timeout caused pair closure",
    "ncclremoteerror",
    "socket closed",
    "failed to recv",
    "connectfullmesh",
)


class Interrupted(Exception):
    """A signal that asks this process to end came while a cell ran; ``outcome`` is that cell's."""

    def __init__(self, number: int, outcome: Outcome) -> None:
        super().__init__(signal.Signals(number).name)
        self.number, self.outcome = number, outcome


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a process group ended.  ``waited_s``: time spent waiting for the device lock."""

    status: Status
    fail_phase: str = ""
    fail_reason: str = ""
    results: tuple[RankResult, ...] = ()
    waited_s: float = 0.0


@dataclass(kw_only=True)
class _Rank:
    """A started rank.  ``closed``, ``failed``: the turn of the watch in which its pipe ended and it failed."""

    number: int
    process: Process
    pipe: int
    buffer: bytes = b""
    phase: str = "build"
    result: RankResult | None = None
    error: Message | None = None
    code: int | None = None
    last_report: float = field(default_factory=time.monotonic)
    closed: int | None = None
    failed: int | None = None

    def note_failure(self, turn: int) -> None:
        """Remember when it failed, if it has: a death ends the pipe before the process is seen to be gone."""
        gone_without_result = self.code == 0 and self.result is None
        if self.failed is None and (self.error is not None or self.code or gone_without_result):
            self.failed = turn if self.closed is None else self.closed


@dataclass(kw_only=True)
class _Watch:
    """The clocks of a cell: silence, wall limit, and the waiting that does not count."""

    started: float = field(default_factory=time.monotonic)
    last_report: float = field(default_factory=time.monotonic)
    waiting_since: float | None = None
    waited_s: float = 0.0

    def report(self, waiting: bool) -> None:
        now = time.monotonic()
        self.last_report = now
        if self.waiting_since is not None:
            self.waited_s += now - self.waiting_since
        self.waiting_since = now if waiting else None

    def running_s(self) -> float:
        now = time.monotonic()
        waiting = now - self.waiting_since if self.waiting_since is not None else 0.0
        return now - self.started - self.waited_s - waiting


def launch(
    job: Job,
    log: Path,
    *,
    wall_limit_s: float,
    environment: Mapping[str, str] | None = None,
    on_message: Callable[[Message], None] | None = None,
    start: Start = fresh,
    others: Sequence[Start] = (),
    grace_s: float = GRACE_S,
) -> Outcome:
    """Run a cell's ranks to their end, whatever it is, and leave none of them behind.

    ``start`` starts those of this node, ``others`` those of the job's other nodes, in order.
    All output of the ranks goes to ``log``.  SIGINT and SIGTERM end the ranks and raise
    ``Interrupted``.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    job_file = Path(job.rendezvous).with_suffix(".job.json")
    job_file.write_text(job.dumps())
    ranks: list[_Rank] = []
    caught: list[int] = []
    handlers = {
        number: signal.signal(number, lambda n, _: caught.append(n)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    watch = _Watch()
    try:
        with open(log, "ab") as output:
            for number in range(job.world_size):
                ranks.append(_start(job, job_file, number, output, environment or {}, (start, *others)))
        verdict = _watch(job, ranks, watch, caught, wall_limit_s, on_message, grace_s)
    finally:
        _end(ranks)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        job_file.unlink(missing_ok=True)
        Path(job.rendezvous).unlink(missing_ok=True)
    outcome = verdict or _judge(ranks)
    outcome = Outcome(
        status=outcome.status,
        fail_phase=outcome.fail_phase,
        fail_reason=outcome.fail_reason,
        results=tuple(r.result for r in ranks if r.result is not None),
        waited_s=watch.waited_s,
    )
    if caught:
        raise Interrupted(caught[0], outcome)
    return outcome


def _start(
    job: Job, job_file: Path, number: int, output: IO[bytes], environment: Mapping[str, str], starts: Sequence[Start]
) -> _Rank:
    node, local = divmod(number, job.world_size // job.nodes)
    reading, writing = os.pipe()
    cuda = job.factors.device == "cuda"
    variables = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        # The worker imports the same bench, and the user's own modules from where the user stands.
        "PYTHONPATH": os.pathsep.join(
            dict.fromkeys(p for p in [str(PROJECT), os.environ.get("PYTHONPATH", ""), os.getcwd()] if p)
        ),
        "PYTHONSAFEPATH": "1",
        "RANK": str(number),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_RANK": str(job.device_indices[number] if cuda and job.device_indices else local),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        **environment,
    }
    if job.nodes > 1 and (interface := os.environ.get("GLOO_SOCKET_IFNAME", job.interface)):
        variables["GLOO_SOCKET_IFNAME"] = interface
    if not cuda:
        variables |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if job.factors.share_devices:
        variables["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    try:
        process = starts[node]([str(job_file), str(number)], variables, output, writing)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    os.set_blocking(reading, False)
    if node == 0:
        pin(process.pid, job, local)
    return _Rank(number=number, process=process, pipe=reading)


def pin(pid: int, job: Job, local: int) -> None:
    """Give the ``local``-th rank of this node its core; where all stages run in one process, one for each of them."""
    cores = sorted(os.sched_getaffinity(0))
    stages = job.factors.stages // job.nodes
    if job.factors.device == "cuda" or len(cores) < stages:
        return
    mine = {cores[local]} if job.world_size > 1 else set(cores[:stages])
    with contextlib.suppress(ProcessLookupError):  # gone already, which the watch will see
        os.sched_setaffinity(pid, mine)


def _watch(
    job: Job,
    ranks: list[_Rank],
    watch: _Watch,
    caught: list[int],
    wall_limit_s: float,
    on_message: Callable[[Message], None] | None,
    grace_s: float,
) -> Outcome | None:
    """Until all ranks are gone or a limit is reached; None where the ranks' own end is the verdict."""
    failed_since: float | None = None
    turn = 0
    watch.last_report = time.monotonic()  # nobody can report while a library is imported for the first cell of a sweep
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        while any(rank.code is None for rank in ranks):
            turn += 1
            for key, _ in selector.select(POLL_S):
                if not _read(key.data, watch, on_message):
                    selector.unregister(key.fd)
                    key.data.closed = turn
            for rank in ranks:
                if rank.code is None and (code := rank.process.poll()) is not None:
                    rank.code = code
                    _read(rank, watch, on_message)  # what it wrote since, its result perhaps
                rank.note_failure(turn)
            behind = min(ranks, key=lambda r: (r.result is not None, r.last_report))
            if caught:
                name = signal.Signals(caught[0]).name
                return Outcome(status="interrupted", fail_phase=behind.phase, fail_reason=f"ended by {name}")
            if failed_since is None and any(r.failed is not None for r in ranks):
                failed_since = time.monotonic()
            if failed_since is not None and time.monotonic() - failed_since > grace_s:
                break
            if time.monotonic() - watch.last_report > job.timeout_s and failed_since is None:
                reason = f"no report for timeout_s={job.timeout_s:g} s; silent longest: rank {behind.number}"
                return Outcome(status="timeout", fail_phase=behind.phase, fail_reason=reason)
            if watch.running_s() > wall_limit_s:
                reason = f"longer than wall_limit_s={wall_limit_s:g} s"
                return Outcome(status="timeout", fail_phase=behind.phase, fail_reason=reason)
        for rank in ranks:
            _read(rank, watch, on_message)
            rank.note_failure(turn)
    return None


def _read(rank: _Rank, watch: _Watch, on_message: Callable[[Message], None] | None) -> bool:
    """Take in what the rank has written; False once it has closed its pipe."""
    while True:
        try:
            data = os.read(rank.pipe, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        *lines, rank.buffer = (rank.buffer + data).split(b"\n")
        for line in lines:
            try:
                message = Message.loads(line.decode())
                if message.kind == "result":
                    rank.result = rank_result_from_json(message.payload)
            except (ValueError, TypeError, KeyError):
                reason = f"sent what is no message: {line[:80]!r}"
                message = Message(kind="error", rank=rank.number, phase=rank.phase, status="error", reason=reason)
            rank.phase = message.phase or rank.phase
            rank.last_report = time.monotonic()
            watch.report(message.waiting)
            if message.kind == "error" and rank.error is None:
                rank.error = message
            if on_message is not None:
                on_message(message)


def _end(ranks: Sequence[_Rank]) -> None:
    """Kill all process groups, whatever is left in them, and close the pipes."""
    for rank in ranks:
        rank.process.kill_group()
    for rank in ranks:
        # A process that hangs in a driver cannot be killed, and must not hang its parent too.
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(KILL_S)
        os.close(rank.pipe)


def _cause_first(rank: _Rank) -> tuple[bool, int, int, int]:
    """Sorts failed ranks: no peer's symptom, then the earliest; within a turn of the watch a kill from
    outside, which no peer brings about, before an error, and an error before a crash."""
    assert rank.failed is not None
    symptom = rank.error is not None and any(word in rank.error.reason.lower() for word in _SYMPTOMS)
    manner = 0 if rank.code == -signal.SIGKILL else 1 if rank.error is not None else 2
    return symptom, rank.failed, manner, rank.number


def _judge(ranks: Sequence[_Rank]) -> Outcome:
    """The root cause: the first failure that is not a peer's symptom of another."""
    failed = sorted((r for r in ranks if r.failed is not None), key=_cause_first)
    if not failed:
        return Outcome(status="ok")
    cause = failed[0]
    where = f"rank {cause.number} "
    if cause.error is not None:
        status: Status = "oom" if cause.error.status == "oom" else "error"
        return Outcome(status=status, fail_phase=cause.error.phase, fail_reason=where + cause.error.reason)
    code = cause.code
    assert code is not None
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", perhaps by the kernel's out-of-memory killer" if name == "SIGKILL" else ""
        reason = f"{where}was killed by {name}{hint}"
    elif code == 0:
        reason = f"{where}exited with code 0 and without a result"
    else:
        reason = f"{where}exited with code {code} without a word; its log has more"
    return Outcome(status="error", fail_phase=cause.phase, fail_reason=reason)
