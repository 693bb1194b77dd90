"""The figures that a record carries of its partition, worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from bench.partition.prediction import predict
from bench.partition.profile import Profile
from bench.partition.simulate import Schedule
from tests.bench.partition.made import KEY, LAYER

# Layers of 1, 2, 3 times the first one's seconds (forward 1, backward 2, update 0.25).
PROFILE = Profile(
    key=KEY,
    layers=tuple(
        dataclasses.replace(LAYER, layer=i, forward_s=i + 1.0, backward_s=2.0 * (i + 1), output_bytes=100 + i)
        for i in range(3)
    ),
)


def test_stages_and_boundaries() -> None:
    found = predict(PROFILE, (2, 1), Schedule(name="gpipe", micro_batches=2), overlap=True)
    assert found.stage_times_s == (9, 9)
    assert found.imbalance == 1
    assert found.stage_flops == (600, 300)
    assert found.stage_parameters == (14, 7)
    assert found.boundary_bytes == (101,)
    # Both stages: forward 3, backward 6, two micro-batches: (m + p − 1) · 9, and the longest update.
    assert found.step_time_s == 27.5
    assert predict(PROFILE, (1, 2), None, overlap=True).imbalance == pytest.approx(15 / 9)


def test_without_overlap_the_step_is_all_the_work() -> None:
    for checkpoint, forwards in (("never", 2), ("except_last", 3), ("always", 4)):
        schedule = Schedule(name="gpipe", micro_batches=2, checkpoint=checkpoint)  # type: ignore[arg-type]
        found = predict(PROFILE, (2, 1), schedule, overlap=False)
        assert found.step_time_s == forwards * 6 + 2 * 12 + 0.75


def test_a_schedule_that_is_not_simulated_has_no_step_time() -> None:
    found = predict(PROFILE, (1, 1, 1), None, overlap=True)
    assert (found.step_time_s, found.memory) == (None, ())
    assert found.imbalance == 1.5
