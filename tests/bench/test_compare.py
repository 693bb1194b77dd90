"""Comparing studies: the bars on made data, what cannot be compared, and the gate."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.compare import Comparison, compare, compare_times, gate, holm, main
from bench.record import Record, write

Make = Callable[..., Record]
SPREAD = 0.02


def trials(generator: np.random.Generator, n: int, seconds: float = 0.5) -> list[float]:
    return (seconds * np.exp(SPREAD * generator.standard_normal(n))).tolist()


def share(verdict: str, shift: float, n: int, tries: int = 400) -> float:
    generator = np.random.default_rng(n)
    found = [compare_times("", trials(generator, n), trials(generator, n, 0.5 * shift)) for _ in range(tries)]
    return sum(c.verdict == verdict for c in found) / tries


@pytest.mark.parametrize("n", [10, 15, 20])
def test_equal_cells_are_not_significant(n: int) -> None:
    """The bar is 93 %."""
    assert share("not significant", 1.0, n) >= 0.93


@pytest.mark.parametrize("n", [10, 15, 20])
def test_five_per_cent_are_seen(n: int) -> None:
    """The bar is 95 %."""
    assert share("slower", 1.05, n) >= 0.95
    assert share("faster", 1 / 1.05, n) >= 0.95


@pytest.mark.parametrize("repeats", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.timeout(400)
def test_the_gate_stays_open_for_equal_cells(repeats: int) -> None:
    """The bar is 5 % of 200 repeats of 100 cells, whatever the threshold."""
    generator = np.random.default_rng(7)
    closed = 0
    for _ in range(repeats):
        found = [compare_times("", trials(generator, 10), trials(generator, 10)) for _ in range(100)]
        closed += bool(gate(found, threshold=0.0))
    assert closed / repeats <= 0.05


def test_the_gate_closes_for_one_slow_cell_among_many_and_not_for_a_small_or_a_faster_one() -> None:
    generator = np.random.default_rng(3)
    equal = [compare_times(f"equal {i}", trials(generator, 10), trials(generator, 10)) for i in range(99)]
    slow = compare_times("slow", trials(generator, 10), trials(generator, 10, 0.55))
    fast = compare_times("fast", trials(generator, 10), trials(generator, 10, 0.45))
    little = compare_times("little", trials(generator, 40), trials(generator, 40, 0.515))
    assert little.verdict == "slower"
    assert [c.cell for c in gate([*equal, slow, fast, little])] == ["slow"]


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=12), st.lists(st.floats(0.1, 10), min_size=2, max_size=12))
def test_turned_round_it_says_the_opposite(old: list[float], new: list[float]) -> None:
    there, back = compare_times("", old, new), compare_times("", new, old)
    opposite = {"slower": "faster", "faster": "slower"}
    assert back.verdict == opposite.get(there.verdict, there.verdict)
    assert there.ratio is not None
    assert back.ratio == pytest.approx(1 / there.ratio)
    assert there.low is not None
    assert there.high is not None
    assert there.low <= there.ratio * (1 + 1e-12)
    assert there.ratio <= there.high * (1 + 1e-12)
    assert back.p == pytest.approx(there.p)


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=30))
def test_holm_rejects_no_more_than_no_correction_and_no_less_than_bonferroni(p_values: list[float]) -> None:
    rejected = holm(p_values)
    for p, said in zip(p_values, rejected, strict=True):
        assert said <= (p <= 0.05)
        assert said >= (p <= 0.05 / len(p_values))


def test_holm_by_hand() -> None:
    """Steps of 0.05/4, 0.05/3, 0.05/2: the third stops it."""
    assert holm([0.04, 0.01, 0.03, 0.016]) == [False, True, False, True]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_too_few_trials_are_said_and_decide_nothing(n: int) -> None:
    found = compare_times("", [0.5 + 0.001 * i for i in range(n)], [0.9 + 0.001 * i for i in range(n)])
    assert found.verdict == "not significant"
    assert "trial" in found.reason


def test_what_could_have_been_seen_is_seen_in_four_of_five() -> None:
    n = 12
    generator = np.random.default_rng(1)
    detectable = float(
        np.mean([compare_times("", trials(generator, n), trials(generator, n)).detectable for _ in range(200)])
    )
    assert share("slower", 1 + detectable, n) == pytest.approx(0.8, abs=0.06)


# Whole records


def study(made_record: Make, name: str, seconds: float, count: int = 10, **changes: Any) -> list[Record]:
    return [
        made_record(f"{name}{i}", trial=i, times=(seconds * (1 + 0.002 * ((3 * i) % count)),) * 3, **changes)
        for i in range(count)
    ]


def test_trials_and_not_steps_are_counted(made_record: Make) -> None:
    (found,) = compare(study(made_record, "old", 0.5), study(made_record, "new", 0.6))
    assert (found.old_trials, found.new_trials, found.verdict) == (10, 10, "slower")
    assert found.ratio == pytest.approx(1.2)


def test_a_trial_that_was_run_again_counts_once(made_record: Make) -> None:
    old = study(made_record, "old", 0.5)
    again = made_record("again", trial=0, times=(0.9,) * 3, started_at="2026-02-01T00:00:00+00:00")
    lost = made_record("lost", trial=1, status="error", started_at="2026-02-01T00:00:00+00:00")
    (found,) = compare([*old, again, lost], old)
    assert found.old_trials == 10


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hardware": "cpu-other"}, "hardware differs: cpu-made-up and cpu-other"),
        ({"environment": {"versions": {"torch": "2.1"}}}, "torch_version differs: 2.0 and 2.1"),
        ({"status": "oom"}, "no ok run in NEW (oom)"),
    ],
)
def test_what_cannot_be_compared_says_what_differs(changes: dict[str, Any], said: str, made_record: Make) -> None:
    (found,) = compare(study(made_record, "old", 0.5), study(made_record, "new", 0.6, **changes))
    assert (found.verdict, found.ratio) == ("not comparable", None)
    assert said in found.reason


def test_versions_may_differ_where_that_is_the_question(made_record: Make) -> None:
    new = study(made_record, "new", 0.6, environment={"versions": {"torch": "2.1"}})
    (found,) = compare(study(made_record, "old", 0.5), new, across=["torch_version", "library_version"])
    assert found.verdict == "slower"


def test_cells_of_one_study_alone_and_cells_that_differ_in_any_factor(made_record: Make) -> None:
    old = study(made_record, "old", 0.5)
    new = study(made_record, "new", 0.5, factors={"batch_size": 16})
    found = compare([*old, *new], new)
    assert len({c.cell for c in found}) == 2
    assert [c.verdict for c in found] == ["not significant", "not comparable"]
    assert "no ok run in NEW" in found[1].reason


def written(records: list[Record], folder: Path) -> str:
    for record in records:
        write(record, folder)
    return str(folder)


def test_the_command(made_record: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = written(study(made_record, "old", 0.5), tmp_path / "old")
    new = written(study(made_record, "new", 0.6), tmp_path / "new")
    assert main([old, new]) == 0
    assert "1 slower, 0 faster" in capsys.readouterr().out
    assert main([old, new, "--gate"]) == 1
    assert "GATE: torch" in capsys.readouterr().err
    assert main([old, new, "--gate", "--threshold", "0.3"]) == 0
    assert main([new, old, "--gate"]) == 0
    capsys.readouterr()
    assert main([old, new, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "slower"


def test_a_gate_that_cannot_close_says_so(
    made_record: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = written(study(made_record, "old", 0.5, count=3), tmp_path / "old")
    new = written(study(made_record, "new", 0.9, count=3), tmp_path / "new")
    assert main([old, new, "--gate"]) == 0
    assert "GATE: it cannot fail: none of 1 cells" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "nowhere"], "OLD=nowhere: holds no records"),
        (["{old}", "nowhere"], "NEW=nowhere: holds no records"),
        (["{old}", "{old}", "--threshold", "-1"], "--threshold=-1.0: must not be negative"),
        (["{old}", "{old}", "--across", "colour"], "--across=colour: allowed are hardware"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], said: str, made_record: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = written(study(made_record, "old", 0.5, count=1), tmp_path / "old")
    assert main([a.format(old=old) for a in arguments]) == 2
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert captured.err.startswith(said)


def test_identical_times_have_no_spread_and_no_verdict() -> None:
    found = compare_times("", [0.5] * 10, [0.5] * 10)
    assert found.verdict == "not significant"
    assert (found.ratio, found.low, found.high) == (1.0, 1.0, 1.0)
    assert not math.isnan(found.p or math.nan)
    assert dataclasses.asdict(found) == dataclasses.asdict(Comparison(**vars(found)))
