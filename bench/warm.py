"""The parent's end of the warm processes: ranks are forked from a process that has imported their library.

A fresh interpreter takes seconds to import torch and a library, in every rank of every cell.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

__all__ = ["Process", "Start", "Warm", "fresh"]

WORKER = ("-m", "bench.worker")
START_S = 120.0
# What tells a cell's ranks apart, or a cell from the next, and is no matter to an import.
OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NCCL_MULTI_RANK_GPU_ENABLE")


class Process(Protocol):
    """What the launcher needs of a started rank, as of ``subprocess.Popen``."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def wait(self, timeout: float) -> int:
        """Its exit code; raises subprocess.TimeoutExpired."""

    def kill_group(self) -> None:
        """Kill it with all that it has started, if anything of that is left."""


class Start(Protocol):
    """Starts a rank in a process group of its own; ``messages`` is the pipe that it inherits, and
    ``environment`` what it has besides this process's environment."""

    def __call__(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes], messages: int
    ) -> Process: ...


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _whole(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment with this process's own below it."""
    # LOCAL_SIZE would have a library take shared memory for what goes over the network.
    return {**{k: v for k, v in os.environ.items() if k != "LOCAL_SIZE"}, **environment}


class _Interpreter(subprocess.Popen[bytes]):
    def kill_group(self) -> None:
        _kill_group(self.pid)


def fresh(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes],
    messages: int,
    *,
    worker: Sequence[str] = WORKER,
) -> Process:
    """A rank in an interpreter of its own; see ``Start``."""
    return _Interpreter(
        [sys.executable, *worker, *arguments, str(messages)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=_whole(environment),
        pass_fds=[messages],
        start_new_session=True,
    )


class _Refused(Exception):
    """The warm process says why it must not fork."""


class _Forked:
    """A rank that a warm process forked."""

    def __init__(self, source: _Source, pid: int) -> None:
        self.pid, self._source = pid, source

    def poll(self) -> int | None:
        while self._source.listen(0):
            pass
        return self._source.codes.get(self.pid)

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout)
            self._source.listen(end - time.monotonic())
        return code

    def kill_group(self) -> None:
        _kill_group(self.pid)


class _Source:
    """One warm process; ``codes`` are the exit codes of its forks by process id."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self.codes: dict[int, int] = {}
        self._running: set[int] = set()
        self._answer: dict[str, Any] | None = None
        self._alive = True
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.worker.warm", str(theirs.fileno()), str(os.getpid()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._ask()

    def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes], messages: int
    ) -> _Forked:
        """Start a rank; see ``Start``.  Raises _Refused, and OSError where the process is gone or silent."""
        request = {"arguments": list(arguments), "environment": dict(environment)}
        socket.send_fds(self._line, [json.dumps(request).encode()], [output.fileno(), messages])
        answer = self._ask()
        if "refused" in answer:
            raise _Refused(answer["refused"])
        pid = answer["started"]
        self._running.add(pid)
        self.codes.pop(pid, None)  # of an earlier process with the same number
        return _Forked(self, pid)

    def listen(self, timeout: float) -> bool:
        """Take in one message, if one comes in time; whether one did.

        The end of the process is the end of its forks: the kernel kills them with it.
        """
        if not self._alive or not select.select([self._line], [], [], max(timeout, 0))[0]:
            return False
        try:
            text = self._line.recv(1 << 16)
        except OSError:
            text = b""
        if not text:
            self._alive = False
            self.codes |= dict.fromkeys(self._running, -signal.SIGKILL)
            return False
        message = json.loads(text)
        if "code" in message:
            self.codes[message["pid"]] = message["code"]
            self._running.discard(message["pid"])
        else:
            self._answer = message
        return True

    def close(self) -> None:
        """End the process, and whatever it has forked with it."""
        self._line.close()
        self._alive = False
        _kill_group(self._process.pid)
        self._process.wait()

    def _ask(self) -> dict[str, Any]:
        end = time.monotonic() + START_S
        while self._answer is None:
            self.listen(end - time.monotonic())
            if not self._alive or (self._answer is None and time.monotonic() > end):
                raise OSError(f"warm process {self._process.pid} is gone or silent")
        answer, self._answer = self._answer, None
        return answer


class Warm:
    """The warm processes of a sweep, one for each library and environment; a context manager.

    ``starter(modules)`` gives a ``Start`` whose ranks have imported those modules before they begin.
    Where a warm process cannot be had, the rank gets a fresh interpreter.
    """

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def starter(self, modules: Sequence[str]) -> Start:
        def start(
            arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes], messages: int
        ) -> Process:
            environment = _whole(environment)
            common = {k: v for k, v in environment.items() if k not in OWN}
            key = json.dumps([list(modules), common], sort_keys=True)
            try:
                if key not in self._sources:
                    self._sources[key] = _Source(modules, common)
                return self._sources[key].fork(arguments, environment, output, messages)
            except (_Refused, OSError) as error:
                output.write(f"in a fresh interpreter, since: {error}\n".encode())
                output.flush()
                if isinstance(error, OSError):
                    self._sources.pop(key, None)
                return fresh(arguments, environment, output, messages)

        return start
