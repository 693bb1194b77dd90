"""The line from a worker to its parent."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from bench.jobs import Message

__all__ = ["Channel"]


class Channel:
    """Writes messages to the inherited pipe and keeps the seconds spent in each phase.

    A parent that is gone is no error here: the kernel ends the worker with it.
    """

    def __init__(self, rank: int, fd: int) -> None:
        self.rank = rank
        self.current = "build"
        self.seconds: dict[str, float] = {}
        self._fd = fd
        self._lock = threading.Lock()
        self._since = time.monotonic()

    def _send(self, **fields: Any) -> None:
        line = Message(rank=self.rank, phase=self.current, **fields).dumps().encode()
        with self._lock:
            while line:
                line = line[os.write(self._fd, line) :]

    def phase(self, name: str) -> None:
        """Enter a phase; the time since the last call goes to the phase before."""
        now = time.monotonic()
        self.seconds[self.current] = self.seconds.get(self.current, 0.0) + now - self._since
        self._since, self.current = now, name
        self._send(kind="phase")

    def step(self, index: int) -> None:
        """Report a finished step of the current phase."""
        self._send(kind="step", index=index)

    def alive(self, note: str, *, waiting: bool = False) -> None:
        """Report progress within a long piece of work, or (``waiting``) that others are waited for."""
        self._send(kind="alive", note=note, waiting=waiting)

    def result(self, payload: dict[str, Any]) -> None:
        """Hand over the rank's result; nothing may follow."""
        self._send(kind="result", payload=payload)

    def error(self, status: str, reason: str) -> None:
        """Report the rank's failure in the current phase."""
        self._send(kind="error", status=status, reason=reason)
