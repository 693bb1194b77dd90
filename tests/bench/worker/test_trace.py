"""The recorder on real libraries: every span once, and the bubble that is known by hand."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.account import Account, account, ideal_bubble
from bench.expand import expand
from bench.jobs import SpanResult
from bench.launch import launch
from bench.partition.rules import schedule_of
from bench.partition.simulate import Pipeline, Schedule, StageCost, simulate
from bench.plan import plan
from bench.registry import capabilities
from bench.run import make_job, worker_environment
from bench.warm import Warm

PROJECT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with Warm() as made:
        yield made


class Traced:
    """Runs cells and gives their spans and account."""

    def __init__(self, warm: Warm, folder: Path) -> None:
        self.warm, self.folder, self.number = warm, folder, 0

    def __call__(self, *overrides: str) -> tuple[tuple[SpanResult, ...], Account]:
        self.number += 1
        folder = self.folder / str(self.number)
        folder.mkdir()
        sweep = expand([*overrides, "num_classes=8", "image_size=8", "device=cpu", f"results_dir={folder / 'results'}"])
        (cell,) = plan(sweep)
        job = make_job(cell, sweep.settings, "trace", str(folder), double=False)
        can = capabilities(cell.factors.library)
        outcome = launch(
            replace(job, task="tests.bench.worker.trace_rank"),
            folder / "log",
            wall_limit_s=200,
            environment=worker_environment(cell.factors),
            start=self.warm.starter(can.modules),
        )
        assert outcome.status == "ok", outcome.fail_reason + (folder / "log").read_text()[-2000:]
        spans = tuple(span for r in outcome.results for span in r.spans)
        f = cell.factors
        serial = not can.overlap_on_cpu and f.stages > 1
        traces = [r.trace for r in outcome.results if r.trace is not None]
        found = account(
            spans,
            [max(times) for times in zip(*(t.step_times_s for t in traces), strict=True)],
            stages=f.stages,
            schedule=schedule_of(f) if can.stages_are == "devices" else None,
            ideal=ideal_bubble(f.schedule, f.stages, f.virtual_stages, f.micro_batches, overlap=not serial),
            serial=serial,
        )
        return spans, found


@pytest.fixture
def traced(warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Traced:
    monkeypatch.chdir(PROJECT)
    return Traced(warm, tmp_path)


def sleepy(stages: int, micro_batches: int, sleep_s: float, slow: int = -1) -> list[str]:
    return [
        *("model=custom", "model.target=tests.bench.partition.sleepy.even", f"+model.layers={stages}"),
        *(f"+model.sleep_s={sleep_s}", f"+model.slow={slow}", f"stages={stages}", f"micro_batches={micro_batches}"),
        f"batch_size={micro_batches}",
    ]


LIBRARIES = ("library=deepspeed", "library=torch schedule=1f1b", "library=torch schedule=gpipe")
ALL = list(itertools.product(LIBRARIES, (2, 3, 4), (2, 8, 16)))
# In CI one of each library, without the longest.
IN_CI = {(LIBRARIES[0], 2, 8), (LIBRARIES[2], 4, 2)}


def runnable(library: str, stages: int, micro_batches: int) -> bool:
    return not (library == LIBRARIES[1] and micro_batches < stages)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("library", "stages", "micro_batches"),
    [pytest.param(*case, marks=[] if case in IN_CI else [pytest.mark.slow]) for case in ALL if runnable(*case)],
)
def test_the_bubble_of_sleeping_layers_is_the_ideal_one(
    traced: Traced, library: str, stages: int, micro_batches: int
) -> None:
    _, found = traced(*library.split(), *sleepy(stages, micro_batches, 0.08))
    ideal = (stages - 1) / (micro_batches + stages - 1)
    assert found.ideal_bubble == pytest.approx(ideal)
    assert ideal - 0.005 <= found.bubble <= ideal + 0.03
    assert found.overlap
    adds_up(found)
    assert abs(found.unexplained_s) < 0.03 * found.step_time_s


def adds_up(found: Account) -> None:
    parts = [found.ideal_s, found.communication_s, found.unexplained_s]
    parts += [p for p in (found.bubble_s, found.imbalance_s, found.recompute_s) if p is not None]
    assert sum(parts) == pytest.approx(found.step_time_s, abs=1e-9)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("library", "stages", "slow"),
    [
        (LIBRARIES[0], 3, 1),
        pytest.param(LIBRARIES[1], 3, 0, marks=pytest.mark.slow),
        pytest.param(LIBRARIES[2], 3, 2, marks=pytest.mark.slow),
        pytest.param(LIBRARIES[2], 4, 1, marks=pytest.mark.slow),
    ],
)
def test_a_slow_stage_is_imbalance_as_simulated(traced: Traced, library: str, stages: int, slow: int) -> None:
    m, sleep_s = 4, 0.08
    _, found = traced(*library.split(), *sleepy(stages, m, sleep_s, slow))
    schedule = Schedule(name="gpipe" if "gpipe" in library else "1f1b", micro_batches=m)
    times = [sleep_s * (2 if i == slow else 1) for i in range(stages)]
    simulated = simulate(
        Pipeline(stages=tuple(StageCost(forward_s=t, backward_s=2 * t) for t in times), schedule=schedule)
    )
    assert found.bubble == pytest.approx(simulated.bubble, abs=0.03)
    assert found.imbalance_s is not None
    even = sum(3 * t for t in times) / stages * (m + stages - 1)
    assert found.imbalance_s == pytest.approx(simulated.step_time_s - even, abs=0.03 * found.step_time_s)
    adds_up(found)


@pytest.mark.alone
def test_with_short_sleeps_the_excess_is_communication_and_not_bubble(traced: Traced) -> None:
    _, found = traced("library=torch", "schedule=1f1b", *sleepy(2, 8, 0.02))
    assert found.bubble_s is not None
    work = 8 * 3 * 0.02
    assert found.bubble_s == pytest.approx(work / 8, rel=0.1)
    assert found.communication_s >= 0
    assert abs(found.unexplained_s) < 0.03 * found.step_time_s
    adds_up(found)


@pytest.mark.parametrize("library", ["torchgpipe", "fairscale"])
def test_stages_of_one_process_do_not_overlap_on_cpu(traced: Traced, library: str) -> None:
    for stages in (2, 3):
        _, found = traced(f"library={library}", *sleepy(stages, 4, 0.02))
        assert not found.overlap
        assert found.bubble == pytest.approx(1 - 1 / stages, abs=0.03)
        assert found.ideal_bubble == pytest.approx(1 - 1 / stages)
        adds_up(found)


RESIDUAL = [
    *("model=custom", "model.target=tests.adapters.tiny_models.residual", "batch_size=16", "micro_batches=4"),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("library", ["single", "ddp", "torchgpipe", "fairscale", "deepspeed", "torch"])
def test_every_forward_recomputation_and_backward_is_seen_once(traced: Traced, library: str) -> None:
    can = capabilities(next(f.library for f in expand([f"library={library}"]).factors))
    cases: list[tuple[list[str], Any]] = [([], None)]
    if can.stages_are == "devices":
        cases = [([f"schedule={r.name}"], r) for r in can.schedules]
    for words, rule in cases:
        virtual = 1 if rule is None or rule.virtual_stages == (1,) else 2
        checkpoints = [c for c in can.checkpoints if rule is None or c in rule.checkpoints]
        for checkpoint in checkpoints if rule is not None else ["never"]:
            extra = [f"checkpoint={checkpoint}", f"virtual_stages={virtual}"] if rule is not None else []
            stages = [] if can.stages_are == "none" else ["stages=2"]
            spans, found = traced(f"library={library}", *RESIDUAL, *words, *extra, *stages)
            adds_up(found)
            m = 4 // (2 if can.stages_are == "replicas" else 1)
            placed = {"none": 1, "replicas": 2, "devices": 2 * virtual}[can.stages_are]
            lanes = {(s.stage, s.model_stage) for s in spans if s.model_stage >= 0}
            assert len(lanes) == placed, (library, words, checkpoint)
            split = "zero_bubble" in " ".join(words)
            recomputed = {"never": set(), "always": set(range(m)), "except_last": set(range(m - 1))}[checkpoint]
            for step, (stage, model_stage) in itertools.product(range(3), lanes):
                of = [s for s in spans if (s.step, s.stage, s.model_stage) == (step, stage, model_stage)]
                seen = Counter((s.kind, s.micro_batch) for s in of)
                once = {("forward", k) for k in range(m)} | {("recompute", k) for k in recomputed}
                where = (library, words, checkpoint, step, stage, model_stage, seen)
                assert all(seen.pop(key, 0) == 1 for key in once), where
                if not split:
                    assert seen == {("backward", k): 1 for k in range(m)}, where
                else:
                    assert all(seen[("backward", k)] == 1 for k in range(m)), where
                    assert any(kind == "backward_weight" for kind, _ in seen), where
                assert all(s.end_s >= s.start_s for s in of), where
            # Nothing takes longer than the step, and what one device does never overlaps, but for a
            # recomputation within its backward.
            by_lane = [s for s in spans if s.step == 0 and s.kind in ("forward", "backward", "backward_weight")]
            for device in {s.stage for s in by_lane}:
                mine = sorted((s.start_s, s.end_s) for s in by_lane if s.stage == device)
                assert all(a[1] <= b[0] + 1e-4 for a, b in itertools.pairwise(mine)), (library, words, checkpoint)
