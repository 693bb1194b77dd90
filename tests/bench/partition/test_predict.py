"""What is predicted of a partition: step time by the simulation, memory by counting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bench.partition.predict import LayerCost, Link, Problem
from bench.partition.simulate import Schedule, simulate

LAYERS = tuple(
    LayerCost(
        forward_s=i,
        backward_s=10 * i,
        boundary_bytes=100 * i,
        update_s=0.5 * i,
        activation_bytes=1000 * i,
        state_bytes=100_000 * i,
    )
    for i in (1, 2, 3, 4)
)


def problem(name: Any = "1f1b", stages: int = 2, micro_batches: int = 3, **schedule: Any) -> Problem:
    return Problem(
        layers=LAYERS,
        stages=stages,
        schedule=Schedule(name=name, micro_batches=micro_batches, **schedule),
        link=Link(bandwidth_bytes_per_s=50, latency_s=0.25),
        input_bytes=7,
    )


def test_a_partition_becomes_the_pipeline_that_is_simulated() -> None:
    asked = problem(checkpoint="always")
    pipeline = asked.pipeline((1, 3))
    assert [(s.forward_s, s.backward_s, s.recompute_s, s.update_s) for s in pipeline.stages] == [
        (1, 10, 1, 0.5),
        (9, 90, 9, 4.5),
    ]
    assert [(b.forward_s, b.backward_s) for b in pipeline.boundaries] == [(2.25, 2.25)]
    assert pipeline.schedule == asked.schedule
    assert asked.step_time_s((1, 3)) == simulate(pipeline).step_time_s


def test_many_partitions_are_predicted_as_one_by_one() -> None:
    asked = problem(name="gpipe", sends="block")
    times = asked.step_times(np.array([[0, 1, 4], [0, 2, 4], [0, 3, 4]]))
    assert times.tolist() == [asked.step_time_s(cut) for cut in ((1, 3), (2, 2), (3, 1))]


@pytest.mark.parametrize(
    ("name", "micro_batches", "schedule", "expected"),
    [
        # Layers 1+2 | 3+4: states 300 k and 700 k, activations 3 k and 7 k, inputs 7 and 200.
        ("gpipe", 3, {}, (300_000 + 3 * 3000, 700_000 + 3 * 7000)),
        ("1f1b", 3, {}, (300_000 + 2 * 3000, 700_000 + 7000)),
        ("1f1b", 1, {}, (300_000 + 3000, 700_000 + 7000)),
        ("gpipe", 3, {"checkpoint": "always"}, (300_000 + 3 * 7 + 3000, 700_000 + 3 * 200 + 7000)),
        ("1f1b", 3, {"checkpoint": "always"}, (300_000 + 2 * 7 + 3000, 700_000 + 200 + 7000)),
        ("gpipe", 3, {"checkpoint": "except_last"}, (300_000 + 2 * 7 + 3000, 700_000 + 2 * 200 + 7000)),
        (
            "gpipe",
            3,
            {"checkpoint": "except_last", "last_first": False},
            (300_000 + 2 * 7 + 2 * 3000, 700_000 + 2 * 200 + 2 * 7000),
        ),
        ("1f1b", 3, {"checkpoint": "except_last"}, (300_000 + 7 + 2 * 3000, 700_000 + 200 + 7000)),
        ("gpipe", 1, {"checkpoint": "except_last"}, (300_000 + 3000, 700_000 + 7000)),
    ],
)
def test_memory_counts_what_is_in_flight(
    name: str, micro_batches: int, schedule: dict[str, Any], expected: tuple[float, ...]
) -> None:
    assert problem(name, micro_batches=micro_batches, **schedule).memory_bytes((2, 2)) == expected


@pytest.mark.parametrize("partition", [(4,), (0, 4), (2, 3), (5, -1), (1, 1, 2)])
def test_what_is_no_partition_is_refused(partition: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="does not cut 4 layers into 2 stages"):
        problem().step_time_s(partition)


def test_a_problem_without_sense_is_refused() -> None:
    schedule = Schedule(name="gpipe", micro_batches=1)
    with pytest.raises(ValueError, match="1 layers cannot fill 2 stages"):
        Problem(layers=LAYERS[:1], stages=2, schedule=schedule)
    with pytest.raises(ValueError, match="finite and not negative"):
        Problem(layers=(LayerCost(forward_s=math.nan, backward_s=1),), stages=1, schedule=schedule)
    with pytest.raises(ValueError, match="positive bandwidth"):
        Problem(layers=LAYERS, stages=2, schedule=schedule, link=Link(bandwidth_bytes_per_s=0))
