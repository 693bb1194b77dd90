"""Several nodes, seen from node 0: ranks of the other nodes are started, watched and ended through their agents.

The same command runs on every node.  On node 0 it is the parent of the cells, as ever; on the others it
serves as an agent (``bench.agent``).  They speak lines of JSON over one TCP connection an agent.  As with
torch's own store, whoever reaches the port is trusted: it belongs in a cluster's own network.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from bench.errors import UserError
from bench.hardware import fingerprint, visible_gpus
from bench.jobs import Message
from bench.place import PORT_VARIABLE, Place
from bench.warm import Process, Start

__all__ = ["Facts", "Line", "Node", "free_port", "gather", "own_facts"]

CONNECT_S = 120.0
START_S = 180.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a node says of itself; ``interface`` is the network device towards node 0, ``mbit_per_s`` its speed
    (0 where the system does not know), ``hardware`` the fingerprints by device kind, ``python`` the interpreter
    and where the harness lies."""

    host: str
    address: str
    interface: str
    mbit_per_s: int
    hardware: dict[str, str]
    gpus: tuple[dict[str, Any], ...]
    python: tuple[str, str]


def own_facts(address: str) -> Facts:
    """This node's, whose own address towards the others is this one."""
    interface = next(
        (name for name, found in psutil.net_if_addrs().items() if any(a.address == address for a in found)), ""
    )
    speed = psutil.net_if_stats()[interface].speed if interface else 0
    gpus = visible_gpus()
    return Facts(
        host=socket.gethostname(),
        address=address,
        interface=interface,
        mbit_per_s=speed,
        hardware={"cpu": fingerprint("cpu", ()), "cuda": fingerprint("cuda", gpus)},
        gpus=tuple(asdict(gpu) for gpu in gpus),
        python=(platform.python_version(), str(Path(__file__).parent)),
    )


class Line:
    """One connection that carries lines of JSON, both ways; sending is safe from several threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._buffer, self._lock = connection, b"", threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A node that vanishes without a word, as when its power fails, ends the connection too: within 25 s.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    @property
    def addresses(self) -> tuple[str, str]:
        """(own, the other's)."""
        return str(self._socket.getsockname()[0]), str(self._socket.getpeername()[0])

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one; raises OSError where the connection has ended."""
        with self._lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """What has come, at least some bytes being waited for; None at the end of the connection."""
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the connection, also for a thread that waits in ``receive``."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class _Remote:
    """A rank on another node; see ``warm.Process``."""

    def __init__(self, node: Node, key: int) -> None:
        self._node, self._key = node, key
        self.pid = -1

    def poll(self) -> int | None:
        return self._node.code(self._key)

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        return code

    def kill_group(self) -> None:
        self._node.tell({"do": "kill", "key": self._key})


class Node:
    """Another node: its agent's connection, listened to by a thread that fills the ranks' pipes."""

    def __init__(self, number: int, facts: Facts, line: Line) -> None:
        self.number, self.facts, self._line = number, facts, line
        self._keys = itertools.count()
        self._pipes: dict[int, tuple[int, int]] = {}  # key → the pipe's writing end, the rank's number
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()
        self._alive = True
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @property
    def own_address(self) -> str:
        """This node's address, as the other reaches it."""
        return self._line.addresses[0]

    def __str__(self) -> str:
        return f"node {self.number} ({self.facts.host})"

    def starter(self, modules: Sequence[str], log: Path, *, preload: bool) -> Start:
        """A ``Start`` whose ranks run there; their output goes to a log beside this one."""

        def start(
            arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes], messages: int
        ) -> Process:
            job_file, number = arguments
            key = next(self._keys)
            with self._lock:
                self._pipes[key] = os.dup(messages), int(number)
            self.tell(
                {
                    "do": "start",
                    "key": key,
                    "job": Path(job_file).read_text(),
                    "number": int(number),
                    "environment": dict(environment),
                    "modules": list(modules),
                    "preload": preload,
                    "log": str(log.resolve()),
                }
            )
            if not self._alive:  # since before the rank was known of
                self._lose()
            return _Remote(self, key)

        return start

    def code(self, key: int) -> int | None:
        """A rank's exit code, once its pipe has been filled to the end."""
        with self._lock:
            return self._codes.get(key)

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send to the agent; a connection that has ended is the listening thread's to notice."""
        try:
            self._line.send(message)
        except OSError:
            self._lose()

    def close(self) -> None:
        """Have the agent end well."""
        self.tell({"do": "end"})
        self._thread.join(5.0)
        self._line.close()

    def _listen(self) -> None:
        while (messages := self._line.receive()) is not None:
            for message in messages:
                if "data" in message:
                    self._fill(message["key"], message["data"].encode())
                elif "refused" in message:
                    self._fail(message["key"], message["refused"], 1)
                elif "code" in message:
                    self._end(message["key"], message["code"])
        self._lose()

    def _lose(self) -> None:
        self._alive = False
        with self._lock:
            left = list(self._pipes)
        for key in left:
            self._fail(key, "it is gone: the connection to its agent has ended", -signal.SIGKILL)

    def _fail(self, key: int, why: str, code: int) -> None:
        """Say in the rank's stead why there is none."""
        with self._lock:
            _, number = self._pipes.get(key, (-1, -1))
        error = Message(kind="error", rank=number, status="error", reason=f"{self}: {why}")
        self._fill(key, error.dumps().encode())
        self._end(key, code)

    def _fill(self, key: int, data: bytes) -> None:
        with self._lock:
            pipe, _ = self._pipes.get(key, (-1, -1))
        # The launcher closes its end once it has given the rank up.
        with contextlib.suppress(OSError):
            while data and pipe >= 0:
                data = data[os.write(pipe, data) :]

    def _end(self, key: int, code: int) -> None:
        with self._lock:
            pipe, _ = self._pipes.pop(key, (-1, -1))
            self._codes.setdefault(key, code)
        if pipe >= 0:
            os.close(pipe)


@contextlib.contextmanager
def gather(here: Place) -> Iterator[tuple[Node, ...]]:
    """On node 0: wait for the agents of all other nodes; in the end have them end.

    Raises UserError where the port is taken, an agent does not come, or runs another harness.
    """
    if here.count == 1:
        yield ()
        return
    nodes: dict[int, Node] = {}
    with _listening(here) as server:
        end = time.monotonic() + CONNECT_S
        try:
            while len(nodes) < here.count - 1:
                _admit(server, here, nodes, end)
            yield tuple(nodes[k] for k in sorted(nodes))
        finally:
            for node in nodes.values():
                node.close()


def _listening(here: Place) -> socket.socket:
    try:
        return socket.create_server(("", here.port), backlog=here.count)
    except OSError as error:
        why = f"node 0 cannot listen there ({error.strerror})"
        raise UserError("port", here.port, why, f"set {PORT_VARIABLE} to a free port on all nodes") from None


def _admit(server: socket.socket, here: Place, nodes: dict[int, Node], end: float) -> None:
    """Take in one agent."""
    server.settimeout(max(0.0, end - time.monotonic()))
    try:
        connection, _ = server.accept()
        connection.settimeout(10.0)
        line = Line(connection)
        said = line.receive() or []
        hello = said[0]["hello"]
        number = int(hello["node"])
        facts = Facts(**{**hello["facts"], "gpus": tuple(hello["facts"]["gpus"])})
    except TimeoutError:
        missing = sorted(set(range(1, here.count)) - set(nodes))
        raise UserError(
            "nodes", here.count, f"no word from node {missing[0]} in {CONNECT_S:g} s", "run the same command on each"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return  # a stranger at the port
    connection.settimeout(None)
    if number in nodes or not 0 < number < here.count:
        line.close()
        return
    own = own_facts(line.addresses[0])
    if tuple(facts.python) != own.python:
        line.send({"do": "end"})
        line.close()
        theirs, ours = (" in ".join(p) for p in (facts.python, own.python))
        raise UserError(
            "nodes", here.count, f"{facts.host} runs Python {theirs}, this one {ours}", "run the same on each"
        )
    nodes[number] = Node(number, facts, line)


def free_port() -> int:
    """A port that nobody listens at now, for the ranks' own store."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])
