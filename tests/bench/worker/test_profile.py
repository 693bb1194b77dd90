"""What the profile says of layers whose costs are known by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bench.worker.profile import LayerRun, count_layers, measure_layers
from bench.worker.ranks import Ranks
from tests.adapters.tiny_models import residual
from tests.bench.partition.sleepy import Sleep


def runs_of(*layers: nn.Module) -> list[LayerRun]:
    return [LayerRun(layer, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)) for layer in layers]


class _Silent:
    def alive(self, note: str) -> None:
        pass


ALONE = Ranks(rank=0, world_size=1, devices=(torch.device("cpu"),), local=(torch.device("cpu"),), group=None)


def test_flops_and_bytes_of_known_layers() -> None:
    # 5 samples: 7 → 11 (saves its input, the placed x), ReLU (saves its output), 11 → 3 (saves the
    # same tensor, its input), Flatten (nothing).
    first, relu, second, flat = runs_of(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 3), nn.Flatten())
    count_layers([first, relu, second, flat], torch.randn(5, 7))
    assert first.counts == {
        "forward_flops": 2 * 5 * 7 * 11,
        # The first layer's input asks for no gradient: only that of the weight.
        "backward_flops": 2 * 5 * 7 * 11,
        "saved_bytes": 0,
        "saved_input_bytes": 4 * 5 * 7,
        "output_bytes": 4 * 5 * 11,
        "state_bytes": 3 * 4 * (7 * 11 + 11),
        "largest_parameter_bytes": 4 * 7 * 11,
    }
    assert relu.counts["saved_bytes"] == 4 * 5 * 11
    assert relu.counts["state_bytes"] == 0
    assert second.counts["saved_bytes"] == 0
    assert second.counts["saved_input_bytes"] == 4 * 5 * 11
    assert second.counts["backward_flops"] == 2 * second.counts["forward_flops"] == 2 * 2 * 5 * 11 * 3
    assert flat.counts["saved_bytes"] == flat.counts["forward_flops"] == 0


def test_bf16_halves_the_bytes() -> None:
    runs = runs_of(nn.Linear(7, 11), nn.ReLU())
    for run in runs:
        run.layer.bfloat16()
    count_layers(runs, torch.randn(5, 7).bfloat16())
    assert runs[1].counts["saved_bytes"] == 2 * 5 * 11
    assert runs[0].counts["state_bytes"] == 3 * 2 * (7 * 11 + 11)


def test_sleeping_layers_take_as_long_as_they_sleep() -> None:
    runs = runs_of(nn.Linear(3, 3), Sleep(0.01), Sleep(0.03))
    repetitions = measure_layers(ALONE, _Silent(), runs, torch.randn(2, 3))  # type: ignore[arg-type]
    assert repetitions >= 5
    for run, asked in zip(runs[1:], (0.01, 0.03), strict=True):
        found = run.medians()
        assert len(run.times["forward_s"]) == repetitions
        assert asked <= found["forward_s"] < asked + 0.005
        assert 2 * asked <= found["backward_s"] < 2 * asked + 0.005
    assert runs[0].medians()["forward_s"] < 0.005


def test_measuring_leaves_no_gradients_behind() -> None:
    runs = runs_of(nn.Linear(3, 3), nn.ReLU())
    measure_layers(ALONE, _Silent(), runs, torch.randn(2, 3))  # type: ignore[arg-type]
    assert all(p.grad is None for run in runs for p in run.parameters)


@pytest.mark.parametrize("boundary", [3, 5, 7])
def test_a_pair_at_a_boundary_counts_as_both(boundary: int) -> None:
    runs = runs_of(*residual(num_classes=10))
    x = torch.randn(2, 3, 8, 8)
    count_layers(runs, x)
    value: Any = x
    for run in runs[:boundary]:
        value = run.layer(value)
    assert runs[boundary - 1].counts["output_bytes"] == sum(t.numel() * 4 for t in value)
    assert isinstance(value, tuple)
