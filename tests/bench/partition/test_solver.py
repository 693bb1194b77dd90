"""The exact partitioner against brute force, and its law for ties."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.partition.solver import min_max, min_max_of


def partitions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, layers)))


def stage_costs(costs: Sequence[float], partition: tuple[int, ...]) -> list[Fraction]:
    ends = [0, *accumulate(partition)]
    return [sum(map(Fraction, costs[a:b]), Fraction()) for a, b in pairwise(ends)]


def by_law(costs: Sequence[float], partition: tuple[int, ...]) -> tuple[list[Fraction], tuple[int, ...]]:
    """The documented order: largest of all stages, of the first p − 1, …; then the fullest later stages."""
    so_far = list(accumulate(stage_costs(costs, partition), max))
    return so_far[::-1], tuple(-size for size in reversed(partition))


def random_costs(generator: random.Random, layers: int) -> list[float]:
    # Integers as well as reals, and few distinct values: ties and zeros are where a search goes wrong.
    kind = generator.randrange(3)
    if kind == 0:
        return [generator.randint(0, 4) for _ in range(layers)]
    if kind == 1:
        return [generator.randint(0, 4) / 10 for _ in range(layers)]
    return [generator.lognormvariate(0, 1) for _ in range(layers)]


def test_equals_brute_force_on_2000_random_vectors() -> None:
    generator = random.Random(0)
    for _ in range(2000):
        layers = generator.randint(1, 14)
        stages = generator.randint(1, min(6, layers))
        costs = random_costs(generator, layers)
        sums = [Fraction(0), *accumulate(map(Fraction, costs))]
        best = min(
            max(sums[b] - sums[a] for a, b in pairwise((0, *cuts, layers)))
            for cuts in combinations(range(1, layers), stages - 1)
        )
        assert max(stage_costs(costs, min_max(costs, stages))) == best, (costs, stages)


def test_ties_fall_as_documented() -> None:
    generator = random.Random(1)
    for _ in range(400):
        layers = generator.randint(1, 9)
        stages = generator.randint(1, min(5, layers))
        costs = random_costs(generator, layers)
        expected = min(partitions(layers, stages), key=lambda p: by_law(costs, p))
        assert min_max(costs, stages) == expected, costs


@pytest.mark.parametrize(
    ("costs", "stages", "expected"),
    [
        ([1, 1, 1, 1, 1], 2, (2, 3)),
        ([1, 1, 1, 1, 9, 1, 1], 4, (2, 2, 1, 2)),  # a dear layer leaves the stages before it balanced
        ([1, 1, 1, 1, 12], 3, (2, 2, 1)),
        ([0.1] * 7, 3, (2, 2, 3)),  # 0.1 + 0.1 + 0.1 rounds differently from place to place
        ([0, 0, 0, 0], 2, (1, 3)),
        ([5], 1, (1,)),
    ],
)
def test_small_cases(costs: list[float], stages: int, expected: tuple[int, ...]) -> None:
    assert min_max(costs, stages) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=60), st.data())
def test_every_layer_once_and_no_empty_stage(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    partition = min_max(costs, stages)
    assert len(partition) == stages
    assert sum(partition) == len(costs)
    assert min(partition) >= 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=40), st.data())
def test_one_stage_more_is_never_worse(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs) - 1))
    few, more = (max(stage_costs(costs, min_max(costs, n))) for n in (stages, stages + 1))
    assert more <= few
    assert few >= max(max(costs), Fraction(sum(costs), stages))


@pytest.mark.parametrize("unit", [1, 1e-6])
def test_2000_layers_into_256_stages_in_under_2_s(unit: float) -> None:
    generator = random.Random(1)
    costs = [unit * generator.randint(1, 10**7) for _ in range(2000)]
    start = time.process_time()
    partition = min_max(costs, 256)
    assert time.process_time() - start < 2
    assert len(partition) == 256
    assert sum(partition) == 2000


def test_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="2 layers cannot fill 3 stages"):
        min_max([1, 1], 3)


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan")])
def test_costs_without_an_order_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        min_max([1, bad, 1], 2)


def test_stage_dependent_costs_equal_brute_force() -> None:
    generator = random.Random(3)
    for _ in range(500):
        layers = generator.randint(1, 9)
        stages = generator.randint(1, min(5, layers))
        # What grows with the end and need not with the start, another thing in every stage.
        matrices = [np.zeros((layers + 1, layers + 1)) for _ in range(stages)]
        for matrix in matrices:
            for i in range(layers):
                matrix[i, i + 1 :] = np.cumsum([generator.randint(0, 3) for _ in range(layers - i)])
                matrix[i] += generator.randint(0, 3)

        def law(partition: tuple[int, ...], matrices: list[Any] = matrices) -> tuple[list[float], tuple[int, ...]]:
            ends = [0, *accumulate(partition)]
            costs = [matrices[s][a, b] for s, (a, b) in enumerate(pairwise(ends))]
            return list(accumulate(costs, max))[::-1], tuple(-size for size in reversed(partition))

        found = min_max_of(matrices)
        assert law(found) == min(law(p) for p in partitions(layers, stages))


def test_sums_of_layers_are_cut_alike_by_both() -> None:
    generator = random.Random(4)
    for _ in range(200):
        layers = generator.randint(1, 12)
        stages = generator.randint(1, layers)
        costs = [generator.randint(0, 5) for _ in range(layers)]
        sums = np.array([0, *accumulate(costs)], dtype=float)
        assert min_max_of([sums[None, :] - sums[:, None]] * stages) == min_max(costs, stages)
