"""A submitted study on disk: a frozen list of runs for each number of nodes and GPUs, and what was asked of SLURM.

``RESULTS/slurm/ID/`` holds ``study.json``, ``plan-NODESnodes-GPUSgpus.json`` (a list of runs), the arrays' scripts,
``logs/`` and ``tasks/``, in which every attempt of a task leaves a note.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.atomic import replacing
from bench.errors import UserError
from bench.factors import Factors, Settings
from bench.history import FINAL, History, Past
from bench.jobs import factors_from_json, to_json

__all__ = [
    "Array",
    "Attempt",
    "Needs",
    "Run",
    "Study",
    "create",
    "find",
    "load",
    "now",
    "plan_name",
    "read_plan",
    "words",
]


Needs = tuple[int, int]  # nodes, GPUs of each


def plan_name(needs: Needs) -> str:
    """The file of the frozen runs that need so much."""
    nodes, gpus = needs
    return f"plan-{nodes}nodes-{gpus}gpus.json"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the plan: ``task`` is the array task that makes it, ``cell_id`` its cell's id."""

    task: int
    cell_id: str
    trial: int
    factors: Factors


@dataclass(frozen=True, kw_only=True)
class Array:
    """One job array: it makes the plan's tasks ``first`` … ``first + count - 1`` with ``gpus`` on each of
    ``nodes``; ``job`` is SLURM's id of it."""

    plan: str
    nodes: int
    gpus: int
    first: int
    count: int
    job: str = ""

    def key(self, task: int) -> str:
        """SLURM's name of the job that makes a task of the plan."""
        return f"{self.job}_{task - self.first}"


def words(array: Array) -> str:
    """What each task of an array has, for people."""
    nodes = "1 node" if array.nodes == 1 else f"{array.nodes} nodes"
    return f"{nodes} with {array.gpus} GPUs each" if array.nodes > 1 else f"{nodes} with {array.gpus} GPUs"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A task that has begun: the ``number``-th restart of it, its process, and its devices' fingerprint."""

    number: int
    host: str
    pid: int
    hardware: str
    started_at: str


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study as it was submitted; ``unsupported``: how many of its runs were known to be impossible."""

    folder: Path
    submitted_at: str
    settings: Settings
    max_requeues: int
    arrays: tuple[Array, ...]
    unsupported: int = 0

    @property
    def results_dir(self) -> Path:
        """The results folder that the study lies in."""
        return self.folder.parent.parent

    def save(self) -> None:
        """Write ``study.json``, atomically: a task may be reading it."""
        _write(self.folder / "study.json", {k: v for k, v in to_json(self).items() if k != "folder"})

    def log(self, array: Array, task: int) -> Path:
        """Where a task's own output goes."""
        return self.folder / "logs" / f"{array.key(task)}.out"

    def note(self, plan: str, task: int, number: int, hardware: str) -> None:
        """Leave word that this process is an attempt at a task."""
        made = Attempt(number=number, host=socket.gethostname(), pid=os.getpid(), hardware=hardware, started_at=now())
        _write(self.folder / "tasks" / f"{Path(plan).stem}-{task}.{number}.json", to_json(made))

    def attempts(self, plan: str, task: int) -> list[Attempt]:
        """All attempts at a task so far."""
        found = sorted((self.folder / "tasks").glob(f"{Path(plan).stem}-{task}.*.json"))
        return sorted((Attempt(**json.loads(path.read_text())) for path in found), key=lambda a: a.number)

    def finished(self, run: Run, history: History, attempts: Sequence[Attempt]) -> Past | None:
        """How a run ended, where it did: on the hardware of one of the task's attempts.

        What stood there before the study counts only as far as ``on_existing`` lets it.
        """
        for hardware in {a.hardware for a in attempts}:
            key = (run.cell_id, run.trial, hardware)
            past = history.runs.get(key)
            if past is None or past.status not in FINAL:
                continue
            if past.started_at >= self.submitted_at or history.skips(key, self.settings.on_existing):
                return past
        return None


def now() -> str:
    """The time in the form of a record's ``started_at``, so that both can be compared as text."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _write(path: Path, data: object) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(data, indent=1))


def create(settings: Settings, max_requeues: int, plans: dict[Needs, list[Run]], unsupported: int) -> Study:
    """Freeze the runs by what they need in a new folder, without arrays yet."""
    texts = {plan_name(needs): [to_json(run) for run in runs] for needs, runs in plans.items()}
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:6]
    results_dir = settings.results_dir.resolve()
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
    folder = _new_folder(results_dir / "slurm", f"{stamp}-{digest}")
    for name, text in texts.items():
        _write(folder / name, text)
    settings = dataclasses.replace(settings, results_dir=results_dir)
    return Study(
        folder=folder,
        submitted_at=now(),
        settings=settings,
        max_requeues=max_requeues,
        arrays=(),
        unsupported=unsupported,
    )


def _new_folder(parent: Path, name: str) -> Path:
    """A folder that nobody else has: the same study may be submitted twice within a second."""
    for number in range(1000):
        folder = parent / (f"{name}-{number}" if number else name)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        for inner in ("logs", "tasks"):
            (folder / inner).mkdir()
        return folder
    raise FileExistsError(parent / name)


def find(name: str, results_dir: Path) -> Path:
    """The folder of a study, given as its path or as its id in a results folder."""
    for folder in (Path(name), results_dir / "slurm" / name):
        if (folder / "study.json").is_file():
            return folder.resolve()
    known = sorted(path.parent.name for path in (results_dir / "slurm").glob("*/study.json"))
    shown = f"known are {', '.join(known[-5:])}" if known else f"none lies in {results_dir / 'slurm'}"
    raise UserError("study", name, f"there is no such study; {shown}", "give its id, or its folder's path")


def load(folder: Path) -> Study:
    """The study in a folder."""
    data: dict[str, Any] = json.loads((folder / "study.json").read_text())
    settings = dict(data.pop("settings"))
    for key in ("trials", "devices"):
        settings[key] = None if settings[key] is None else tuple(settings[key])
    settings["results_dir"] = folder.parent.parent  # it may have been moved, or be mounted elsewhere
    data["arrays"] = tuple(Array(**array) for array in data["arrays"])
    return Study(folder=folder, settings=Settings(**settings), **data)


def read_plan(path: Path) -> list[Run]:
    """A frozen list of runs."""
    return [Run(**{**run, "factors": factors_from_json(run["factors"])}) for run in json.loads(path.read_text())]
