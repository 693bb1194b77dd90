"""Large studies: how fast the page opens, and what the tables of 20,000 runs cost."""

from __future__ import annotations

import importlib.util
import itertools
import os
import resource
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from bench.report.__main__ import report

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("browser", Path(__file__).with_name("browser.py"))
assert _spec is not None
assert _spec.loader is not None
browser = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(browser)


def _large(source: Path, target: Path, models: int) -> Path:
    """2,000 runs a model, each with the figures of one run of two stages and twenty steps."""
    target.mkdir(exist_ok=True)
    like = "run_id == 'torch-resnet18-cpu-p2-m4-uniform-2.2-t0-ok'"
    rows = {
        name: pd.read_csv(source / f"{name}.csv", dtype="str", keep_default_na=False).query(like)
        for name in ("runs", "stages", "steps")
    }
    rows["steps"] = pd.concat([rows["steps"].query("step == '1'").assign(step=str(i)) for i in range(20)])
    libraries = ("torch", "deepspeed", "fairscale", "torchgpipe", "ddp")
    rules = ("uniform", "parameters", "time", "optimal")
    cells = list(itertools.product(range(models), libraries, (1, 2, 4, 8), (2, 4, 8, 16, 32), rules, range(5)))
    runs = pd.concat([rows["runs"]] * len(cells), ignore_index=True)
    runs[["model", "library", "stages", "micro_batches", "balance", "trial"]] = pd.DataFrame(cells).astype("str")
    runs["model"] = "model" + runs["model"]
    runs["run_id"] = [f"run-{i}" for i in range(len(runs))]
    runs.to_csv(target / "runs.csv", index=False)
    for name in ("stages", "steps"):
        many = pd.concat([rows[name]] * len(cells), ignore_index=True)
        many["run_id"] = [i for i in runs["run_id"] for _ in range(len(rows[name]))]
        many.to_csv(target / f"{name}.csv", index=False)
    return target


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    browser.CHROMIUM is None and not os.environ.get("CI"),
    reason="no Chromium is installed (scripts/install_report_tools.sh)",
)
def test_2000_runs_open_within_two_seconds(made: Path, tmp_path: Path) -> None:
    folder = _large(made, tmp_path / "study", 1)
    report(folder)
    page = browser.Browser(tmp_path / "browser")
    try:
        page.open(folder / "report.html")
        times = "(t => t.loadEventEnd - t.startTime)(performance.getEntriesByType('navigation')[0])"
        assert 0 < page.run(times) < 2000
    finally:
        page.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tables_of_20000_runs(made: Path, tmp_path: Path) -> None:
    folder = _large(made, tmp_path, 10)
    code = (
        "import sys, time; from pathlib import Path; start = time.monotonic()\n"
        "from bench.report.__main__ import write_tables; from bench.report.data import load\n"
        "write_tables(load(Path(sys.argv[1]))); print(time.monotonic() - start)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 60
    # The largest of all children so far, in KiB.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2 * 2**20
