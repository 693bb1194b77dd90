"""Measured peaks beside the analytic count, for real models in real runs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.record import Record, load_all

PROJECT = Path(__file__).resolve().parents[2]
MODELS = {"resnet18": [], "vgg11": ["model.hidden=256"]}


def run(folder: Path, *overrides: str) -> list[Record]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bench", "-m", "profile=true", "stages=2", "batch_size=16", "micro_batches=4"),
            *("image_size=64", "warmup_steps=1", "steps=1", "trace=false", "baseline=false", "device=cpu"),
            *(f"results_dir={folder}", *overrides),
        ],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [r for r in load_all(folder)[0] if r.kind == "cell" and r.status == "ok"]


def check(records: list[Record]) -> None:
    for r in records:
        assert r.prediction is not None
        for stage, terms in zip(sorted(r.stages, key=lambda s: s.stage), r.prediction.memory, strict=True):
            assert stage.peak_allocated_bytes is not None
            parts = [
                stage.peak_parameters_bytes,
                stage.peak_gradients_bytes,
                stage.peak_optimizer_state_bytes,
                stage.peak_placed_bytes,
                stage.peak_activations_bytes,
            ]
            assert sum(p or 0 for p in parts) == stage.peak_allocated_bytes
            if terms.total < 2 * 2**20:
                continue
            ratio = stage.peak_allocated_bytes / terms.total
            f = r.factors
            where = (
                f"{f.library.name} {f.model.name} {f.schedule} {f.checkpoint} stage {stage.stage}: {ratio:.3f} {terms}"
            )
            assert 0.95 <= ratio <= 1.15, where


@pytest.mark.timeout(600)
def test_measured_over_counted_in_ci(tmp_path: Path) -> None:
    records = run(tmp_path, "library=torch", "schedule=1f1b", "checkpoint=never,always")
    assert len(records) == 2
    check(records)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model", "library"), itertools.product(MODELS, ["torchgpipe", "fairscale", "deepspeed", "torch"])
)
def test_measured_over_counted_in_every_library(tmp_path: Path, model: str, library: str) -> None:
    axes = ["schedule=gpipe,1f1b"] if library == "torch" else []
    records = run(tmp_path, f"library={library}", f"model={model}", *MODELS[model], *axes, "checkpoint=never,always")
    assert records
    check(records)
