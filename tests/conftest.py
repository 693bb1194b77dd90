"""What all tests share: made-up records, and GPU tests that skip themselves where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.factors import Balance, Factors, Model
from bench.hardware import visible_gpus
from bench.jobs import ParityResult, StageResult
from bench.record import Record, Step
from bench.registry import libraries


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu``, with the reason, where NVML shows none."""
    if visible_gpus():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no GPU is visible"))


def _parity(precision: str, gradient_error: float, update_error: float, tolerance: float) -> ParityResult:
    return ParityResult(
        precision=precision,
        batch_size=8,
        steps=1 if precision == "fp32" else 3,
        gradient_error=gradient_error,
        gradient_layer=3,
        gradient_tolerance=tolerance,
        update_error=update_error,
        update_layer=4,
        update_tolerance=20 * tolerance if precision == "fp32" else tolerance,
        buffer_error=0.25,
        dropout_off=True,
        reference_device="cpu",
        passed=True,
    )


def _made_record(
    run_id: str,
    *,
    library: str = "torch",
    times: tuple[float, ...] = (0.5, 0.4, 0.6),
    factors: dict[str, Any] | None = None,
    **fields: Any,
) -> Record:
    """A made-up run (``synthetic``) whose measured steps took ``times`` seconds after a warm-up of 9 s."""
    plain = library in ("single", "ddp")
    made = Factors(
        library=libraries()[library],
        model=Model(name="resnet18", target="models.resnet.resnet18"),
        batch_size=8,
        micro_batches=4,
        stages=1 if library == "single" else 2,
        balance=Balance(name="uniform"),
        schedule="none" if plain else "1f1b",
        device="cpu",
    ).replace(**(factors or {}))
    ranks = made.stages if library in ("torch", "deepspeed", "ddp") else 1
    steps = tuple(
        Step(index=i, warmup=i == 0, time_s=t, rank_times_s=(t, *[t / 2] * (ranks - 1)), loss=1.0)
        for i, t in enumerate((9.0, *times))
    )
    stages = tuple(
        StageResult(
            stage=i,
            rank=min(i, ranks - 1),
            device="cpu",
            layers=(2 * i, 2 * i + 1),
            parameters=100 + i,
            parameter_bytes=400 + 4 * i,
            dtype="float32",
            peak_allocated_bytes=(310 - 190 * i) * 2**20,
        )
        for i in range(made.stages)
    )
    defaults: dict[str, Any] = {
        "synthetic": True,
        "cell_id": f"cell-{run_id}",
        "trial": 0,
        "hardware": "cpu-made-up",
        "status": "ok",
        "started_at": "2026-01-01T00:00:00+00:00",
        "wall_s": 12.5,
        "fixed_cost_s": 6.5,
        "factors": made,
        "partition": (2,) * made.stages,
        "steps": steps,
        "stages": stages,
        "phases": {"build": 1.5},
        "resolved": {"schedule": made.schedule},
        "parity": _parity("fp32", 2e-7, 3e-6, 1e-6),
        "parity_double": _parity("fp64", 4e-16, 5e-14, 1e-10),
        "parity_double_run": "parity-made-up",
        "foreign_load": 0.0,
        "environment": {"versions": {"torch": "2.0"}, "host": "made-up", "git_commit": "abc", "git_dirty": False},
        "log": f"logs/{run_id}.log",
    }
    if fields.get("status", "ok") != "ok":
        defaults |= {"steps": (), "stages": (), "parity": None, "parity_double": None, "parity_double_run": ""}
    return Record(run_id=run_id, **{**defaults, **fields})


@pytest.fixture
def made_record() -> Callable[..., Record]:
    """Makes made-up records: see ``_made_record``."""
    return _made_record
