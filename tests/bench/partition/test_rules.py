"""The balance rules, and each mistake they name."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.errors import UserError
from bench.factors import Balance
from bench.partition.profile import Profile
from bench.partition.rules import max_memory_bytes, partition
from bench.partition.simulate import Schedule
from bench.partition.solver import min_max
from tests.bench.partition.made import KEY, LAYER

TEN = [7, 1, 1, 1, 1, 1, 1, 1, 1, 9]


def test_uniform_gives_the_earlier_stages_one_more() -> None:
    assert partition(Balance(name="uniform"), TEN, 4) == (3, 3, 2, 2)
    assert partition(Balance(name="uniform"), TEN, 5) == (2, 2, 2, 2, 2)


@given(st.integers(1, 60), st.data())
def test_uniform_spreads_every_layer(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    sizes = partition(Balance(name="uniform"), [1] * layers, stages)
    assert len(sizes) == stages
    assert sum(sizes) == layers
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_parameters_makes_the_largest_stage_as_small_as_possible() -> None:
    assert partition(Balance(name="parameters"), TEN, 3) == (1, 8, 1)
    assert partition(Balance(name="parameters"), TEN, 3) == min_max(TEN, 3)


def test_manual_is_taken_as_given() -> None:
    assert partition(Balance(name="manual", layers=(1, 2, 7)), TEN, 3) == (1, 2, 7)


@pytest.mark.parametrize(
    ("balance", "stages", "key", "problem"),
    [
        (Balance(name="uniform"), 11, "stages", "the model has 10 layers"),
        (Balance(name="manual", layers=(5, 6)), 2, "balance.layers", "adds up to 11, the model has 10"),
        (Balance(name="manual", layers=(5, 5)), 3, "balance.layers", "2 numbers for 3 stages"),
        (Balance(name="manual", layers=(10, 0)), 2, "balance.layers", "at least one layer"),
        (Balance(name="manual", layers=(11, -1)), 2, "balance.layers", "at least one layer"),
        (Balance(name="manual", layers=()), 2, "balance.layers", "0 numbers for 2 stages"),
        (Balance(name="manual"), 2, "balance.layers", "needs its numbers of layers"),
        (Balance(name="best"), 2, "balance", "allowed are"),
    ],
)
def test_a_mistake_names_its_key_in_one_line(balance: Balance, stages: int, key: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        partition(balance, TEN, stages)
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key}=")
    assert "\n" not in str(caught.value)


PROFILE = Profile(
    key=KEY,
    layers=tuple(
        dataclasses.replace(
            LAYER,
            layer=i,
            forward_s=time / 3,
            backward_s=2 * time / 3,
            forward_flops=flops,
            backward_flops=2 * flops,
            state_bytes=state,
            saved_bytes=saved,
            output_bytes=8,
        )
        for i, (time, flops, state, saved) in enumerate(
            [(6, 1, 12, 900), (1, 1, 12, 900), (1, 1, 12, 0), (1, 9, 12, 0), (1, 1, 12, 0), (2, 1, 9000, 0)]
        )
    ),
)
SCHEDULE = Schedule(name="1f1b", micro_batches=4)


def profiled(name: str, stages: int = 2, **options: Any) -> tuple[int, ...]:
    balance = Balance(name=name, options=tuple(options.items()))
    return partition(balance, [7] * 6, stages, profile=PROFILE, schedule=SCHEDULE)


def test_each_profiled_rule_looks_at_its_own_cost() -> None:
    assert profiled("time") == (1, 5)
    assert profiled("flops") == (3, 3)
    # The last layer's state outweighs all else, so it stands alone.
    assert profiled("size") == (5, 1)
    assert profiled("optimal") == (1, 5)


def test_size_is_the_smallest_possible_largest_peak() -> None:
    for stages in (2, 3, 4):
        problem = PROFILE.problem(stages, SCHEDULE)
        every = (
            tuple(b - a for a, b in itertools.pairwise((0, *cuts, 6)))
            for cuts in itertools.combinations(range(1, 6), stages - 1)
        )
        best = min(max(problem.memory_bytes(p)) for p in every)
        assert max(problem.memory_bytes(profiled("size", stages))) == best


def test_optimal_keeps_to_the_limit_or_names_the_layer() -> None:
    assert profiled("optimal", max_memory="1TiB") == profiled("optimal")
    with pytest.raises(UserError, match=r"balance\.max_memory.*layer 5"):
        profiled("optimal", max_memory=8000)


@pytest.mark.parametrize(
    ("asked", "size"),
    [(1000, 1000), ("1000", 1000), ("2KiB", 2048), ("1.5 GiB", 1.5 * 2**30), ("2MB", 2e6), (None, None)],
)
def test_an_amount_of_memory(asked: Any, size: float | None) -> None:
    assert max_memory_bytes(Balance(name="optimal", options=(("max_memory", asked),))) == size


@pytest.mark.parametrize("asked", ["", "much", "1XB", "-1", 0, True, "1e400", "."])
def test_what_is_no_amount_of_memory(asked: Any) -> None:
    with pytest.raises(UserError, match=r"balance\.max_memory"):
        max_memory_bytes(Balance(name="optimal", options=(("max_memory", asked),)))
