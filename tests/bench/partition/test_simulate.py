"""The simulation against its laws and against a plain event-by-event one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.partition.simulate import (
    Boundary,
    Costs,
    Pipeline,
    Schedule,
    Span,
    StageCost,
    Timeline,
    simulate,
    step_times,
)

EXAMPLES = settings(max_examples=150, deadline=None)
seconds = st.floats(0, 10, allow_subnormal=False)
schedules = st.builds(
    Schedule,
    name=st.sampled_from(["gpipe", "1f1b"]),
    micro_batches=st.integers(1, 7),
    checkpoint=st.sampled_from(["never", "except_last", "always"]),
    sends=st.sampled_from(["overlap", "block"]),
    last_first=st.booleans(),
)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    count = draw(st.integers(1, 5))
    stage = st.builds(StageCost, forward_s=seconds, backward_s=seconds, recompute_s=seconds, update_s=seconds)
    boundary = st.builds(Boundary, forward_s=seconds, backward_s=seconds)
    return Pipeline(
        stages=tuple(draw(st.lists(stage, min_size=count, max_size=count))),
        boundaries=tuple(draw(st.lists(boundary, min_size=count - 1, max_size=count - 1))),
        schedule=draw(schedules),
    )


def equal_stages(stages: int, schedule: Schedule, forward_s: float = 1.0, backward_s: float = 2.0) -> Pipeline:
    cost = StageCost(forward_s=forward_s, backward_s=backward_s, recompute_s=forward_s)
    return Pipeline(stages=(cost,) * stages, schedule=schedule)


def program(schedule: Schedule, stage: int, stages: int) -> list[tuple[str, int]]:
    """The order in which a stage works, as the schedules are told in words."""
    m = schedule.micro_batches
    if schedule.name == "gpipe":
        back = range(m - 1, -1, -1) if schedule.last_first else range(m)
        return [("forward", k) for k in range(m)] + [("backward", k) for k in back]
    ahead = min(m, stages - stage)
    order = [("forward", k) for k in range(ahead)]
    for k in range(m):
        order.append(("backward", k))
        if ahead + k < m:
            order.append(("forward", ahead + k))
    return order


def plain_step_time(pipeline: Pipeline) -> float:
    """The step by recursion over what each operation waits for."""
    schedule, p = pipeline.schedule, len(pipeline.stages)
    orders = [program(schedule, s, p) for s in range(p)]
    blocks = schedule.sends == "block"

    def reader(kind: str, s: int) -> int:
        return s + 1 if kind == "forward" else s - 1

    @functools.cache
    def end(kind: str, s: int, k: int) -> float:
        cost = pipeline.stages[s]
        place, starts = orders[s].index((kind, k)), [0.0]
        if place:
            starts.append(end(*before(s, place)))
            if blocks and 0 <= reader(before(s, place)[0], s) < p:
                starts.append(sent(*before(s, place)))
        writer = s - 1 if kind == "forward" else s + 1
        if 0 <= writer < p:
            starts.append(sent(kind, writer, k))
        length = cost.forward_s
        if kind == "backward":
            length = cost.backward_s + (cost.recompute_s if schedule.recomputes(k) else 0.0)
        return max(starts) + length

    def before(s: int, place: int) -> tuple[str, int, int]:
        kind, k = orders[s][place - 1]
        return kind, s, k

    @functools.cache
    def sent(kind: str, s: int, k: int) -> float:
        to = reader(kind, s)
        boundary = pipeline.boundaries[min(s, to)] if pipeline.boundaries else Boundary()
        starts = [end(kind, s, k)]
        if blocks:
            place = orders[to].index((kind, k))
            if place:
                starts.append(end(*before(to, place)))
        else:
            queue = [other for what, other in orders[s] if what == kind]
            if queue.index(k):
                starts.append(sent(kind, s, queue[queue.index(k) - 1]))
        return max(starts) + (boundary.forward_s if kind == "forward" else boundary.backward_s)

    ends = []
    for s in range(p):
        kind, k = orders[s][-1]
        last = end(kind, s, k)
        if blocks and s:
            last = max(last, sent(kind, s, k))
        ends.append(last + pipeline.stages[s].update_s)
    return max(ends)


@EXAMPLES
@given(pipelines())
def test_agrees_with_the_plain_simulation(pipeline: Pipeline) -> None:
    assert simulate(pipeline).step_time_s == pytest.approx(plain_step_time(pipeline), rel=1e-12, abs=1e-12)


@EXAMPLES
@given(schedules, st.integers(1, 6), st.floats(0.1, 10), st.floats(0.1, 10))
def test_equal_stages_without_transfers(schedule: Schedule, p: int, forward_s: float, backward_s: float) -> None:
    schedule = dataclasses.replace(schedule, checkpoint="never", sends="overlap")
    m = schedule.micro_batches
    timeline = simulate(equal_stages(p, schedule, forward_s, backward_s))
    assert timeline.step_time_s == pytest.approx((m + p - 1) * (forward_s + backward_s))
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.busy_s == pytest.approx([m * (forward_s + backward_s)] * p)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_is_busy_all_the_time(name: Any) -> None:
    timeline = simulate(equal_stages(1, Schedule(name=name, micro_batches=5, checkpoint="except_last")))
    assert timeline.step_time_s == 5 * 3 + 4 * 1
    assert timeline.bubble == 0
    assert timeline.transfers == ()


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("sends", ["overlap", "block"])
def test_one_micro_batch_passes_through_everything(name: Any, sends: Any) -> None:
    stages = tuple(StageCost(forward_s=i, backward_s=10 * i, recompute_s=100 * i) for i in (1, 2, 3))
    boundaries = (Boundary(forward_s=1000, backward_s=2000), Boundary(forward_s=3000, backward_s=4000))
    for checkpoint, again in (("never", 0), ("except_last", 0), ("always", 600)):
        schedule = Schedule(name=name, micro_batches=1, checkpoint=checkpoint, sends=sends)  # type: ignore[arg-type]
        timeline = simulate(Pipeline(stages=stages, boundaries=boundaries, schedule=schedule))
        assert timeline.step_time_s == 66 + again + 10000


def operations(timeline: Timeline, kind: str) -> list[tuple[int, int | None]]:
    return sorted((span.stage, span.micro_batch or 0) for span in timeline.spans if span.kind == kind)


@EXAMPLES
@given(pipelines())
def test_every_micro_batch_once_a_stage_and_nothing_at_the_same_time(pipeline: Pipeline) -> None:
    timeline, schedule = simulate(pipeline), pipeline.schedule
    p, m = len(pipeline.stages), schedule.micro_batches
    every = [(s, k) for s in range(p) for k in range(m)]
    assert operations(timeline, "forward") == every
    assert operations(timeline, "backward") == every
    again = {"never": 0, "except_last": m - 1, "always": m}[schedule.checkpoint]
    assert operations(timeline, "recompute") == [(s, k) for s in range(p) for k in range(again)]
    assert len(timeline.transfers) == 2 * m * (p - 1)
    for s in range(p):
        own = sorted((x for x in timeline.spans if x.stage == s), key=lambda x: (x.start_s, x.end_s))
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(own))
    assert timeline.step_time_s >= max(span.end_s for span in (*timeline.spans, *timeline.transfers)) - 1e-9
    assert 0 <= timeline.bubble <= 1


@EXAMPLES
@given(pipelines())
def test_nothing_starts_before_its_input(pipeline: Pipeline) -> None:
    timeline = simulate(pipeline)
    at = {(x.kind, x.stage, x.micro_batch): x for x in (*timeline.spans, *timeline.transfers)}
    for (kind, s, k), span in at.items():
        if kind == "send_forward":
            assert at["forward", s, k].end_s <= span.start_s
            assert span.end_s <= at["forward", s + 1, k].start_s
        elif kind == "send_backward":
            first: Span = at.get(("recompute", s - 1, k), at["backward", s - 1, k])
            assert at["backward", s, k].end_s <= span.start_s
            assert span.end_s <= first.start_s
        elif kind == "backward":
            assert at["forward", s, k].end_s <= span.start_s


@EXAMPLES
@given(pipelines())
def test_micro_batches_in_flight_stay_within_the_schedule(pipeline: Pipeline) -> None:
    timeline, p = simulate(pipeline), len(pipeline.stages)
    for s in range(p):
        # In the order of the schedule: operations of no length have no order in time.
        steps = [{"forward": 1, "backward": -1}.get(x.kind, 0) for x in timeline.spans if x.stage == s]
        most = max(np.cumsum(steps))
        assert most == pipeline.schedule.in_flight(s, p)
        if pipeline.schedule.name == "1f1b":
            assert most <= p - s


@EXAMPLES
@given(pipelines(), st.data())
def test_no_cost_makes_a_step_shorter(pipeline: Pipeline, data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(["stages", "boundaries"] if pipeline.boundaries else ["stages"]))
    parts = list(getattr(pipeline, field))
    i = data.draw(st.integers(0, len(parts) - 1))
    key = data.draw(st.sampled_from(sorted(vars(parts[i]))))
    parts[i] = dataclasses.replace(parts[i], **{key: getattr(parts[i], key) + data.draw(seconds)})
    dearer = dataclasses.replace(pipeline, **{field: tuple(parts)})
    assert simulate(dearer).step_time_s >= simulate(pipeline).step_time_s - 1e-9


@EXAMPLES
@given(pipelines())
def test_blocking_sends_are_never_faster(pipeline: Pipeline) -> None:
    overlap, block = (
        simulate(dataclasses.replace(pipeline, schedule=dataclasses.replace(pipeline.schedule, sends=sends)))
        for sends in ("overlap", "block")
    )
    assert overlap.step_time_s <= block.step_time_s + 1e-9


def test_many_pipelines_side_by_side_are_as_one_by_one() -> None:
    generator = np.random.default_rng(0)
    for name in ("gpipe", "1f1b"):
        schedule = Schedule(name=name, micro_batches=5, checkpoint="always")  # type: ignore[arg-type]
        values = generator.random((6, 4, 10))
        forward, backward, recompute, update = values[:4]
        send_forward, send_backward = values[4:, :3]
        costs = Costs(
            forward_s=forward,
            backward_s=backward,
            recompute_s=recompute,
            update_s=update,
            send_forward_s=send_forward,
            send_backward_s=send_backward,
        )
        alone = [
            simulate(
                Pipeline(
                    stages=tuple(_stage(values[:4, s, c]) for s in range(4)),
                    boundaries=tuple(
                        Boundary(forward_s=send_forward[s, c], backward_s=send_backward[s, c]) for s in range(3)
                    ),
                    schedule=schedule,
                )
            ).step_time_s
            for c in range(10)
        ]
        assert step_times(costs, schedule) == pytest.approx(alone, rel=1e-12)


def _stage(values: Any) -> StageCost:
    forward_s, backward_s, recompute_s, update_s = map(float, values)
    return StageCost(forward_s=forward_s, backward_s=backward_s, recompute_s=recompute_s, update_s=update_s)


def test_the_update_lengthens_the_step_but_is_not_busy() -> None:
    schedule = Schedule(name="1f1b", micro_batches=2)
    timeline = simulate(Pipeline(stages=(StageCost(forward_s=1, backward_s=1, update_s=4),), schedule=schedule))
    assert timeline.step_time_s == 8
    assert timeline.busy_s == (4.0,)
    assert timeline.spans[-1] == Span("update", 0, None, 4.0, 8.0)


def test_what_cannot_be_simulated_is_refused() -> None:
    stage = StageCost(forward_s=1, backward_s=1)
    schedule = Schedule(name="gpipe", micro_batches=1)
    with pytest.raises(ValueError, match="no simulation of schedule zbv"):
        Schedule(name="zbv", micro_batches=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        Schedule(name="gpipe", micro_batches=0)
    with pytest.raises(ValueError, match="at least one stage"):
        Pipeline(stages=(), schedule=schedule)
    with pytest.raises(ValueError, match="2 boundaries for 2 stages"):
        Pipeline(stages=(stage, stage), boundaries=(Boundary(), Boundary()), schedule=schedule)
    with pytest.raises(ValueError, match="finite and not negative"):
        Pipeline(stages=(StageCost(forward_s=-1, backward_s=1),), schedule=schedule)
