"""A claim says that a process is running a cell: written before the first rank, gone with the record.

Whoever comes next judges it: a claim whose process is gone becomes an ``interrupted`` record.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from bench.atomic import replacing

__all__ = ["Claim", "claims_dir", "dead", "lock", "release", "take", "turn_into"]

# A claim holds a record without figures; this is room for its fail_reason, on a disk that has filled up meanwhile.
SPARE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Who runs what: ``record`` is the record to write, as JSON, should the process die."""

    run_id: str
    host: str
    boot_id: str
    pid: int
    process_started: float
    record: dict[str, Any]

    @classmethod
    def own(cls, run_id: str, record: dict[str, Any]) -> Claim:
        """This process's claim on a run."""
        return cls(
            run_id=run_id,
            host=socket.gethostname(),
            boot_id=_boot_id(),
            pid=os.getpid(),
            process_started=psutil.Process().create_time(),
            record=record,
        )

    def alive(self) -> bool:
        """Whether its process still runs; another host's cannot be judged from here and counts as alive."""
        if self.host != socket.gethostname():
            return True
        if self.boot_id != _boot_id():
            return False
        try:
            process = psutil.Process(self.pid)
            # A killed process whose own parent never asks for it, as in many containers, stays as a zombie.
            return abs(process.create_time() - self.process_started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def claims_dir(results_dir: Path) -> Path:
    """Where a results folder keeps its claims."""
    return results_dir / "claims"


@contextmanager
def lock(results_dir: Path) -> Iterator[None]:
    """Only one process at a time looks at claims and changes them."""
    claims_dir(results_dir).mkdir(parents=True, exist_ok=True)
    with FileLock(claims_dir(results_dir) / ".lock"):
        yield


def _read(path: Path) -> Claim | None:
    try:
        return Claim(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def take(results_dir: Path, name: str, claim: Claim) -> Claim | None:
    """Write the claim under ``lock``; None if it is ours now, else the live claim that stands there.

    Dead claims are to be taken care of before: one that stands here is replaced.
    """
    path = claims_dir(results_dir) / f"{name}.json"
    standing = _read(path)
    if standing is not None and standing.alive():
        return standing
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(asdict(claim)) + " " * SPARE_BYTES)
    return None


def turn_into(results_dir: Path, name: str, record: Path, text: str) -> None:
    """Make a claim's own file the record, for want of room for another; ``text`` is no longer than a record without
    figures.  The claim is gone with that."""
    path = claims_dir(results_dir) / f"{name}.json"
    with open(path, "r+b") as out:
        out.write(text.encode().ljust(path.stat().st_size))
        out.truncate()
        out.flush()
        os.fsync(out.fileno())
    os.replace(path, record)


def release(results_dir: Path, name: str) -> None:
    """Remove a claim, its record being written."""
    (claims_dir(results_dir) / f"{name}.json").unlink(missing_ok=True)


def dead(results_dir: Path) -> list[tuple[str, Claim]]:
    """The claims of processes that are gone, by name; call under ``lock``."""
    found = []
    for path in sorted(claims_dir(results_dir).glob("*.json")):
        claim = _read(path)
        if claim is not None and not claim.alive():
            found.append((path.stem, claim))
    return found
