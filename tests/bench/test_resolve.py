"""Balances that must be measured first, end to end: real processes, real libraries, small models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from bench.expand import expand
from bench.partition.profile import read_profile
from bench.partition.solver import min_max
from bench.plan import normalise, plan, profile_file
from bench.record import Record, load_all
from bench.resolve import resolve

pytestmark = pytest.mark.timeout(300)

PROJECT = Path(__file__).resolve().parents[2]
SMALL = [
    *("model=custom", "model.target=mine.build", "num_classes=10", "image_size=8", "batch_size=8", "device=cpu"),
    *("micro_batches=2", "warmup_steps=1", "steps=2", "baseline=false"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model of its own to stand in."""
    (tmp_path / "mine.py").write_text((PROJECT / "tests/bench/worker/tiny.py").read_text())
    return tmp_path


def bench(
    folder: Path, *arguments: str, module: str = "bench", timeout: float = 110
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), str(folder)])}
    command = [sys.executable, "-m", module, *SMALL, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)


def records(folder: Path) -> list[Record]:
    found, errors = load_all(folder / "results")
    assert not errors
    return [r for r in found if r.kind == "cell"]


def test_every_rule_of_ours_is_measured_once_and_runs_with_parity(folder: Path) -> None:
    done = bench(folder, "-m", "library=torch", "balance=uniform,flops,time,size,optimal", "profile=true")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = records(folder)
    assert {r.factors.balance.name for r in rows} == {"uniform", "flops", "time", "size", "optimal"}
    assert {r.status for r in rows} == {"ok"}
    (profile_path,) = (folder / "results" / "profiles").glob("*.csv")
    profile = read_profile(profile_path)
    assert len(profile.layers) == 6
    assert profile.processes == min(2, len(os.sched_getaffinity(0)))
    for r in rows:
        assert r.prediction is not None
        ends = [0, *accumulate(r.partition)]
        times = [sum(c for c in profile.costs("time")[a:b]) for a, b in pairwise(ends)]
        assert r.prediction.stage_times_s == pytest.approx(times)
        assert r.prediction.imbalance == pytest.approx(max(times) / (sum(times) / 2))
        assert r.prediction.step_time_s is not None
        assert [len(s.layers) for s in sorted(r.stages, key=lambda s: s.stage)] == list(r.partition)
    partitions = {r.factors.balance.name: r.partition for r in rows}
    assert partitions["time"] == min_max(profile.costs("time"), 2)
    assert partitions["flops"] == min_max(profile.costs("flops"), 2)
    assert "predicted s" in done.stdout
    runs = (folder / "results" / "runs.csv").read_text().splitlines()
    assert "imbalance" in runs[0]
    assert "predicted_step_time_s" in runs[0]


@pytest.mark.parametrize(
    ("library", "balance", "layers"),
    [
        ("torchgpipe", "native_time", None),
        pytest.param("fairscale", "native_time", None, marks=pytest.mark.slow),
        ("deepspeed", "native_uniform", (3, 3)),
        pytest.param("deepspeed", "native_parameters", None, marks=pytest.mark.slow),
        # Two of the six layers are Sequential: one a stage.
        ("deepspeed", "native_regex balance.regex=Sequential", (4, 2)),
    ],
)
def test_a_routine_of_the_librarys_own_is_called_once_and_read_back(
    folder: Path, library: str, balance: str, layers: tuple[int, ...] | None
) -> None:
    arguments = [f"library={library}", *f"balance={balance}".split()]
    done = bench(folder, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    (kept,) = (folder / "results" / ".cache" / "native").glob("*.json")
    picked = json.loads(kept.read_text())
    if layers is not None:
        assert tuple(picked) == layers
    (row,) = records(folder)
    assert row.partition == tuple(picked)
    assert [len(s.layers) for s in sorted(row.stages, key=lambda s: s.stage)] == picked
    # Another trial runs the same partition: what is kept is taken.
    kept.write_text(json.dumps([1, 5]))
    again = bench(folder, *arguments, "trial=1")
    assert again.returncode == 0, again.stdout + again.stderr
    assert {r.partition for r in records(folder) if r.trial == 1} == {(1, 5)}
    # Had it left a stage empty: a mistake where that is the only cell, a row in a sweep.
    kept.write_text(json.dumps([6, 0]))
    alone = bench(folder, *arguments, "trial=2")
    assert alone.returncode == 2
    assert len(alone.stderr.splitlines()) == 1
    assert "6-0" in alone.stderr
    swept = bench(folder, "-m", *arguments, "trial=0,1,2", "micro_batches=2,3")
    assert swept.returncode == 2, "no cell of the sweep can run"
    assert not [r for r in records(folder) if r.trial == 2]


def test_what_does_not_fit_is_infeasible_and_names_the_layer(folder: Path) -> None:
    done = bench(folder, "balance=optimal", "balance.max_memory=1000")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "balance.max_memory=1000" in done.stderr
    assert "layer" in done.stderr
    assert not records(folder)


def test_a_profile_that_cannot_be_measured_is_a_record_with_its_cause(folder: Path) -> None:
    (folder / "mine.py").write_text(
        (folder / "mine.py").read_text()
        + "\n\nclass Broken(nn.Module):\n    def forward(self, x):\n        raise ValueError('no such luck')\n"
        + "\n\ndef broken(num_classes):\n    return nn.Sequential(*build(num_classes), Broken())\n"
    )
    done = bench(folder, "model.target=mine.broken", "balance=time")
    assert done.returncode == 1, done.stdout + done.stderr
    (row,) = records(folder)
    assert (row.status, row.fail_phase) == ("error", "plan")
    assert "its profile could not be measured: rank" in row.fail_reason
    assert "ValueError: no such luck" in row.fail_reason
    assert "no such luck" in (folder / "results" / row.log).read_text()


def test_the_comparison_shows_every_balance_side_by_side(folder: Path) -> None:
    done = bench(folder, "stages=2", module="bench.partition")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = [line.split("│")[1].strip() for line in done.stdout.splitlines() if line.startswith("│")]
    assert shown == [
        *("uniform", "parameters", "flops", "time", "size", "optimal"),
        *("native_uniform (deepspeed)", "native_parameters (deepspeed)"),
        *("native_time (fairscale)", "native_time (torchgpipe)"),
    ]
    assert "native_size (torchgpipe): balance=native_size" in done.stdout
    assert not records(folder)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["balance=optimal", "balance.max_memory=lots"], ["balance.max_memory=lots", "GiB"]),
        (["balance=optimal", "balance.max_memory=-1"], ["balance.max_memory=-1", "GiB"]),
        (
            ["balance=optimal", "schedule=interleaved_1f1b", "virtual_stages=2"],
            ["balance=optimal", "schedule=interleaved_1f1b"],
        ),
        (["balance=native_time"], ["balance=native_time", "no routine", "optimal"]),
        (["library=torchgpipe", "balance=native_size"], ["balance=native_size", "CUDA memory", "native_time"]),
        (["library=deepspeed", "balance=native_time"], ["balance=native_time", "native_uniform", "native_regex"]),
        (["library=deepspeed", "balance=native_regex"], ["balance.regex", "needs it"]),
    ],
)
def test_a_mistake_is_answered_before_anything_is_measured(
    folder: Path, arguments: list[str], parts: list[str]
) -> None:
    done = bench(folder, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1
    for part in parts:
        assert part in done.stderr
    assert not (folder / "results" / "profiles").exists()
    assert not (folder / "results" / "logs").exists()


def test_a_plan_says_what_is_still_to_be_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)  # where the processes look for the model
    sweep = expand([*SMALL, "balance=time", f"results_dir={folder / 'results'}"])
    (cell,) = plan(sweep)
    assert (cell.partition, cell.problem) == ((), None)
    assert not profile_file(normalise(sweep.factors[0]), folder / "results").exists()
    resolved = resolve(cell, sweep.settings)
    assert sum(resolved.partition) == 6
    # Now that the profile is there, the plan knows the partition, and the prediction comes with any balance.
    assert plan(sweep)[0].partition == resolved.partition
    uniform = expand([*SMALL, "balance=uniform", f"results_dir={folder / 'results'}"])
    assert resolve(plan(uniform)[0], uniform.settings).prediction is not None


@pytest.mark.parametrize("text", ["", "# model: x\nlayer,kind\n0,Linear\n", "\x00"])
def test_a_profile_that_is_none_is_named_in_one_line(folder: Path, text: str) -> None:
    """A truncated or foreign profile is the user's to remove; it was a traceback."""
    assert bench(folder, "balance=time", module="bench.plan").returncode == 0
    sweep = expand([*SMALL[:2], *SMALL[2:], "balance=time", f"results_dir={folder / 'results'}"])
    sys.path.insert(0, str(folder))
    try:
        path = profile_file(normalise(sweep.factors[0]), folder / "results")
    finally:
        sys.path.remove(str(folder))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    done = bench(folder, "balance=time")
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert path.name in done.stderr


@pytest.mark.parametrize("module", ["bench.partition", "bench.plan", "bench.timeline"])
def test_help_is_the_use_of_the_command(folder: Path, module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0
    assert f"python -m {module}" in done.stdout
