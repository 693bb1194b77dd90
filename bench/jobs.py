"""What crosses the border between the parent and a worker process, both ways.

Parent → worker: one ``Job`` as JSON in a file.  Worker → parent: ``Message`` lines of JSON on an
inherited pipe.  Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.factors import Balance, Data, Factors, Library, Model, Optimizer

__all__ = [
    "Job",
    "Message",
    "ParityResult",
    "RankResult",
    "SpanResult",
    "StageResult",
    "StepResult",
    "TraceResult",
    "factors_from_json",
    "rank_result_from_json",
    "to_json",
]

PHASES = ("plan", "build", "parity", "warmup", "measure", "memory", "trace")
Status = Literal["ok", "oom", "timeout", "error", "unsupported", "parity_failed", "interrupted"]


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def to_json(value: Any) -> Any:
    """A dataclass (nested) as plain JSON data."""
    return json.loads(json.dumps(dataclasses.asdict(value), default=str))


def factors_from_json(data: dict[str, Any]) -> Factors:
    """The inverse of ``to_json(factors)``."""
    parts = {"library": Library, "model": Model, "balance": Balance, "data": Data, "optimizer": Optimizer}
    made = {
        key: parts[key](**{k: _tuples(v) for k, v in value.items()}) if key in parts else value
        for key, value in data.items()
    }
    return Factors(**made)


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that a worker process needs to run one rank.

    ``task``: the module whose ``run_rank`` it calls: ``bench.worker.cell`` runs a cell,
    ``bench.worker.profile`` measures its model's layers, ``bench.worker.native`` asks the library for
    its own partition.
    ``partition`` holds p·v numbers of layers (one, the whole model, for a library without a
    pipeline).  ``device_indices`` are CUDA indices a stage (empty on CPU).  ``rendezvous`` is a file
    path for torch's FileStore, ``store`` the host:port of its TCPStore where the ranks run on several
    ``nodes``, as many on each, and ``interface`` this node's network device towards the others.
    ``cache_dir`` holds references shared by a study's cells.  ``lock_paths`` are the host-wide device
    locks to hold from warm-up to the end of measuring.
    ``steps`` is 0 for as many as ``target_ci`` needs, ``max_steps`` at most.  ``double_parity``: run
    parity (b) as well, since no record of it exists yet.  ``memory``, ``trace``: run these passes.
    """

    task: str = "bench.worker.cell"
    run_id: str
    cell_id: str
    factors: Factors
    partition: tuple[int, ...]
    world_size: int
    warmup_steps: int
    steps: int
    device_indices: tuple[int, ...]
    rendezvous: str
    cache_dir: str
    lock_paths: tuple[str, ...]
    double_parity: bool
    timeout_s: float
    parent_pid: int
    memory: bool = True
    trace: bool = False
    target_ci: float = 0.01
    max_steps: int = 200
    nodes: int = 1
    store: str = ""
    interface: str = ""

    @classmethod
    def loads(cls, text: str) -> Job:
        data = json.loads(text)
        data["factors"] = factors_from_json(data["factors"])
        return cls(**{k: _tuples(v) for k, v in data.items()})

    def dumps(self) -> str:
        return json.dumps(to_json(self))


@dataclass(frozen=True, kw_only=True)
class Message:
    """One line from a worker.

    kind ``phase``: entered ``phase``; ``step``: finished step ``index`` of it; ``alive``: still
    working or waiting (``waiting=True`` stops the wall clock until the next message); ``result``:
    ``payload`` is a ``RankResult`` as JSON, the rank is done; ``error``: the rank failed in
    ``phase`` with ``status`` and the one-line ``reason`` (its traceback is in the log).
    """

    kind: Literal["phase", "step", "alive", "result", "error"]
    rank: int
    phase: str = ""
    index: int = -1
    note: str = ""
    waiting: bool = False
    status: str = ""
    reason: str = ""
    payload: dict[str, Any] = field(default_factory=dict)

    def dumps(self) -> str:
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @classmethod
    def loads(cls, line: str) -> Message:
        return cls(**json.loads(line))


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step on one rank: ``time_s`` from after the barrier to after the device sync."""

    index: int
    warmup: bool
    time_s: float
    loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """One pipeline device (or replica), as read back from the library and measured.

    ``layers`` are flat layer indices.  On CPU ``peak_allocated_bytes`` is the live-storage peak
    and ``peak_reserved_bytes`` is None; the other peaks are its parts, see ``worker.memory.Peak``.
    Clocks and throttle reasons are of a GPU while it was measured, see ``gpu_watch``.
    """

    stage: int
    rank: int
    device: str
    layers: tuple[int, ...]
    parameters: int
    parameter_bytes: int
    dtype: str
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_parameters_bytes: int | None = None
    peak_gradients_bytes: int | None = None
    peak_optimizer_state_bytes: int | None = None
    peak_placed_bytes: int | None = None
    peak_activations_bytes: int | None = None
    allocator_retries: int | None = None
    device_uuid: str | None = None
    pci_address: str | None = None
    clock_low_mhz: int | None = None
    clock_high_mhz: int | None = None
    throttle_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SpanResult:
    """What a device did in a traced step, in seconds from the step's start on this rank.

    ``kind``: forward, recompute, backward (of a split backward the half that gives the input's
    gradient), backward_weight (the other half) or update (the optimizer; no model stage and
    micro-batch, −1).  ``stage`` is the device, ``model_stage`` what ran on it.
    """

    step: int
    stage: int
    model_stage: int
    kind: str
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class TraceResult:
    """The trace pass of one rank: its step times, and host seconds that one stamp costs."""

    step_times_s: tuple[float, ...]
    stamp_cost_s: float


@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """The work compared with the reference: worst layer's norm-relative errors.

    ``steps`` compared steps; ``buffer_error`` (BatchNorm statistics) is reported, never judged.
    """

    precision: str
    batch_size: int
    steps: int
    gradient_error: float
    gradient_layer: int
    gradient_tolerance: float
    update_error: float
    update_layer: int
    update_tolerance: float
    buffer_error: float
    dropout_off: bool
    reference_device: str
    passed: bool


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank brings home.

    ``phases`` are seconds by phase.  ``read_back`` is what the library really did (``schedule``,
    ``checkpoint``, ``micro_batches``, ``partition``, ``forwards``, ``recomputes`` a stage), or what
    another task than a cell was to find out.
    ``parity`` is (a), ``parity_double`` (b) where it ran here, ``parity_unchecked`` the reason
    where the reference fits nowhere.  ``stepping_s``: seconds in optimizer steps of any phase, the
    reference's included.  ``trace`` and ``spans``: the trace pass.
    """

    rank: int
    phases: dict[str, float]
    steps: tuple[StepResult, ...]
    stages: tuple[StageResult, ...]
    read_back: dict[str, Any]
    parity: ParityResult | None = None
    parity_double: ParityResult | None = None
    parity_unchecked: str = ""
    foreign_load: float | None = None
    stepping_s: float = 0.0
    trace: TraceResult | None = None
    spans: tuple[SpanResult, ...] = ()
    notes: tuple[str, ...] = ()


def stage_from_json(data: dict[str, Any]) -> StageResult:
    """The inverse of ``to_json(stage)``."""
    return StageResult(**{key: _tuples(value) for key, value in data.items()})


def rank_result_from_json(data: dict[str, Any]) -> RankResult:
    """The inverse of ``to_json(result)``."""
    parities = {key: ParityResult(**data[key]) for key in ("parity", "parity_double") if data[key]}
    trace = data.get("trace")
    return RankResult(
        **{
            **data,
            **parities,
            "steps": tuple(StepResult(**s) for s in data["steps"]),
            "stages": tuple(stage_from_json(s) for s in data["stages"]),
            "notes": tuple(data["notes"]),
            "trace": TraceResult(**{k: _tuples(v) for k, v in trace.items()}) if trace else None,
            "spans": tuple(SpanResult(**span) for span in data.get("spans", ())),
        }
    )
