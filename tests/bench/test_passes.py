"""Memory and trace pass come after the clock: with or without them the measured steps are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.record import load_all
from bench.registry import libraries
from tests.bench.test_warm import bench, without_times

pytestmark = pytest.mark.timeout(300)


def measured(folder: Path, library: str, *passes: str) -> dict[str, Any]:
    folder.mkdir()
    run = bench(folder, f"library={library}", "stages=2", "trial=0,1", "steps=4", *passes)
    assert run.returncode == 0, run.stdout + run.stderr
    records, errors = load_all(folder / "results")
    assert not errors
    cells = sorted((r for r in records if r.kind == "cell" and not r.baseline), key=lambda r: r.trial)
    assert [r.trial for r in cells] == [0, 1]
    # The second trial comes after the first one's passes in the same warm process.
    for r in cells:
        assert bool(r.account) == bool(r.trace) == ("trace=false" not in passes)
        assert all((s.peak_allocated_bytes is None) == ("memory=false" in passes) for s in r.stages)
    seen = [without_times(r) for r in cells]
    for data in seen:
        data["stages"] = [{k: v for k, v in stage.items() if not k.startswith("peak_")} for stage in data["stages"]]
    return {"records": seen, "times": [len(r.steps) for r in cells]}


# One library in CI, the others where all tests are run.
@pytest.mark.parametrize(
    "library",
    [
        name if name == "torch" else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(libraries())
        if name != "single"
    ],
)
def test_the_passes_change_nothing_that_was_measured(tmp_path: Path, library: str) -> None:
    with_both = measured(tmp_path / "both", library)
    losses = [step["loss"] for step in with_both["records"][0]["steps"]]
    assert len({*losses}) == len(losses) > 3
    assert measured(tmp_path / "neither", library, "memory=false", "trace=false") == with_both
