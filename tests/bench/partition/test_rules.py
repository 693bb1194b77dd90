"""The balance rules, and each mistake they name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.errors import UserError
from bench.factors import Balance
from bench.partition.rules import partition
from bench.partition.solver import min_max

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
