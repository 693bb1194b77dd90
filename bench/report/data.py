"""The CSVs of a results folder as runs, cells and settings; nothing else is read of a run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from bench.errors import UserError
from bench.schema import TABLES
from bench.series import median_interval

__all__ = ["ACCOUNT", "PEAKS", "Cell", "Run", "Setting", "Stage", "Stat", "Study", "load", "over_trials"]

# From so many trials on their median has an interval; fewer have a range.
TRIALS = 5

# What must be equal in all rows of a table: the terms of a speed-up, and what decides whether one is given.
SETTING = (
    *("synthetic", "device", "hardware", "model", "model_target", "model_options", "granularity", "image_size"),
    *("num_classes", "batch_size", "precision", "optimizer", "lr", "momentum", "data", "data_path", "seed"),
    *("torch_version", "share_devices"),
)
# What makes a cell of it, in the order of a table's rows.
CELL = (
    *("library", "library_options", "library_version", "nodes", "stages", "micro_batches", "virtual_stages"),
    *("schedule", "checkpoint", "balance", "balance_options", "partition"),
)
ACCOUNT = ("ideal_s", "bubble_s", "imbalance_s", "recompute_s", "communication_s", "unexplained_s")
PEAKS = (
    *("peak_parameters_bytes", "peak_gradients_bytes", "peak_optimizer_state_bytes"),
    *("peak_placed_bytes", "peak_activations_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A row of stages.csv, of what the report shows."""

    run_id: str
    stage: int
    device: str
    parameters: int
    busy_s: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_parameters_bytes: int | None
    peak_gradients_bytes: int | None
    peak_optimizer_state_bytes: int | None
    peak_placed_bytes: int | None
    peak_activations_bytes: int | None
    predicted_peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A row of runs.csv, of what the report shows, its stages, and its warm-up steps in steps.csv."""

    run_id: str
    trial: int
    synthetic: bool
    library: str
    library_options: str
    library_version: str
    model: str
    model_target: str
    model_options: str
    granularity: str
    image_size: int
    num_classes: int
    batch_size: int
    micro_batches: int
    stages: int
    virtual_stages: int
    nodes: int
    balance: str
    balance_options: str
    partition: str
    imbalance: float | None
    predicted_step_time_s: float | None
    schedule: str
    checkpoint: str
    precision: str
    optimizer: str
    lr: float
    momentum: float
    data: str
    data_path: str
    seed: int
    device: str
    share_devices: bool
    hardware: str
    overlap: bool
    baseline: bool
    status: str
    fail_phase: str
    fail_reason: str
    steps: int
    step_time_s: float | None
    step_time_low_s: float | None
    step_time_high_s: float | None
    verdict: str
    throughput: float | None
    throughput_low: float | None
    throughput_high: float | None
    speedup: float | None
    ratio_to_one_stage: float | None
    efficiency: float | None
    bubble: float | None
    ideal_bubble: float | None
    traced_step_time_s: float | None
    ideal_s: float | None
    bubble_s: float | None
    imbalance_s: float | None
    recompute_s: float | None
    communication_s: float | None
    unexplained_s: float | None
    flops_per_step: int | None
    parity: str
    parity_unchecked: str
    torch_version: str
    git_commit: str
    git_dirty: bool | None
    host: str
    started_at: str
    devices: tuple[Stage, ...] = field(default=())
    warmup_steps: int = 0

    @property
    def peak_bytes(self) -> int | None:
        """The allocated peak of the largest stage, None where none was measured."""
        return max((s.peak_allocated_bytes for s in self.devices if s.peak_allocated_bytes is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Stat:
    """A figure over ``trials``.

    ``low`` and ``high`` are, by ``kind``: ``interval``, the 95 % interval of the median over the trials;
    ``range``, the least and the greatest trial; ``steps``, the interval of the only trial's own steps;
    ``none``, nothing: they equal the value.
    """

    value: float
    low: float
    high: float
    kind: Literal["interval", "range", "steps", "none"]
    trials: int


def over_trials(values: Sequence[float], own: tuple[float, float] | None = None) -> Stat:
    """The median over at least one trial; ``own``: the interval of a single trial's own steps."""
    n, value = len(values), statistics.median(values)
    if n >= TRIALS:
        low, high = median_interval(values)
        return Stat(value=value, low=low, high=high, kind="interval", trials=n)
    if n > 1:
        return Stat(value=value, low=min(values), high=max(values), kind="range", trials=n)
    low, high = own or (value, value)
    return Stat(value=value, low=low, high=high, kind="steps" if own else "none", trials=n)


@dataclass(frozen=True)
class Cell:
    """All runs of one cell on one hardware, by trial.

    ``counted`` leaves out failures that a later run of the same trial has made good.  A cell one of whose
    counted runs failed parity has no figure; otherwise the figures are those of its ``ok`` runs.
    """

    runs: tuple[Run, ...]

    @property
    def head(self) -> Run:
        """Any of its runs: the factors are the same in all."""
        return self.runs[0]

    @cached_property
    def counted(self) -> tuple[Run, ...]:
        good: dict[int, str] = {}
        for r in self.runs:
            if r.status == "ok":
                good[r.trial] = max(good.get(r.trial, ""), r.started_at)
        return tuple(r for r in self.runs if r.status == "ok" or r.started_at >= good.get(r.trial, ""))

    @cached_property
    def ok(self) -> tuple[Run, ...]:
        """The runs that its figures are made of."""
        if any(r.status == "parity_failed" for r in self.counted):
            return ()
        return tuple(r for r in self.counted if r.status == "ok")

    @cached_property
    def failed(self) -> tuple[Run, ...]:
        return tuple(r for r in self.counted if r.status != "ok")

    @property
    def status(self) -> str:
        """``ok`` where it has a figure, else how its runs ended; parity_failed before all else."""
        if self.ok:
            return "ok"
        endings = [r.status for r in self.failed]
        return "parity_failed" if "parity_failed" in endings else endings[0]

    @cached_property
    def throughput(self) -> Stat | None:
        return self._stat(lambda r: r.throughput, lambda r: (r.throughput_low, r.throughput_high))

    @cached_property
    def step_time(self) -> Stat | None:
        return self._stat(lambda r: r.step_time_s, lambda r: (r.step_time_low_s, r.step_time_high_s))

    @cached_property
    def speedup(self) -> Stat | None:
        return self._stat(lambda r: r.speedup, lambda r: _scaled(r, r.speedup))

    @cached_property
    def ratio(self) -> Stat | None:
        """To the library's own one-stage run."""
        return self._stat(lambda r: r.ratio_to_one_stage, lambda r: _scaled(r, r.ratio_to_one_stage))

    @cached_property
    def efficiency(self) -> Stat | None:
        return self._stat(lambda r: r.efficiency, lambda r: _scaled(r, r.efficiency))

    def median(self, of: Callable[[Run], float | None]) -> float | None:
        """The median over the trials that have it."""
        values = [v for r in self.ok if (v := of(r)) is not None]
        return statistics.median(values) if values else None

    @cached_property
    def account(self) -> Mapping[str, float | None] | None:
        """The parts of the traced step in per cent of it, all trials' traced steps together.

        A part is None where the schedule is not simulated; None altogether where nothing was traced.
        """
        traced = [r for r in self.ok if r.traced_step_time_s]
        if not traced:
            return None
        total = sum(r.traced_step_time_s or 0 for r in traced)
        parts: dict[str, float | None] = {}
        for name in ACCOUNT:
            values = [v for r in traced if (v := getattr(r, name)) is not None]
            parts[name] = 100 * sum(values) / total if values else None
        return parts

    @cached_property
    def fullest(self) -> Run | None:
        """The trial with the highest peak, whose stages the memory table shows."""
        measured = [r for r in self.ok if r.peak_bytes is not None]
        return max(measured, key=lambda r: r.peak_bytes or 0, default=None)

    def _stat(
        self, of: Callable[[Run], float | None], own: Callable[[Run], tuple[float | None, float | None]]
    ) -> Stat | None:
        having = [r for r in self.ok if of(r) is not None]
        if not having:
            return None
        low, high = own(having[0])
        values = [v for r in having if (v := of(r)) is not None]
        return over_trials(values, None if low is None or high is None else (low, high))


def _scaled(r: Run, value: float | None) -> tuple[float | None, float | None]:
    """The interval of a ratio over the baseline, the baseline taken as it is."""
    if not value or not r.throughput or r.throughput_low is None or r.throughput_high is None:
        return None, None
    return value * r.throughput_low / r.throughput, value * r.throughput_high / r.throughput


@dataclass(frozen=True)
class Setting:
    """Cells that may stand in one table; ``name`` is S1, S2, …"""

    name: str
    cells: tuple[Cell, ...]

    @property
    def head(self) -> Run:
        """Any of its runs: what makes a setting is the same in all."""
        return self.cells[0].head

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(r for c in self.cells for r in c.runs)

    @cached_property
    def baseline(self) -> Cell | None:
        """The cell that speed-ups are over, where it has been measured."""
        return next((c for c in self.cells if c.head.baseline and c.throughput), None)

    @property
    def label(self) -> str:
        """What was trained on what, in one line."""
        r = self.head
        model = " ".join(filter(None, [r.model, r.model_target if r.model == "custom" else "", r.model_options]))
        shared = ", shared devices" if r.share_devices else ""
        return (
            f"{model}, mini-batch {r.batch_size} × 3×{r.image_size}×{r.image_size}, {r.precision}, "
            f"{r.hardware}{shared}, seed {r.seed}"
        )


@dataclass(frozen=True)
class Study:
    """Everything of a results folder."""

    folder: Path
    settings: tuple[Setting, ...]

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(r for s in self.settings for r in s.runs)

    @property
    def synthetic(self) -> bool:
        """Whether any run is made up."""
        return any(r.synthetic for r in self.runs)


def load(results_dir: Path) -> Study:
    """The study of a results folder; UserError where its CSVs are missing, empty or do not fit the schema."""
    runs = _read(results_dir, "runs", [f.name for f in fields(Run) if f.name not in ("devices", "warmup_steps")])
    if runs.empty:
        raise UserError("results_dir", results_dir, "holds no runs", "run python -m bench first")
    stages = _read(results_dir, "stages", [f.name for f in fields(Stage)])
    steps = _read(results_dir, "steps", ["run_id", "step", "warmup", "rank"])
    devices = {
        run_id: tuple(sorted(of, key=lambda s: s.stage))
        for run_id, of in groupby(
            sorted((Stage(**row) for row in _rows(stages)), key=lambda s: s.run_id), lambda s: s.run_id
        )
    }
    warm = steps[steps["warmup"] & (steps["rank"] == 0)].groupby("run_id").size()
    warmups: dict[str, int] = {str(k): int(v) for k, v in warm.items()}
    made = [
        Run(**row, devices=devices.get(row["run_id"], ()), warmup_steps=warmups.get(row["run_id"], 0))
        for row in _rows(runs)
    ]
    ids = [r.run_id for r in made]
    if len(set(ids)) < len(ids):
        twice = min(i for i in set(ids) if ids.count(i) > 1)
        raise UserError("run_id", twice, "stands twice in runs.csv", f"run python -m bench.collect {results_dir}")
    return Study(results_dir, _settings(made))


def _settings(runs: Sequence[Run]) -> tuple[Setting, ...]:
    ordered = sorted(runs, key=lambda r: (_key(r, SETTING), _key(r, CELL), r.trial, r.started_at, r.run_id))
    settings = []
    for number, (_, of_setting) in enumerate(groupby(ordered, lambda r: _key(r, SETTING)), 1):
        cells = [tuple(of) for _, of in groupby(of_setting, lambda r: _key(r, CELL))]
        settings.append(Setting(f"S{number}", tuple(Cell(of) for of in _completed(cells))))
    return tuple(settings)


def _completed(cells: Sequence[tuple[Run, ...]]) -> list[tuple[Run, ...]]:
    """Runs that ended before their partition was known joined to the only one that their cell has."""
    result: list[tuple[Run, ...]] = []
    for _, group in groupby(cells, lambda runs: _key(runs[0], CELL[:-1])):
        members = list(group)
        # Without a partition sorts first.
        if len(members) == 2 and not members[0][0].partition and all(r.status != "ok" for r in members[0]):
            joined = sorted((*members[1], *members[0]), key=lambda r: (r.trial, r.started_at, r.run_id))
            head = members[1][0]
            joined.remove(head)
            members = [(head, *joined)]
        result += members
    return result


def _key(r: Run, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(getattr(r, name) for name in names)


_DTYPES = {"int": "Int64", "float": "float64", "bool": "boolean", "text": "str"}


def _read(results_dir: Path, name: str, wanted: Sequence[str]) -> pd.DataFrame:
    """Some columns of a CSV, checked against the schema as far as types and empty cells go."""
    path = results_dir / f"{name}.csv"
    columns = {c.name: c for c in TABLES[name] if c.name in wanted}
    remedy = f"run python -m bench.collect {results_dir}"
    try:
        head = pd.read_csv(path, nrows=0)
        missing = [n for n in columns if n not in head.columns]
        if missing:
            raise UserError(name, path, f"has no column {missing[0]}", remedy)
        # Only an empty cell is unknown: a library may be named "nan" or "None".
        frame = pd.read_csv(
            path,
            usecols=list(columns),
            dtype={n: _DTYPES[c.kind] for n, c in columns.items()},
            keep_default_na=False,
            na_values={n: [""] for n, c in columns.items() if c.kind != "text"},
        )
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError("results_dir", results_dir, f"holds no {name}.csv", remedy) from None
    except (OSError, ValueError, TypeError) as error:  # pandas' own errors are ValueErrors
        raise UserError(name, path, f"cannot be read ({error})", remedy) from None
    for n, c in columns.items():
        if c.kind != "text" and not c.nullable and frame[n].isna().any():
            raise UserError(name, path, f"{n} is empty in row {int(frame[n].isna().to_numpy().argmax()) + 1}", remedy)
        if c.allowed:
            odd = sorted(set(frame[n]) - set(c.allowed) - ({""} if c.nullable else set()))
            if odd:
                raise UserError(name, path, f"{n}: {odd[0]!r} is not {' or '.join(c.allowed)}", remedy)
    return frame


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Plain Python values by column; None where a cell is empty."""
    lists = {
        str(n): [None if pd.isna(v) else v for v in column.tolist()] if column.hasnans else column.tolist()
        for n, column in frame.items()
    }
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
