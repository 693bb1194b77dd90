"""The record of one run: the only truth, from which every CSV and table can be made again."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from bench.account import Account, Lane
from bench.atomic import replacing
from bench.conform import misfit
from bench.factors import Factors
from bench.jobs import ParityResult, StageResult, Status, factors_from_json, stage_from_json, to_json
from bench.partition.memory import MemoryTerms
from bench.partition.prediction import Prediction

__all__ = ["SCHEMA_VERSION", "Record", "RecordError", "Step", "from_json", "load", "load_all", "records_dir", "write"]

SCHEMA_VERSION = 1


class RecordError(ValueError):
    """A file in the records folder that is no record: truncated, foreign or of another version."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step: ``time_s`` is the slowest rank's, ``rank_times_s`` all of them."""

    index: int
    warmup: bool
    time_s: float
    rank_times_s: tuple[float, ...]
    loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    """All that is known of one run.

    ``kind``: ``cell``, or ``parity`` for a float64 parity run that many cells point to with
    ``parity_double_run``.  ``hardware`` is the fingerprint of the devices.  ``wall_s`` is the
    parent's time from claim to record without waiting for the device lock (``waited_s``);
    ``fixed_cost_s`` = ``wall_s`` minus all optimizer steps, those of parity and of its reference and
    of the memory pass included.  ``resolved`` is what was read back from the library.
    ``prediction`` is what a profile says of the partition.  ``account`` is of the traced step of
    median length, its spans stand in the file ``trace``, a stamp cost ``stamp_cost_s``.
    ``overlap``: whether stages can overlap on this device.
    """

    schema_version: int = SCHEMA_VERSION
    kind: Literal["cell", "parity"] = "cell"
    synthetic: bool = False
    run_id: str
    cell_id: str
    trial: int
    hardware: str
    status: Status
    fail_phase: str = ""
    fail_reason: str = ""
    started_at: str
    wall_s: float | None = None
    waited_s: float = 0.0
    fixed_cost_s: float | None = None
    factors: Factors
    baseline: bool = False
    partition: tuple[int, ...] = ()
    prediction: Prediction | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    resolved: dict[str, Any] = field(default_factory=dict)
    overlap: bool = True
    steps: tuple[Step, ...] = ()
    stages: tuple[StageResult, ...] = ()
    phases: dict[str, float] = field(default_factory=dict)
    parity: ParityResult | None = None
    parity_double: ParityResult | None = None
    parity_double_run: str = ""
    parity_unchecked: str = ""
    foreign_load: float | None = None
    account: Account | None = None
    stamp_cost_s: float | None = None
    trace: str = ""
    notes: tuple[str, ...] = ()
    environment: dict[str, Any] = field(default_factory=dict)
    log: str = ""


def records_dir(results_dir: Path) -> Path:
    """Where a results folder keeps its records."""
    return results_dir / "records"


def write(record: Record, results_dir: Path) -> Path:
    """Write atomically (temporary file, fsync, rename); the name carries the run's id."""
    folder = records_dir(results_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.run_id}.json"
    with replacing(path) as temporary, open(temporary, "w") as out:
        json.dump(to_json(record), out, indent=1)
    return path


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def from_json(data: dict[str, Any]) -> Record:
    """The inverse of ``to_json(record)``; unknown keys are ignored."""
    known = {f.name for f in fields(Record)}
    made = {key: value for key, value in data.items() if key in known}
    made["factors"] = factors_from_json(data["factors"])
    made["partition"] = tuple(data["partition"])
    made["notes"] = tuple(data["notes"])
    if data.get("prediction"):
        fields_of = {k: _tuple(v) for k, v in data["prediction"].items()}
        made["prediction"] = Prediction(**fields_of | {"memory": tuple(MemoryTerms(**m) for m in fields_of["memory"])})
    made["steps"] = tuple(Step(**{**s, "rank_times_s": tuple(s["rank_times_s"])}) for s in data["steps"])
    made["stages"] = tuple(stage_from_json(s) for s in data["stages"])
    if data.get("account"):
        lanes = tuple(Lane(**lane) for lane in data["account"]["lanes"])
        made["account"] = Account(**{**data["account"], "lanes": lanes})
    for key in ("parity", "parity_double"):
        made[key] = ParityResult(**data[key]) if data[key] else None
    return Record(**made)


def load(path: Path) -> Record:
    """Read one record; ``RecordError`` says in one line what is wrong with the file."""
    try:
        data = json.loads(path.read_text())
        if data["schema_version"] != SCHEMA_VERSION:
            raise RecordError(f"{path}: schema_version {data['schema_version']}, this program reads {SCHEMA_VERSION}")
        made = from_json(data)
    except RecordError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{path}: not a record ({type(error).__name__}: {error})") from error
    if wrong := misfit(made):
        raise RecordError(f"{path}: not a record ({wrong})")
    return made


def load_all(results_dir: Path) -> tuple[list[Record], list[RecordError]]:
    """All records of a results folder by run id, and what stands there that is none."""
    records, errors = [], []
    for path in sorted(records_dir(results_dir).glob("*.json")):
        try:
            records.append(load(path))
        except RecordError as error:
            errors.append(error)
    return records, errors
