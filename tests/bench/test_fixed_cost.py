"""What a sweep of small cells spends outside their optimizer steps, as it says itself at its end."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from bench.record import load_all
from bench.registry import libraries
from tests.bench.test_warm import bench

CELLS = 20
BAR_S = 2.0


# One library in CI, the others where all tests are run.
@pytest.mark.alone
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "library", [name if name == "torch" else pytest.param(name, marks=pytest.mark.slow) for name in sorted(libraries())]
)
def test_twenty_small_cells_cost_two_seconds_each(library: str, tmp_path: Path) -> None:
    stages = [] if library == "single" else ["stages=2"]
    run = bench(tmp_path, f"library={library}", *stages, f"trial=range(0,{CELLS})")
    assert run.returncode == 0, run.stdout + run.stderr
    records = [r for r in load_all(tmp_path / "results")[0] if r.kind == "cell"]
    costs = [r.fixed_cost_s for r in records if r.fixed_cost_s is not None]
    assert len(costs) == CELLS
    said = re.search(rf"outside their optimizer steps {CELLS} runs took ([\d.]+) s each on average", run.stdout)
    assert said is not None
    assert float(said[1]) == pytest.approx(statistics.fmean(costs), abs=0.06)
    print(f"{library}: {statistics.fmean(costs):.2f} s, median {statistics.median(costs):.2f}, most {max(costs):.2f}")
    assert statistics.fmean(costs) <= BAR_S
