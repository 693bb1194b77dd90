"""A node other than the first: starts ranks as node 0 says, passes on what they report, and ends them."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.hardware import Gpu, device_locks, visible_gpus
from bench.jobs import Job
from bench.launch import pin
from bench.nodes import CONNECT_S, Line, own_facts
from bench.place import Place
from bench.warm import Process, Warm, fresh

__all__ = ["serve"]

POLL_S = 0.05
RETRY_S = 0.2
SEE_S = 10.0


@dataclass(kw_only=True)
class _Rank:
    process: Process
    pipe: int
    open: bool = True


def serve(here: Place) -> int:
    """Serve node 0 until it says that all is over.  Exit code: 0 then, 1 where its connection just ends.

    Signals are node 0's to act on: the batch system sends them to all nodes, and an agent that went
    first would look like a node that failed.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    line = _connect(here)
    if line is None:
        print(f"node {here.index}: node 0 ({here.address}:{here.port}) cannot be reached", file=sys.stderr)
        return 1
    facts = own_facts(line.addresses[0])
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Warm() as warm:
        agent = _Agent(here, line, facts.interface, Path(folder), warm)
        try:
            line.send({"hello": {"node": here.index, "facts": asdict(facts)}})
            return agent.run()
        except OSError:  # the connection ended while something was sent
            return 1
        finally:
            agent.end()


def _connect(here: Place) -> Line | None:
    end = time.monotonic() + CONNECT_S
    while time.monotonic() < end:
        try:
            connection = socket.create_connection((here.address, here.port), timeout=5.0)
        except OSError:
            time.sleep(RETRY_S)
            continue
        connection.settimeout(None)
        return Line(connection)
    return None


class _Agent:
    """The ranks of this node, by node 0's keys."""

    def __init__(self, here: Place, line: Line, interface: str, folder: Path, warm: Warm) -> None:
        self._here, self._line, self._interface, self._folder, self._warm = here, line, interface, folder, warm
        self._ranks: dict[int, _Rank] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(line, selectors.EVENT_READ)

    def run(self) -> int:
        while True:
            for key, _ in self._selector.select(POLL_S):
                if key.data is not None:
                    self._pass_on(key.data)
                    continue
                messages = self._line.receive()
                if messages is None:
                    return 1
                for message in messages:
                    if message["do"] == "end":
                        return 0
                    self._obey(message)
            for number, rank in list(self._ranks.items()):
                code = rank.process.poll()
                if code is not None:
                    self._pass_on(number)
                    self._forget(number)
                    self._line.send({"key": number, "code": code})

    def end(self) -> None:
        """Kill whatever runs."""
        for number, rank in list(self._ranks.items()):
            rank.process.kill_group()
            self._forget(number)
        self._line.close()

    def _obey(self, message: Mapping[str, Any]) -> None:
        key = message["key"]
        if message["do"] == "kill":
            if key in self._ranks:
                self._ranks[key].process.kill_group()
            return
        try:
            self._start(key, message)
        except (OSError, ValueError) as error:
            self._line.send({"key": key, "refused": str(error)})

    def _start(self, key: int, message: Mapping[str, Any]) -> None:
        log, number = Path(message["log"]), message["number"]
        if not _seen(log):
            raise OSError(f"it does not see {log}: results_dir must lie where all nodes see it")
        job = _own(Job.loads(message["job"]), self._folder)
        local = number % (job.world_size // job.nodes)
        job_file = self._folder / f"{key}.job.json"
        job_file.write_text(job.dumps())
        asked = dict(message["environment"])
        asked["LOCAL_RANK"] = str(job.device_indices[number] if job.device_indices else local)
        asked["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", self._interface)
        start = self._warm.starter(message["modules"]) if message["preload"] else fresh
        reading, writing = os.pipe()
        try:
            with open(log.with_name(f"{log.stem}.node{self._here.index}.log"), "ab") as output:
                process = start([str(job_file), str(number)], asked, output, writing)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        pin(process.pid, job, local)
        os.set_blocking(reading, False)
        self._ranks[key] = _Rank(process=process, pipe=reading)
        self._selector.register(reading, selectors.EVENT_READ, key)

    def _pass_on(self, key: int) -> None:
        """Send what the rank has written."""
        rank = self._ranks[key]
        while rank.open:
            try:
                data = os.read(rank.pipe, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                rank.open = False
                self._selector.unregister(rank.pipe)
                return
            # The channel writes ASCII; what is none is a fault that node 0 names.
            self._line.send({"key": key, "data": data.decode("ascii", errors="replace")})

    def _forget(self, key: int) -> None:
        rank = self._ranks.pop(key)
        if rank.open:
            self._selector.unregister(rank.pipe)
        os.close(rank.pipe)


def _own(job: Job, folder: Path) -> Job:
    """The job as it is on this node: its own devices and their locks, its own parent."""
    gpus: tuple[Gpu, ...] = ()
    if job.factors.device == "cuda":
        visible = visible_gpus()
        missing = [i for i in job.device_indices if i >= len(visible)]
        if missing:
            raise ValueError(f"it has no GPU {missing[0]}; {len(visible)} are visible")
        gpus = tuple(visible[i] for i in job.device_indices)
    return replace(
        job,
        parent_pid=os.getpid(),
        lock_paths=device_locks(job.factors.device, gpus),
        rendezvous=str(folder / "rendezvous"),
    )


def _seen(path: Path) -> bool:
    """Whether node 0's file is here too; a network file system may take a moment to show it."""
    end = time.monotonic() + SEE_S
    while not path.exists():
        if time.monotonic() > end:
            return False
        with contextlib.suppress(OSError):
            os.listdir(path.parent)
        time.sleep(0.2)
    return True
