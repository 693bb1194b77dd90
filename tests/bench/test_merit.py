"""A series may be stable on a machine that was not: then its figure is doubtful, and says why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from bench.merit import conditions, merits
from bench.record import Record

Make = Callable[..., Record]
STEADY = tuple(0.5 + 0.0001 * ((7 * i) % 10) for i in range(30))


def judged(record: Record) -> tuple[str, str]:
    steps = merits([record])[record.run_id].steps
    return steps.verdict, steps.reason


def test_steady_steps_on_a_quiet_machine(made_record: Make) -> None:
    assert judged(made_record("run", times=STEADY)) == ("stable", "")


@pytest.mark.parametrize(("device", "load", "doubtful"), [("cpu", 0.2, False), ("cpu", 0.3, True), ("cuda", 3.0, False),
                                                         ("cuda", 9.0, True)])  # fmt: skip
def test_what_others_kept_busy(device: str, load: float, doubtful: bool, made_record: Make) -> None:
    run = made_record("run", times=STEADY, factors={"device": device}, foreign_load=load, environment={"cores": 16})
    verdict, reason = judged(run)
    assert verdict == ("noisy" if doubtful else "stable")
    assert (f"{load:.2f} cores busy" in reason) == doubtful


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({"throttle_reasons": ("sw_power_cap",)}, ""),
        ({"throttle_reasons": ("hw_thermal_slowdown", "sw_power_cap")}, "slowed down (hw_thermal_slowdown)"),
        ({"clock_low_mhz": 1900, "clock_high_mhz": 1980}, ""),
        ({"clock_low_mhz": 1200, "clock_high_mhz": 1980}, "at 1200 to 1980 MHz"),
    ],
)
def test_what_the_gpus_did(seen: dict[str, Any], said: str, made_record: Make) -> None:
    run = made_record("run", times=STEADY, factors={"device": "cuda"})
    first, second = run.stages
    run = dataclasses.replace(run, stages=(first, dataclasses.replace(second, **seen)))
    verdict, reason = judged(run)
    assert verdict == ("noisy" if said else "stable")
    assert said in reason
    assert ("stage 1" in reason) == bool(said)


def test_a_drift_stays_a_drift_and_has_both_reasons(made_record: Make) -> None:
    drifting = tuple(0.5 + 0.01 * i for i in range(30))
    verdict, reason = judged(made_record("run", times=drifting, foreign_load=1.0))
    assert verdict == "drifting"
    assert "slower" in reason
    assert "cores busy" in reason


def test_an_unknown_load_is_no_reproach(made_record: Make) -> None:
    assert conditions(made_record("run", foreign_load=None)) == []
