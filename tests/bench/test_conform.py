"""Values that do not have their declared types are named by their place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.conform import misfit
from bench.factors import Balance, Factors, Library, Model
from bench.record import Step

STEP = Step(index=0, warmup=False, time_s=1.0, rank_times_s=(1.0, 2.0))
FACTORS = Factors(library=Library(name="torch", adapter="adapters.torch"), model=Model(name="m", target="a.b"))


@pytest.mark.parametrize(
    ("value", "changes", "said"),
    [
        (STEP, {}, ""),
        (STEP, {"time_s": 1, "loss": None}, ""),
        (STEP, {"time_s": True}, "time_s: True is no float"),
        (STEP, {"time_s": None}, "time_s: None is no float"),
        (STEP, {"index": 1.0}, "index: 1.0 is no int"),
        (STEP, {"warmup": 0}, "warmup: 0 is no bool"),
        (STEP, {"rank_times_s": [1.0]}, "rank_times_s: [1.0] is no list"),
        (STEP, {"rank_times_s": (1.0, "2")}, "rank_times_s: '2' is no float"),
        (STEP, {"loss": "low"}, "loss: 'low' is no float"),
        (FACTORS, {}, ""),
        (FACTORS, {"granularity": "bloc"}, "granularity: 'bloc' is not one of block, op"),
        (FACTORS, {"balance": Balance(name="manual", layers=("1",))}, "balance.layers: '1' is no int"),  # type: ignore[arg-type]
        (FACTORS, {"balance": {"name": "uniform"}}, "balance: {'name': 'uniform'} is no Balance"),
    ],
)
def test_the_place_is_named(value: Any, changes: dict[str, Any], said: str) -> None:
    assert misfit(replace(value, **changes)) == said
