"""The tolerance where a model amplifies its own rounding, and that the gate still closes there."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.factors import Factors, Model
from bench.jobs import Job
from bench.registry import libraries
from bench.worker import parity
from bench.worker.build import Work, forget_model
from bench.worker.channel import Channel
from bench.worker.parity import PARITY_OPTIMIZER
from bench.worker.ranks import join
from bench.worker.reference import obtain, read, worst

sys.path.insert(0, str(Path(__file__).parent))
from sabotage import sabotaged

CPU = torch.device("cpu")


def job(tmp_path: Path, image_size: int) -> Job:
    factors = Factors(
        library=libraries()["torchgpipe"],
        model=Model(name="resnet18", target="models.resnet.resnet18"),
        image_size=image_size,
        num_classes=10,
        batch_size=8,
        micro_batches=4,
        schedule="gpipe",
        device="cpu",
    )
    return Job(
        run_id="x",
        cell_id="x",
        factors=factors,
        partition=(8, 7),
        world_size=1,
        warmup_steps=0,
        steps=0,
        device_indices=(),
        rendezvous="",
        cache_dir=str(tmp_path),
        lock_paths=(),
        double_parity=True,
        timeout_s=60,
        parent_pid=os.getpid(),
    )


def channel() -> Channel:
    return Channel(0, os.open(os.devnull, os.O_WRONLY))


def test_batch_norm_over_two_values_is_judged_by_the_references_own_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 32×32 ResNet-18 ends in 1×1 maps, and two samples a micro-batch leave BatchNorm two values: three
    float64 steps then differ by 5e-7 between two orders of the micro-batches of the *same* plain loop.
    Every library but those that keep the reference's order was refused for that."""
    made = job(tmp_path, 32)
    ranks = join(made, 0, grouped=False)
    result = parity.check_double(made, ranks, channel(), calls=4).result
    assert result is not None
    assert result.gradient_error > 1e-10, "no longer ill-conditioned: the test needs another model"
    assert result.passed
    assert result.gradient_tolerance > 1e-10, "what was allowed stands in the record"
    adapter = importlib.import_module("adapters.torchgpipe")
    for fault in ("learning_rate_silently", "dropped_micro_batch"):
        monkeypatch.setattr(adapter, "build", sabotaged(importlib.reload(adapter).build, fault))
        caught = parity.check_double(made, ranks, channel(), calls=4).result
        assert caught is not None
        assert not caught.passed, fault
    importlib.reload(adapter)
    forget_model()


def test_a_well_conditioned_model_is_held_to_the_fixed_tolerance(tmp_path: Path) -> None:
    made = job(tmp_path, 64)
    result = parity.check_double(made, join(made, 0, grouped=False), channel(), calls=4).result
    assert result is not None
    assert result.passed
    assert (result.gradient_tolerance, result.update_tolerance) == (1e-10, 1e-10)
    forget_model()


def test_a_reference_is_computed_once_and_again_when_what_it_depends_on_changes(tmp_path: Path) -> None:
    made = job(tmp_path, 8)
    factors = replace(made.factors, model=Model(name="tiny", target="tiny.build"))
    work = Work(dtype=torch.float32, batch_size=8, optimizer=PARITY_OPTIMIZER, dropout=False)
    sent = channel()

    def path(changed: Factors = factors, steps: int = 1) -> Path:
        found, _ = obtain(changed, work, steps, CPU, noise=False, cache_dir=tmp_path, channel=sent)
        assert found is not None
        return found

    first = path()
    stamp = first.stat().st_mtime_ns
    assert path() == first
    assert first.stat().st_mtime_ns == stamp
    others = {path(factors.replace(seed=1)), path(factors.replace(micro_batches=2)), path(steps=2)}
    assert len(others | {first}) == 4
    assert read(first).device == "cpu"
    forget_model()


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 0.0], [2.0, 0.0], 0.5),
        ([float("nan"), 0.0], [1.0, 0.0], float("inf")),
        ([1.0, 0.0], [0.0, 0.0], float("inf")),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1.0], [1.0, 1.0], float("inf")),
    ],
)
def test_the_worst_layers_norm_relative_error(found: list[float], expected: list[float], error: float) -> None:
    assert worst({3: torch.tensor(found)}, {3: torch.tensor(expected)}) == (error, 3)
