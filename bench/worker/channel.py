"""The line from a worker to its parent."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
        self.stepping_s = 0.0
        self._seconds: dict[str, float] = {}
        self._fd = fd
        self._lock = threading.Lock()
        self._since = time.monotonic()

    def _send(self, **fields: Any) -> None:
        line = Message(rank=self.rank, phase=self.current, **fields).dumps().encode()
        with self._lock:
            while line:
                line = line[os.write(self._fd, line) :]

    def phase(self, name: str) -> None:
        """Enter a phase; the time since then counts for it."""
        self._seconds = self.seconds()
        self._since, self.current = time.monotonic(), name
        self._send(kind="phase")

    def seconds(self) -> dict[str, float]:
        """Seconds spent in each phase up to now."""
        spent = self._seconds.get(self.current, 0.0) + time.monotonic() - self._since
        return {**self._seconds, self.current: spent}

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around each optimizer step of whatever phase, so that a cell's fixed cost can be told apart."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.stepping_s += time.monotonic() - start

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
