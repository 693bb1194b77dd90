"""The main job on real models: every library over stages and micro-batches, with parity.

The whole grid is slow; its records are committed in ``results/measured/grid``.  Here a sample of its cells
covers every pair of values of library, model, stages and micro-batches.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from bench.errors import UserError
from bench.expand import expand
from bench.plan import plan
from bench.record import Record, load_all
from bench.registry import capabilities
from bench.run import run_cell
from bench.warm import Warm

PROJECT = Path(__file__).resolve().parents[1]
COMMITTED = PROJECT / "results" / "measured" / "grid"
LIBRARIES = ("single", "ddp", "torchgpipe", "fairscale", "deepspeed", "torch")
MODELS = {"resnet18": [], "vgg11": ["model.hidden=256"]}
STAGES = (1, 2, 4)
MICRO_BATCHES = (1, 4, 8)

# Orthogonal in stages and micro-batches within a library (a Latin square over the libraries).
SAMPLE = [
    (library, tuple(MODELS)[(i + j) % 2], STAGES[j], MICRO_BATCHES[(i + j) % 3])
    for i, library in enumerate(LIBRARIES)
    for j in range(3)
]


def command(*overrides: str, results: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "bench",
            "-m",
            "experiment=grid",
            "baseline=false",
            f"results_dir={results}",
            *overrides,
        ],
        env=environment,
        cwd=results.parent,
        capture_output=True,
        text=True,
        timeout=3600,
    )


def judge(records: list[Record]) -> None:
    for r in records:
        f = r.factors
        where = f"{f.library.name} {f.model.name} p={f.stages} m={f.micro_batches}: {r.status} {r.fail_reason}"
        if r.status == "unsupported":
            assert r.fail_reason, where
            continue
        assert r.status == "ok", where
        assert r.parity is not None
        assert r.parity_double is not None
        assert r.parity.gradient_error <= 1e-6, where
        assert r.parity.update_error <= 2e-5, where
        assert max(r.parity_double.gradient_error, r.parity_double.update_error) <= 1e-10, where
        assert len(r.stages) == f.stages
        assert all(s.peak_allocated_bytes for s in r.stages)
        assert sum(s.parameters for s in r.stages) >= 11_000_000 or f.model.name == "vgg11"


def test_the_sample_covers_every_pair() -> None:
    values = (LIBRARIES, tuple(MODELS), STAGES, MICRO_BATCHES)
    assert len(SAMPLE) <= 24
    for a, b in itertools.combinations(range(4), 2):
        assert {(s[a], s[b]) for s in SAMPLE} == set(itertools.product(values[a], values[b]))


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with Warm() as made:
        yield made


@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_sample_of_the_grid(library: str, tmp_path: Path, warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results"
    monkeypatch.chdir(tmp_path)
    refused: list[tuple[int, str]] = []
    for _, model, stages, m in (s for s in SAMPLE if s[0] == library):
        chosen = [f"library={library}", f"model={model}", *MODELS[model], f"micro_batches={m}", "device=cpu"]
        chosen += [f"stages={1 if library == 'single' else stages}", "batch_size=16", "image_size=64", "baseline=false"]
        chosen += ["warmup_steps=0", "steps=1", "trace=false", f"results_dir={results}"]
        sweep = expand(chosen)
        try:
            (cell,) = plan(sweep)
        except UserError as error:
            # Alone, a cell that cannot run is a mistake: the only ones here have fewer micro-batches
            # than the library or its schedule needs.
            refused.append((m, str(error).partition(":")[0]))
            continue
        run_cell(cell, sweep.settings, 0, start=warm.starter(capabilities(cell.factors.library).modules))
    assert all(found == (1, "micro_batches=1") for found in refused)
    records, errors = load_all(results)
    assert not errors
    judge([r for r in records if r.kind == "cell"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", MODELS)
def test_the_whole_grid(model: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    done = command(f"model={model}", *MODELS[model], results=results)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = [r for r in load_all(results)[0] if r.kind == "cell"]
    assert len(cells) == 48
    judge(cells)


def test_the_committed_grid_is_whole_and_passed() -> None:
    records, errors = load_all(COMMITTED)
    assert not errors
    cells = [r for r in records if r.kind == "cell"]
    judge(cells)
    assert not any(r.synthetic for r in records)
    found = {(r.factors.library.name, r.factors.model.name, r.factors.stages, r.factors.micro_batches) for r in cells}
    wanted = set(itertools.product(LIBRARIES, MODELS, STAGES, MICRO_BATCHES))
    assert {w for w in wanted if w[0] != "single" or w[2] == 1} <= found
    runs = pd.read_csv(COMMITTED / "runs.csv")
    assert set(runs["run_id"]) == {r.run_id for r in cells}
