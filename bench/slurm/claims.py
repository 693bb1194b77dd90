"""Claims of runs whose job SLURM has ended: on another host nobody else can tell that they are dead."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from bench import claim, record
from bench.claim import Claim, claims_dir, release
from bench.jobs import Status
from bench.record import Record, records_dir

__all__ = ["bury", "standing"]

Process = tuple[str, int]


def standing(results_dir: Path) -> Iterator[tuple[str, Claim]]:
    """All claims by name, whatever has become of their processes; call under ``claim.lock``."""
    for path in sorted(claims_dir(results_dir).glob("*.json")):
        try:
            yield path.stem, Claim(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue


def bury(results_dir: Path, processes: Collection[Process], status: Status, reason: str) -> list[Record]:
    """Turn the claims of these (host, process id), which are known to be gone, into records."""
    made = []
    with claim.lock(results_dir):
        for name, found in standing(results_dir):
            if (found.host, found.pid) not in processes:
                continue
            if not (records_dir(results_dir) / f"{found.run_id}.json").exists():
                buried = replace(record.from_json(found.record), status=status, fail_reason=reason)
                record.write(buried, results_dir)
                made.append(buried)
            release(results_dir, name)
    return made
