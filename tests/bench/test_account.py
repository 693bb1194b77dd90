"""The account of a step adds up, and each part is what it is called, on spans made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.account import account, ideal_bubble, union_s
from bench.jobs import SpanResult
from bench.partition.simulate import Pipeline, Schedule, StageCost, simulate
from bench.traces import read_spans, write_spans


def spans_of(pipeline: Pipeline, shift_s: float = 0.0, step: int = 0) -> list[SpanResult]:
    """What a recorder would see of a simulated step that begins ``shift_s`` late."""
    return [
        SpanResult(
            step=step,
            stage=s.stage,
            model_stage=-1 if s.kind == "update" else s.stage,
            kind=s.kind,
            micro_batch=-1 if s.micro_batch is None else s.micro_batch,
            start_s=s.start_s + shift_s,
            end_s=s.end_s + shift_s,
        )
        for s in simulate(pipeline).spans
    ]


def pipelines() -> st.SearchStrategy[Pipeline]:
    seconds = st.floats(0.01, 1)
    stage = st.builds(StageCost, forward_s=seconds, backward_s=seconds, recompute_s=seconds, update_s=seconds)
    schedule = st.builds(
        Schedule,
        name=st.sampled_from(["gpipe", "1f1b"]),
        micro_batches=st.integers(1, 6),
        checkpoint=st.sampled_from(["never", "except_last", "always"]),
    )
    return st.builds(Pipeline, stages=st.lists(stage, min_size=1, max_size=4).map(tuple), schedule=schedule)


@given(pipelines(), st.floats(0, 0.5), st.floats(0, 0.5))
def test_of_a_simulated_step_nothing_is_left_unexplained(pipeline: Pipeline, before: float, after: float) -> None:
    step = simulate(pipeline)
    found = account(
        spans_of(pipeline, before),
        [before + step.step_time_s + after],
        stages=len(pipeline.stages),
        schedule=pipeline.schedule,
        ideal=None,
        serial=False,
    )
    assert found.bubble_s is not None
    assert found.imbalance_s is not None
    assert found.recompute_s is not None
    # A simulated step has no communication: all of it is the schedule's, the stages' and the recomputation's.
    assert found.communication_s == pytest.approx(0, abs=1e-6)
    assert found.unexplained_s == pytest.approx(before + after, abs=1e-6)
    total = found.ideal_s + found.bubble_s + found.imbalance_s + found.recompute_s
    assert total == pytest.approx(step.step_time_s)
    if pipeline.schedule.checkpoint == "never":
        assert found.recompute_s == pytest.approx(0, abs=1e-6)
    span = max(s.end_s for s in step.spans if s.kind != "update")
    assert found.bubble == pytest.approx(1 - sum(step.busy_s) / (len(pipeline.stages) * span))


def test_even_stages_have_the_ideal_bubble_and_no_imbalance() -> None:
    for name, p, m in (("gpipe", 2, 4), ("1f1b", 4, 8), ("gpipe", 3, 1)):
        schedule = Schedule(name=name, micro_batches=m)  # type: ignore[arg-type]
        pipeline = Pipeline(stages=(StageCost(forward_s=1, backward_s=2),) * p, schedule=schedule)
        found = account(spans_of(pipeline), [3.0 * (m + p - 1)], stages=p, schedule=schedule, ideal=None, serial=False)
        assert found.bubble == pytest.approx((p - 1) / (m + p - 1))
        assert found.bubble == pytest.approx(ideal_bubble(name, p, 1, m, overlap=True))
        assert found.ideal_s == pytest.approx(3 * m)
        assert found.bubble_s == pytest.approx(3 * (p - 1))
        assert found.imbalance_s == pytest.approx(0, abs=1e-9)
        assert found.overlap is (p > 1 and m > 1)
        assert found.lanes[0].busy_s == pytest.approx(3 * m)
        assert found.lanes[0].idle_s == pytest.approx(3 * (p - 1))


def span(kind: str, stage: int, start_s: float, end_s: float, step: int = 0) -> SpanResult:
    return SpanResult(step=step, stage=stage, model_stage=stage, kind=kind, micro_batch=0, start_s=start_s, end_s=end_s)


def test_a_late_message_is_communication_and_waiting() -> None:
    # Stage 1 starts 2 s after stage 0 is done, and stage 0 waits 1 s for the gradient.
    spans = [
        *(span("forward", 0, 0, 1), span("forward", 1, 3, 4), span("backward", 1, 4, 6), span("backward", 0, 7, 9)),
    ]
    found = account(spans, [9.5], stages=2, schedule=Schedule(name="1f1b", micro_batches=1), ideal=None, serial=False)
    assert found.communication_s == pytest.approx(3)
    assert found.unexplained_s == pytest.approx(0.5)
    assert [lane.waiting_s for lane in found.lanes] == [pytest.approx(6), pytest.approx(0)]
    assert [lane.idle_s for lane in found.lanes] == [pytest.approx(6), pytest.approx(6)]
    assert not found.overlap


def test_a_recomputation_within_its_backward_counts_once() -> None:
    spans = [span("forward", 0, 0, 1), span("backward", 0, 1, 4), span("recompute", 0, 1, 2)]
    schedule = Schedule(name="gpipe", micro_batches=1, checkpoint="always")
    found = account(spans, [4.0], stages=1, schedule=schedule, ideal=0.0, serial=False)
    assert (found.ideal_s, found.recompute_s) == (pytest.approx(3), pytest.approx(1))
    assert found.bubble == 0


def test_the_median_step_is_the_one_that_is_shown() -> None:
    spans = [s for step in range(3) for s in (span("forward", 0, 0, 1, step), span("backward", 0, 1, 2 + step, step))]
    found = account(spans, [2.0, 4.0, 3.0], stages=1, schedule=None, ideal=None, serial=False)
    assert found.step_time_s == 3.0
    assert found.lanes[0].busy_s == pytest.approx(4)
    assert found.bubble_s is None


@pytest.mark.parametrize(
    ("schedule", "p", "v", "m", "overlap", "expected"),
    [
        ("gpipe", 4, 1, 8, True, 3 / 11),
        ("1f1b", 2, 1, 2, True, 1 / 3),
        ("interleaved_1f1b", 4, 2, 8, True, 3 / 19),
        ("zbv_zero_bubble", 4, 2, 8, True, None),
        ("gpipe", 4, 1, 8, False, 3 / 4),
    ],
)
def test_the_ideal_bubble(schedule: str, p: int, v: int, m: int, overlap: bool, expected: float | None) -> None:
    assert ideal_bubble(schedule, p, v, m, overlap=overlap) == (None if expected is None else pytest.approx(expected))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted).map(tuple), max_size=8))
def test_a_union_is_as_long_as_the_seconds_it_covers(intervals: list[tuple[int, int]]) -> None:
    covered = {second for first, last in intervals for second in range(first, last)}
    assert union_s(intervals) == len(covered)


def test_spans_come_back_from_their_file(tmp_path: Path) -> None:
    schedule = Schedule(name="1f1b", micro_batches=3)
    made = spans_of(Pipeline(stages=(StageCost(forward_s=1, backward_s=2, update_s=0.5),) * 2, schedule=schedule))
    write_spans(made, tmp_path / "traces" / "run.csv")
    assert set(read_spans(tmp_path / "traces" / "run.csv")) == set(made)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv: no spans"):
        read_spans(tmp_path / "other.csv")
