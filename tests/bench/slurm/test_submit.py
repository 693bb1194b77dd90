"""What a study becomes before SLURM sees it: options, plans, tasks, arrays, scripts; and mistakes, in one line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.errors import UserError
from bench.expand import expand
from bench.hardware import visible_gpus
from bench.plan import Cell
from bench.record import Record, write
from bench.slurm.__main__ import main
from bench.slurm.array import arrays_of
from bench.slurm.cluster import JobState
from bench.slurm.lost import record_lost
from bench.slurm.options import Options, read_options
from bench.slurm.planning import cells_of, split
from bench.slurm.script import render
from bench.slurm.status import fates
from bench.slurm.study import Array, Run, Study, create, find, load, read_plan

CPU = ["library=single,torch", "model=vgg11", "device=cpu", "stages=2,4", "micro_batches=8", "baseline=false"]


def _planned(tmp_path: Path, *overrides: str) -> tuple[dict[int, list[Run]], list[tuple[Cell, int]], Any, Options]:
    options, rest = read_options([f"results_dir={tmp_path}/results", *overrides])
    sweep = expand(rest)
    return *split(cells_of(sweep, options), sweep.settings, options), sweep.settings, options


def _submitted(tmp_path: Path, *overrides: str) -> Study:
    """A study as if its arrays had become the jobs 10, 11, …"""
    plans, impossible, settings, options = _planned(tmp_path, *overrides)
    study = create(settings, options.max_requeues, plans, len(impossible))
    arrays = arrays_of(plans, options.max_array_size)
    study = replace(study, arrays=tuple(replace(a, job=str(10 + i)) for i, a in enumerate(arrays)))
    study.save()
    return study


def test_options_are_read_by_their_types_and_the_rest_is_the_studys() -> None:
    options, rest = read_options(
        [
            *("stages=2", "slurm.time=1:30:00", "slurm.cpus_per_task=8", "slurm.exclusive=false", "slurm.gres=null"),
            *('slurm.setup=["module load x", "export A=1"]', "slurm.target_minutes=0.5", "slurm.qos=007"),
        ]
    )
    assert rest == ["stages=2"]
    assert (options.time, options.cpus_per_task, options.exclusive, options.gres) == ("1:30:00", 8, False, None)
    assert (options.setup, options.target_minutes) == (("module load x", "export A=1"), 0.5)
    assert options.qos == "007"
    assert options.partition is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("slurm.partitoin=x", "slurm.partitoin=x: there is no such key; did you mean slurm.partition?"),
        ("slurm.cpus_per_task=two", "slurm.cpus_per_task=two: must be a whole number; mend the value"),
        ("slurm.exclusive=maybe", "slurm.exclusive=maybe: must be true or false; mend the value"),
        ("slurm.max_array_size=0", "slurm.max_array_size=0: is too small; give a positive number"),
        ("slurm.time=null", "slurm.time=null: must be text; mend the value"),
        ("slurm.gres=gpu:{g}", "slurm.gres=gpu:{g}: may hold {gpus} and no other braces; write gpu:{gpus}"),
        ("slurm.partition", "slurm.partition=: has no value; write slurm.key=value"),
        ("slurm.setup=[a", 'slurm.setup=[a: cannot be read; write a list as ["one","two"]'),
        ("slurm=other", "slurm=other: allowed are default; choose one of them"),
    ],
)
def test_a_mistake_in_an_option_is_one_line(override: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        read_options([override])
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["submit", *CPU],
            "sbatch=missing: it is not on the PATH; run this on the cluster's login node, or add --print",
        ),
        (["submit", "--print", "library=torch"], "device=auto: this host's devices are not the nodes'; write device="),
        (["submit", "--dry"], "--dry=: there is no such option; see python -m bench.slurm --help"),
        (["submit", "--print", "stagse=2"], "stagse=2: there is no such key; did you mean stages?"),
        (["status", "nothing"], "study=nothing: there is no such study; none lies in results/slurm; give its id"),
        (["status"], "status=: takes one study; write python -m bench.slurm status STUDY"),
        (["colect", "x"], "colect=: allowed are submit, status, collect, task; see python -m bench.slurm --help"),
        (["task", "plan.json", "x"], "task=plan.json x: takes a plan and a number; it is called by an array's script"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(said)
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_print_shows_scripts_that_bash_can_read_and_leaves_nothing_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(
        [
            *("submit", "--print", *CPU, "slurm.partition=big one", "slurm.max_running=2", "slurm.cells_per_task=1"),
            *("slurm.setup=module load x", "slurm.extra=--nodelist=n7", "slurm.memory=0", "results_dir=100% mine"),
        ]
    )
    script = capsys.readouterr().out
    assert code == 0
    assert not (tmp_path / "100% mine" / "slurm").exists()
    lines = script.splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    for option in (
        *("--array=0-2%2", "--requeue", "--open-mode=append", "--signal=B:USR1@60", "--exclusive", "--mem=0"),
        *("--partition='big one'", "--time=01:00:00", "--nodelist=n7", "--nodes=1", "--ntasks-per-node=1"),
        f"--output='{tmp_path}/100%% mine/slurm/STUDY/logs/%A_%a.out'",
    ):
        assert f"#SBATCH {option}" in lines
    # A CPU study asks for no GPUs, and options stand before the first command.
    assert "gres" not in script
    assert max(i for i, line in enumerate(lines) if line.startswith("#SBATCH")) < lines.index("set -euo pipefail")
    assert "module load x" in lines
    assert lines[-1].startswith("exec ")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_tasks_are_filled_to_their_time_and_trials_are_outermost(tmp_path: Path) -> None:
    plans, impossible, _, _ = _planned(
        tmp_path, *CPU, "trial=0,1", "slurm.target_minutes=2", "slurm.seconds_per_cell=50"
    )
    assert impossible == []
    (runs,) = plans.values()
    assert [(r.factors.library.name, r.factors.stages, r.trial, r.task) for r in runs] == [
        ("single", 1, 0, 0),
        ("torch", 2, 0, 0),
        ("torch", 4, 0, 1),
        ("single", 1, 1, 1),
        ("torch", 2, 1, 2),
        ("torch", 4, 1, 2),
    ]
    # A cell that takes longer than a task should still has one, and what is known of a cell's time counts.
    (long,) = _planned(tmp_path, *CPU, "slurm.target_minutes=0.1")[0].values()
    assert [r.task for r in long] == [0, 1, 2]
    (fixed,) = _planned(tmp_path, *CPU, "slurm.cells_per_task=2")[0].values()
    assert [r.task for r in fixed] == [0, 0, 1]


def test_what_is_done_or_impossible_takes_no_task(tmp_path: Path, made_record: Callable[..., Record]) -> None:
    plans, _, settings, options = _planned(tmp_path, *CPU)
    first = plans[1, 0][0]
    (cell,) = [c for c in cells_of(expand([*CPU, f"results_dir={tmp_path}/results"]), options) if c.id == first.cell_id]
    write(made_record("old", cell_id=cell.id, hardware=cell.hardware, factors={"library": first.factors.library}),
          settings.results_dir)  # fmt: skip
    overrides = [o.replace("micro_batches=8", "micro_batches=2,8") for o in CPU]
    plans, impossible, _, _ = _planned(tmp_path, *overrides)
    assert [(c.factors.library.name, c.factors.stages, c.factors.micro_batches) for c, _ in impossible] == [
        ("torch", 4, 2)
    ]
    assert [(r.factors.library.name, r.factors.stages, r.factors.micro_batches) for r in plans[1, 0]] == [
        ("single", 1, 2),
        ("torch", 2, 2),
        ("torch", 2, 8),
        ("torch", 4, 8),
    ]


def test_a_study_larger_than_an_array_becomes_several() -> None:
    runs = {
        needs: [Run(task=t, cell_id="", trial=0, factors=None) for t in range(n)]  # type: ignore[arg-type]
        for needs, n in (((1, 1), 5), ((2, 2), 2))
    }
    assert [(a.plan, a.nodes, a.gpus, a.first, a.count) for a in arrays_of(runs, 2)] == [
        ("plan-1nodes-1gpus.json", 1, 1, 0, 2),
        ("plan-1nodes-1gpus.json", 1, 1, 2, 2),
        ("plan-1nodes-1gpus.json", 1, 1, 4, 1),
        ("plan-2nodes-2gpus.json", 2, 2, 0, 2),
    ]
    assert Array(plan="", nodes=1, gpus=1, first=2, count=2, job="7").key(3) == "7_1"


@pytest.mark.skipif(bool(visible_gpus()), reason="this host has GPUs")
def test_a_study_for_gpus_is_planned_on_a_host_without_any(tmp_path: Path) -> None:
    overrides = ("library=torch", "model=vgg11", "device=cuda", "stages=2,4,8", "micro_batches=1,8")
    plans, impossible, settings, options = _planned(tmp_path, *overrides, "slurm.gpus_per_node=4")
    # The baseline was added; 8 stages do not fit, 1 micro-batch is too few for 1F1B.
    assert {
        needs: [(r.factors.library.name, r.factors.micro_batches) for r in runs] for needs, runs in plans.items()
    } == {
        (1, 1): [("single", 1)],
        (1, 2): [("torch", 8)],
        (1, 4): [("torch", 8)],
    }
    assert len(impossible) == 4
    assert "stages=8: needs 8 GPUs, a node has slurm.gpus_per_node=4; choose fewer" in {c.reason for c, _ in impossible}
    study = Study(folder=tmp_path / "s", submitted_at="", settings=settings, max_requeues=0, arrays=())
    script = render(study, arrays_of(plans, 100)[2], replace(options, gres="gpu:h100:{gpus}"))
    assert "#SBATCH --gres=gpu:h100:4" in script


@pytest.mark.skipif(bool(visible_gpus()), reason="this host has GPUs")
def test_cells_of_several_nodes_have_an_array_of_their_own_whose_tasks_srun_starts(tmp_path: Path) -> None:
    overrides = ("library=torch,torchgpipe", "model=vgg11", "device=cuda", "stages=4", "nodes=1,2,3", "baseline=false")
    plans, impossible, settings, options = _planned(tmp_path, *overrides)
    assert {needs: [r.factors.library.name for r in runs] for needs, runs in plans.items()} == {
        (1, 4): ["torch", "torchgpipe"],
        (2, 2): ["torch"],
    }
    assert {(c.factors.library.name, c.factors.nodes): c.reason for c, _ in impossible} == {
        ("torch", 3): "nodes=3: must divide stages=4; choose a divisor",
        ("torchgpipe", 2): "nodes=2: the library runs in one process, on one node; choose nodes=1",
        ("torchgpipe", 3): "nodes=3: the library runs in one process, on one node; choose nodes=1",
    }
    study = Study(folder=tmp_path / "s", submitted_at="", settings=settings, max_requeues=0, arrays=())
    one, two = (render(study, array, options) for array in arrays_of(plans, 100))
    assert "#SBATCH --nodes=2" in two
    assert "#SBATCH --gres=gpu:2" in two
    assert two.splitlines()[-1].startswith("exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 ")
    assert "srun" not in one
    subprocess.run(["bash", "-n"], input=two, text=True, check=True)


def test_a_manual_balance_that_cannot_be_is_found_without_gpus(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"balance\.layers"):
        _planned(tmp_path, "library=torch", "device=cuda", "balance=manual", "balance.layers=[1,1]")


def test_a_frozen_study_is_read_back_as_it_was_and_found_by_its_name(tmp_path: Path) -> None:
    study = _submitted(tmp_path, *CPU, "trial=1", "steps=auto", "devices=[1,2]")
    assert load(study.folder) == study
    assert study.settings.devices == (1, 2)
    assert find(study.folder.name, tmp_path / "results") == find(str(study.folder), Path("x")) == study.folder
    runs = read_plan(study.folder / study.arrays[0].plan)
    assert runs == _planned(tmp_path, *CPU, "trial=1")[0][1, 0]
    other = _submitted(tmp_path, *CPU, "trial=1", "steps=auto", "devices=[1,2]")
    assert other.folder != study.folder
    # Frozen as plain JSON that says what will run.
    first = json.loads((study.folder / study.arrays[0].plan).read_text())[0]
    assert (first["factors"]["library"]["name"], first["trial"]) == ("single", 1)


def test_each_run_has_one_fate_and_what_is_lost_becomes_a_record_once(
    tmp_path: Path, made_record: Callable[..., Record]
) -> None:
    study = _submitted(tmp_path, *CPU, "slurm.cells_per_task=1")
    plan = study.arrays[0].plan
    runs = read_plan(study.folder / plan)
    for task in (0, 1):
        study.note(plan, task, 0, "node-type")
    done = made_record(
        "done", cell_id=runs[0].cell_id, hardware="node-type", started_at="2999-01-01T00:00:00+00:00", synthetic=False
    )
    write(done, study.results_dir)
    states = {"10_0": JobState(state="COMPLETED"), "10_1": JobState(state="RUNNING"), "10_2": JobState(state="PENDING")}
    assert [f.kind for f in fates(study, states)] == ["done", "pending", "pending"]
    states["10_1"] = JobState(state="NODE_FAIL", reason="NodeDown")
    # SLURM has forgotten the third.
    found = list(fates(study, {k: v for k, v in states.items() if k != "10_2"}))
    assert [f.kind for f in found] == ["done", "lost", "lost"]
    made = record_lost(study, found[1:])
    assert [(r.status, r.hardware, r.cell_id) for r in made] == [
        ("interrupted", "node-type", runs[1].cell_id),
        ("interrupted", made[1].hardware, runs[2].cell_id),
    ]
    assert made[0].fail_reason == "SLURM ended job 10_1 without a record: NODE_FAIL (NodeDown); it had not begun"
    assert made[1].fail_reason == "SLURM no longer knows job 10_2, which left no record; it had not begun"
    assert record_lost(study, found[1:]) == []
    # Nothing is made final by that: the next study makes the runs.
    assert [f.kind for f in fates(study, {})] == ["done", "lost", "lost"]
