"""The optimal balance against all partitions, under memory limits, and at scale."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from bench.errors import UserError
from bench.partition import optimal as module
from bench.partition.optimal import Infeasible, optimal
from bench.partition.predict import LayerCost, Link, Problem
from bench.partition.simulate import Schedule, simulate
from bench.partition.solver import min_max


def random_problem(generator: random.Random, layers: int, stages: int, micro_batches: int | None = None) -> Problem:
    spread = generator.choice([0.0, 0.3, 1.0])
    costs = []
    for _ in range(layers):
        forward = generator.lognormvariate(0, spread)
        costs.append(
            LayerCost(
                forward_s=forward,
                backward_s=forward * generator.uniform(1.5, 2.5),
                boundary_bytes=generator.choice([0, 1, 10, 100]) * generator.random(),
                update_s=generator.choice([0, 0.3]) * generator.random(),
                activation_bytes=10 * generator.random(),
                state_bytes=20 * generator.random(),
            )
        )
    schedule = Schedule(
        name=generator.choice(["gpipe", "1f1b"]),
        micro_batches=micro_batches or generator.randint(1, 16),
        checkpoint=generator.choice(["never", "except_last", "always"]),
        sends=generator.choice(["overlap", "block"]),
        last_first=generator.random() < 0.5,
    )
    link = Link(
        bandwidth_bytes_per_s=generator.choice([10, 50, 1000, math.inf]), latency_s=generator.choice([0.0, 0.1])
    )
    return Problem(layers=tuple(costs), stages=stages, schedule=schedule, link=link)


def small_problem(generator: random.Random) -> Problem:
    layers = generator.randint(1, 10)
    return random_problem(generator, layers, generator.randint(1, min(4, layers)))


def every_partition(problem: Problem) -> list[tuple[int, ...]]:
    count = len(problem.layers)
    cuts = combinations(range(1, count), problem.stages - 1)
    return [tuple(np.diff((0, *inner, count)).tolist()) for inner in cuts]


def best_of_all(problem: Problem) -> float:
    ends = np.array([np.cumsum((0, *partition)) for partition in every_partition(problem)])
    return float(problem.step_times(ends).min())


def must_be_best(problem: Problem) -> None:
    choice = optimal(problem)
    assert sum(choice.partition) == len(problem.layers)
    assert len(choice.partition) == problem.stages
    assert min(choice.partition) >= 1
    assert choice.step_time_s == simulate(problem.pipeline(choice.partition)).step_time_s
    assert choice.step_time_s <= best_of_all(problem) * 1.01, problem


def test_500_random_instances_are_within_1_percent_of_the_best() -> None:
    generator = random.Random(0)
    for _ in range(500):
        must_be_best(small_problem(generator))


@pytest.fixture
def never_enumerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems take the way of large ones."""
    monkeypatch.setattr(module, "ENUMERATED", 1)


@pytest.mark.usefixtures("never_enumerate")
@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_the_search_alone_is_within_1_percent_too(count: int) -> None:
    generator = random.Random(0)
    for _ in range(count):
        must_be_best(small_problem(generator))


@pytest.mark.usefixtures("never_enumerate")
@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_the_search_is_within_1_percent_on_up_to_16_layers_and_6_stages(count: int) -> None:
    generator = random.Random(1)
    for _ in range(count):
        must_be_best(random_problem(generator, generator.randint(12, 16), generator.randint(4, 6)))


def equal_layers(count: int, **cost: Any) -> tuple[LayerCost, ...]:
    return (LayerCost(forward_s=1, backward_s=2, **cost),) * count


def test_equal_layers_and_free_boundaries_are_cut_evenly() -> None:
    problem = Problem(layers=equal_layers(12), stages=4, schedule=Schedule(name="1f1b", micro_batches=8))
    choice = optimal(problem)
    assert choice.partition == (3, 3, 3, 3)
    assert choice.step_time_s == (8 + 3) * 9
    assert choice.proven


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("sends", ["overlap", "block"])
def test_a_dear_boundary_is_not_cut(name: Any, sends: Any) -> None:
    layers = list(equal_layers(8, boundary_bytes=1))
    layers[3] = dataclasses.replace(layers[3], boundary_bytes=1000)
    problem = Problem(
        layers=tuple(layers),
        stages=2,
        schedule=Schedule(name=name, micro_batches=4, sends=sends),
        link=Link(bandwidth_bytes_per_s=100),
    )
    # The cut in the middle balances best, and takes ten seconds a transfer.
    assert min_max([layer.forward_s for layer in layers], 2) == (4, 4)
    assert optimal(problem).partition in {(3, 5), (5, 3)}


def test_the_schedule_decides_where_memory_is_short() -> None:
    layers = equal_layers(12, activation_bytes=1)
    for name, expected in (("gpipe", (4, 4, 4)), ("1f1b", (3, 4, 5))):
        schedule = Schedule(name=name, micro_batches=6)  # type: ignore[arg-type]
        problem = Problem(layers=layers, stages=3, schedule=schedule)
        choice = optimal(problem, max_memory_bytes=24 if name == "gpipe" else 9)
        assert choice.partition == expected
        assert choice.memory_bytes == ((24, 24, 24) if name == "gpipe" else (9, 8, 5))


def under_limits(generator: random.Random, count: int) -> tuple[int, int]:
    """How many problems had a partition within the limit, and how many had none; each one checked."""
    found = none = 0
    for _ in range(count):
        problem = small_problem(generator)
        memory = {partition: problem.memory_bytes(partition) for partition in every_partition(problem)}
        limit = generator.uniform(0.9, 1.2) * min(max(held) for held in memory.values())
        within = [partition for partition, held in memory.items() if max(held) <= limit]
        if within:
            found += 1
            choice = optimal(problem, limit)
            assert choice.memory_bytes == memory[choice.partition]
            assert choice.partition in within
            assert choice.step_time_s <= min(map(problem.step_time_s, within)) * 1.01
        else:
            none += 1
            with pytest.raises(Infeasible) as caught:
                optimal(problem, limit)
            assert 0 <= caught.value.layer < len(problem.layers)
    return found, none


def test_the_best_within_a_memory_limit() -> None:
    assert min(under_limits(random.Random(2), 150)) > 20


@pytest.mark.usefixtures("never_enumerate")
def test_the_search_keeps_to_a_memory_limit() -> None:
    assert min(under_limits(random.Random(3), 40)) > 5


def test_a_layer_that_fits_nowhere_is_named() -> None:
    layers = list(equal_layers(5, state_bytes=10))
    layers[3] = dataclasses.replace(layers[3], state_bytes=500)
    problem = Problem(layers=tuple(layers), stages=2, schedule=Schedule(name="1f1b", micro_batches=2))
    with pytest.raises(
        UserError, match=r"balance\.max_memory=100: any stage with layer 3 needs 500 bytes or more"
    ) as caught:
        optimal(problem, 100)
    assert isinstance(caught.value, Infeasible)
    assert caught.value.layer == 3
    assert caught.value.key == "balance.max_memory"
    assert "\n" not in str(caught.value)


def test_the_first_layer_beyond_what_all_stages_hold_is_named() -> None:
    problem = Problem(layers=equal_layers(9, state_bytes=10), stages=2, schedule=Schedule(name="1f1b", micro_batches=2))
    with pytest.raises(Infeasible, match="layer 6 finds no place: 2 stages filled in order hold at most the 6 before"):
        optimal(problem, 39)
    assert optimal(problem, 50).partition in {(4, 5), (5, 4)}


@pytest.mark.parametrize("micro_batches", [8, 32, 128])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_200_layers_into_16_stages_in_under_2_s(name: Any, micro_batches: int) -> None:
    problem = random_problem(random.Random(micro_batches), 200, 16, micro_batches)
    problem = dataclasses.replace(problem, schedule=dataclasses.replace(problem.schedule, name=name))
    start = time.process_time()
    choice = optimal(problem)
    assert time.process_time() - start < 2
    assert not choice.proven
    weights = [layer.forward_s + layer.backward_s for layer in problem.layers]
    assert choice.step_time_s <= problem.step_time_s(min_max(weights, 16))


def test_the_same_problem_has_the_same_answer() -> None:
    problem = random_problem(random.Random(7), 40, 6)
    assert optimal(problem) == optimal(problem)


@pytest.mark.usefixtures("never_enumerate")
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("latency_s", [0.0, 5.0])
def test_layers_without_cost_are_cut_all_the_same(name: Any, latency_s: float) -> None:
    problem = Problem(
        layers=(LayerCost(forward_s=0, backward_s=0),) * 7,
        stages=3,
        schedule=Schedule(name=name, micro_batches=9),
        link=Link(latency_s=latency_s),
    )
    assert sum(optimal(problem).partition) == 7
