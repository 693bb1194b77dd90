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
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])},
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
    ("model", "library"), list(itertools.product(MODELS, ["torchgpipe", "fairscale", "deepspeed", "torch"]))
)
def test_measured_over_counted_in_every_library(tmp_path: Path, model: str, library: str) -> None:
    axes = ["schedule=gpipe,1f1b"] if library == "torch" else []
    records = run(tmp_path, f"library={library}", f"model={model}", *MODELS[model], *axes, "checkpoint=never,always")
    assert records
    check(records)


WIDE = """
from torch import nn

def build(num_classes, width):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 16 * 16, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU(), nn.Linear(width, 512),
        nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, num_classes),
    )
"""


@pytest.mark.timeout(300)
def test_repeats_are_identical_and_a_wider_layer_moves_both_figures_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    common = ["model=custom", "model.target=wide.build", "image_size=16", "library=torch", "trial=0,1"]
    common += ["balance=manual", "balance.layers=[6,3]"]
    peaks: dict[int, dict[int, set[int]]] = {}
    counted: dict[int, dict[int, int]] = {}
    for width in (4096, 8192):
        for r in run(tmp_path / "results", *common, f"+model.width={width}"):
            if dict(r.factors.model.options)["width"] != width:
                continue
            assert r.prediction is not None
            for s in r.stages:
                assert s.peak_allocated_bytes is not None
                peaks.setdefault(width, {}).setdefault(s.stage, set()).add(s.peak_allocated_bytes)
                counted.setdefault(width, {})[s.stage] = r.prediction.memory[s.stage].total
    for stages in peaks.values():
        assert [len(found) for found in stages.values()] == [1, 1], "the two trials differ"
    measured_grew = [min(peaks[8192][k]) - min(peaks[4096][k]) for k in (0, 1)]
    counted_grew = [counted[8192][k] - counted[4096][k] for k in (0, 1)]
    assert measured_grew[1] == counted_grew[1] == 0  # the wide layer is the first stage's
    assert counted_grew[0] > 40 * 2**20
    assert measured_grew[0] / counted_grew[0] == pytest.approx(1, abs=0.05)
