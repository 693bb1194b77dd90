"""The live-storage count on the CPU: against a count by hand, and the same each time."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from adapters.protocol import Pipeline, Task
from bench.factors import Optimizer
from bench.registry import libraries
from bench.worker.build import loss, make_optimizer
from bench.worker.memory import peaks
from bench.worker.ranks import Ranks

WIDTH, SAMPLES = 512, 64


def build(name: str, layers: list[nn.Module], partition: tuple[int, ...], m: int = 1) -> tuple[Ranks, Pipeline]:
    cpu = torch.device("cpu")
    stages = len(partition)
    task = Task(
        model=nn.Sequential(*layers),
        partition=partition,
        stages=stages,
        virtual_stages=1,
        rank=0,
        world_size=1,
        devices=(cpu,) * stages,
        batch_size=SAMPLES,
        micro_batches=m,
        input_shape=(SAMPLES // m, WIDTH),
        num_classes=WIDTH,
        dtype=torch.float32,
        schedule="gpipe" if stages > 1 else "none",
        checkpoint="never",
        loss=loss,
        make_optimizer=make_optimizer(Optimizer(lr=0.01, momentum=0.9)),
    )
    pipeline: Pipeline = importlib.import_module(libraries()[name].adapter).build(task)
    return Ranks(rank=0, world_size=1, devices=task.devices, local=(cpu,), group=None), pipeline


def measured(name: str, layers: list[nn.Module], partition: tuple[int, ...], m: int = 1) -> dict[int, int]:
    ranks, pipeline = build(name, layers, partition, m)
    batch = pipeline.place(torch.randn(SAMPLES, WIDTH), torch.randint(WIDTH, (SAMPLES,)))
    pipeline.step(batch)  # allocates the momentum
    found = {stage: peak.allocated for stage, peak in peaks(ranks, pipeline, batch, lambda k: k).items()}
    pipeline.close()
    return found


def linear(width: int = WIDTH) -> nn.Linear:
    return nn.Linear(width, width, bias=False)


def test_one_linear_layer_counted_by_hand() -> None:
    weight, activation, labels = 4 * WIDTH * WIDTH, 4 * SAMPLES * WIDTH, 8 * SAMPLES
    # The peak is at the end of the backward: weight, gradient, momentum; input, labels; the output's gradient.
    (peak,) = measured("single", [linear()], (1,)).values()
    assert 0 <= peak - (3 * weight + activation + labels + activation) <= 64


def test_doubling_a_layers_parameters_shows_in_its_own_stage_alone() -> None:
    small = measured("torchgpipe", [linear(), linear()], (1, 1))
    big = measured("torchgpipe", [nn.Sequential(linear(), linear()), linear()], (1, 1))
    weight, activation = 4 * WIDTH * WIDTH, 4 * SAMPLES * WIDTH
    assert big[0] - small[0] == pytest.approx(3 * weight + activation, abs=2 * activation)
    assert abs(big[1] - small[1]) <= activation


@pytest.mark.parametrize("name", ["torchgpipe", "fairscale"])
def test_the_same_bytes_on_repeat(name: str) -> None:
    layers = [2, 2]
    first = measured(name, [linear() for _ in range(4)], tuple(layers), m=4)
    assert measured(name, [linear() for _ in range(4)], tuple(layers), m=4) == first


def test_recomputed_or_not_nothing_is_left_hooked() -> None:
    ranks, pipeline = build("torchgpipe", [linear(), linear()], (1, 1), 2)
    batch = pipeline.place(torch.randn(SAMPLES, WIDTH), torch.randint(WIDTH, (SAMPLES,)))
    peaks(ranks, pipeline, batch, lambda k: k)
    for module in pipeline.stages().values():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
