"""The one expansion of a sweep, against Hydra's own composition."""

from __future__ import annotations

import random
import time

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from bench.config import from_tree
from bench.errors import UserError
from bench.expand import expand
from bench.factors import Factors
from bench.plan import plan

AXES = {
    "library": ["single", "ddp", "torchgpipe", "fairscale", "deepspeed", "torch"],
    "model": ["resnet18", "vgg11", "resnet50"],
    "balance": ["uniform", "parameters"],
    "stages": [1, 2, 4],
    "micro_batches": [1, 4, 8],
    "precision": ["fp32", "bf16"],
    "share_devices": ["true", "false"],
    "optimizer.lr": [0.1, 0.01, 1e-3],
    "seed": [0, 7],
    "image_size": [32, 64],
}


def by_hydra(overrides: list[str]) -> Factors:
    with initialize_config_module("conf", version_base="1.3"):
        config = compose("config", overrides)
    tree = OmegaConf.to_container(config)
    assert isinstance(tree, dict)
    return from_tree({str(k): v for k, v in tree.items()})[0]


@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_equals_hydras_compose_on_random_cells(count: int) -> None:
    generator = random.Random(count)
    compared = 0
    while compared < count:
        keys = generator.sample(list(AXES), generator.randint(1, 5))
        chosen = {key: generator.sample(AXES[key], generator.randint(1, 2)) for key in keys}
        found = expand([f"{key}={','.join(map(str, values))}" for key, values in chosen.items()]).factors
        points = [[]]
        for key, values in chosen.items():
            points = [[*point, f"{key}={value}"] for point in points for value in values]
        assert len(found) == len(points)
        for point in generator.sample(points, min(len(points), 4)):
            assert by_hydra(point) in found
            compared += 1


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("stages=1,2,4", [1, 2, 4]),
        ("stages=choice(1,3)", [1, 3]),
        ("stages=range(1,4)", [1, 2, 3]),
        ("stages=8", [8]),
    ],
)
def test_hydras_grammar_of_values(override: str, values: list[int]) -> None:
    assert [f.stages for f in expand([override]).factors] == values


def test_lists_are_values_and_can_be_swept() -> None:
    found = expand(["balance=manual", "balance.layers=[8,7],[9,6]"]).factors
    assert [f.balance.layers for f in found] == [(8, 7), (9, 6)]


def test_the_command_line_beats_the_experiments_own_axes() -> None:
    assert {f.stages for f in expand(["experiment=smoke"]).factors} == {2}
    swept = expand(["experiment=smoke", "stages=1,4", "library=torch"])
    assert [(f.library.name, f.stages, f.batch_size) for f in swept.factors] == [("torch", 1, 8), ("torch", 4, 8)]


def test_trials_are_a_setting_of_the_sweep_and_no_factor() -> None:
    sweep = expand(["trial=0,1,2", "stages=1,2"])
    assert sweep.settings.trials == (0, 1, 2)
    assert len(sweep.factors) == 2


def test_a_setting_cannot_be_swept() -> None:
    with pytest.raises(UserError, match=r"steps=5,10: is a setting of the run"):
        expand(["steps=5,10"])


def test_the_last_of_several_overrides_counts_and_their_order_does_not() -> None:
    assert expand(["stages=2", "stages=4"]).factors == expand(["stages=4"]).factors
    assert expand(["stages=4", "seed=3"]).factors == expand(["seed=3", "stages=4"]).factors


@pytest.mark.timeout(60)
def test_20000_cells_are_expanded_and_planned_in_seconds() -> None:
    start = time.monotonic()
    sweep = expand(["experiment=paper", "seed=range(0,80)", "micro_batches=4,8", "exclude=[]"])
    assert len(sweep.factors) >= 20_000
    plan(sweep)
    assert time.monotonic() - start < 15


AXES_OF_THREE = ["library=torch,ddp,single", "stages=1,2,4"]


def test_a_studys_exclusions_are_data() -> None:
    rules = "exclude=[{library: [ddp, single], stages: [2, 4]}, {library: torch, stages: 1}]"
    sweep = expand([*AXES_OF_THREE, rules])
    assert [(f.library.name, f.stages) for f in sweep.factors] == [
        ("torch", 2), ("torch", 4), ("ddp", 1), ("single", 1),
    ]  # fmt: skip
    assert sweep.excluded == 5
    assert not sweep.factors[0].model.options


def test_an_experiment_brings_its_own_exclusions_and_the_command_line_lifts_them() -> None:
    paper = expand(["experiment=paper"])
    assert paper.excluded > 0
    assert not any(f.stages == 1 and f.balance.name == "parameters" for f in paper.factors)
    everything = expand(["experiment=paper", "exclude=[]"])
    assert everything.excluded == 0
    assert len(everything.factors) == len(paper.factors) + paper.excluded


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("{stages: 1}", "must be a list of mappings"),
        ("[{stage: 1}]", "exclude.stage=1: there is no such factor; did you mean stages?"),
        ("[{library: torchgpip}]", "did you mean torchgpipe?"),
        ("[{stages: two}]", "exclude.stages=two: must be a whole number"),
        ("[{stages: [1, 2, 4]}]", "leaves nothing of the study"),
        ("[{optimizer.rate: 1}]", "there is no such factor"),
    ],
)
def test_a_mistake_in_an_exclusion_is_named(rules: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        expand([*AXES_OF_THREE, f"exclude={rules}"])
    assert said in str(error.value)
