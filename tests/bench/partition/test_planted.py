"""A boundary that costs more than the stages' imbalance: ``optimal`` leaves it alone, and is right for real."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from bench.expand import expand
from bench.plan import Cell, plan
from bench.record import Record
from bench.resolve import resolve
from bench.run import run_cell
from bench.warm import Warm

PROJECT = Path(__file__).resolve().parents[3]
# By time 3-3 is the even cut, and of the five the only one that sends 16 MiB a micro-batch each way.
# With 2-4 or 4-2 one stage widens and narrows itself, which takes it less than sending does.
SLEEP_S, TIMES = 1 / 120, 2**19
CELL = [
    *("model=custom", "model.target=tests.bench.partition.sleepy.planted", f"+model.sleep_s={SLEEP_S}"),
    *(f"+model.times={TIMES}", "num_classes=8", "image_size=8", "batch_size=4", "micro_batches=4", "stages=2"),
    *("device=cpu", "warmup_steps=1", "steps=5", "baseline=false"),
]


def cells(library: str, results: Path) -> tuple[dict[str, Cell], object]:
    sweep = expand([*CELL, f"library={library}", "schedule=1f1b", "balance=time,optimal", f"results_dir={results}"])
    return {cell.factors.balance.name: cell for cell in plan(sweep)}, sweep.settings


@pytest.mark.alone
@pytest.mark.timeout(240)
def test_optimal_finds_the_known_answer_and_it_is_faster_for_real(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path_factory.mktemp("planted")
    monkeypatch.chdir(PROJECT)
    measured: dict[tuple[str, str], Record] = {}
    with Warm() as warm:
        for library in ("deepspeed", "torch"):
            planned, settings = cells(library, results)
            for balance, cell in planned.items():
                start = warm.starter(())
                resolved = resolve(cell, settings, start=start)  # type: ignore[arg-type]
                record = run_cell(resolved, settings, 0, start=start)  # type: ignore[arg-type]
                assert record.status == "ok", record.fail_reason
                measured[library, balance] = record
    for library in ("deepspeed", "torch"):
        even, best = measured[library, "time"], measured[library, "optimal"]
        assert even.partition == (3, 3)
        assert best.partition in ((2, 4), (4, 2))
        times = [statistics.median(s.time_s for s in r.steps if not s.warmup) for r in (even, best)]
        assert times[1] < times[0]
        for record, seconds in zip((even, best), times, strict=True):
            assert record.prediction is not None
            assert record.prediction.step_time_s == pytest.approx(seconds, rel=0.3)
