"""What a results folder already knows of each run, read without building records: what is done, how long it took."""

from __future__ import annotations

import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bench.factors import Factors, Model
from bench.record import records_dir

__all__ = ["FINAL", "History", "OnExisting", "Past"]

OnExisting = Literal["skip", "rerun", "retry_failed"]
# An interrupted run says nothing of its cell; every other end is one.
FINAL = ("ok", "unsupported", "oom", "timeout", "error", "parity_failed")
_FINE = ("ok", "unsupported")


@dataclass(frozen=True, kw_only=True)
class Past:
    """One run of the past; ``library`` and ``workload`` tell what other runs should take about as long."""

    run_id: str
    status: str
    started_at: str
    wall_s: float | None
    cell_id: str
    library: str
    workload: str
    fail_phase: str
    fail_reason: str
    log: str

    @property
    def failed(self) -> bool:
        """Whether it ended, and neither well nor in a known impossibility."""
        return self.status in FINAL and self.status not in _FINE


Key = tuple[str, int, str]


class History:
    """Runs by (cell id, trial, hardware): of several the best counts, an ``ok`` one or else the last that ended."""

    def __init__(self, pasts: Iterable[tuple[Key, Past]]) -> None:
        self.runs: dict[Key, Past] = {}
        walls: dict[object, list[float]] = defaultdict(list)
        for key, past in sorted(pasts, key=lambda pair: (pair[1].started_at, pair[1].run_id)):
            standing = self.runs.get(key)
            if standing is None or (standing.status != "ok" and (past.status in FINAL or standing.status not in FINAL)):
                self.runs[key] = past
            if past.status == "ok" and past.wall_s is not None:
                for like in self._likes(past.cell_id, past.library, past.workload):
                    walls[like].append(past.wall_s)
        self._walls = {like: statistics.median(times) for like, times in walls.items()}

    @classmethod
    def read(cls, results_dir: Path) -> History:
        """The history of a results folder; what is no record there is left out (``collect`` names it)."""
        return cls.of(records_dir(results_dir).glob("*.json"))

    @classmethod
    def of(cls, paths: Iterable[Path]) -> History:
        """The history of these records."""
        found = []
        for path in paths:
            try:
                data = json.loads(path.read_text())
                if data["kind"] == "cell":
                    found.append(_past(data))
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return cls(found)

    def skips(self, key: Key, on_existing: OnExisting) -> bool:
        """Whether a run need not be made again."""
        past = self.runs.get(key)
        if past is None or on_existing == "rerun":
            return False
        return past.status in (_FINE if on_existing == "retry_failed" else FINAL)

    def estimate_s(self, cell_id: str, factors: Factors, hardware: str) -> float | None:
        """Median seconds of earlier runs of the cell, else of its library on the same workload, else of any library
        on it; None where there was none."""
        if not self._walls:
            return None
        workload = _workload_of(*(getattr(factors, key) for key in _WORKLOAD), hardware)
        likes = self._likes(cell_id, factors.library.name, workload)
        return next((self._walls[like] for like in likes if like in self._walls), None)

    @staticmethod
    def _likes(cell_id: str, library: str, workload: str) -> tuple[object, ...]:
        return cell_id, (library, workload), (workload,)


_WORKLOAD = ("model", "granularity", "image_size", "num_classes", "batch_size", "precision", "device")


def _workload(factors: dict[str, Any], hardware: str) -> str:
    return json.dumps([*(factors[key] for key in _WORKLOAD), hardware], sort_keys=True)


@functools.lru_cache(maxsize=4096)
def _workload_of(model: Model, *rest: str | int) -> str:
    *values, hardware = rest
    return _workload(dict(zip(_WORKLOAD, (asdict(model), *values), strict=True)), str(hardware))


def _past(data: dict[str, Any]) -> tuple[Key, Past]:
    key = (str(data["cell_id"]), int(data["trial"]), str(data["hardware"]))
    wall_s = data["wall_s"]
    if not isinstance(data["started_at"], str) or not (wall_s is None or isinstance(wall_s, int | float)):
        raise TypeError("a record's time is no time")
    past = Past(
        **{name: data[name] for name in ("run_id", "status", "started_at", "wall_s", "cell_id", "fail_phase")},
        fail_reason=data["fail_reason"],
        log=data["log"],
        library=data["factors"]["library"]["name"],
        workload=_workload(data["factors"], data["hardware"]),
    )
    return key, past
