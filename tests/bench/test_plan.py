"""Cells: the same id everywhere, each once, with the reason where they cannot run."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import bench.plan
from bench.errors import UserError
from bench.expand import expand
from bench.factors import Factors, Library, Model
from bench.plan import Cell, cell_id, gpus_needed, main, normalise, plan
from bench.record import Record, write
from bench.registry import libraries


def cells(*overrides: str) -> list[Cell]:
    return plan(expand(["device=cpu", "baseline=false", *overrides]))


def ids(*overrides: str) -> list[str]:
    return [cell.id for cell in cells(*overrides)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "d3b5ac85bf74"),
        ({"stages": 4, "micro_batches": 8}, "51f936eb6039"),
        ({"precision": "bf16", "checkpoint": "always"}, "d6152f7022bc"),
    ],
)
def test_ids_are_frozen(changes: dict[str, object], expected: str) -> None:
    """A changed id would make every finished cell of a running study undone."""
    factors = Factors(
        library=Library(name="torch", adapter="adapters.torch"),
        model=Model(name="resnet18", target="models.resnet.resnet18"),
        device="cpu",
        schedule="1f1b",
    )
    assert cell_id(factors.replace(**changes), {"torch": "2.14.1"}) == expected


def test_an_id_does_not_depend_on_the_order_of_overrides_or_on_settings() -> None:
    one = ids("library=deepspeed", "stages=4", "seed=1")
    assert one == ids("seed=1", "stages=4", "library=deepspeed")
    assert one == ids(
        "library=deepspeed", "stages=4", "seed=1", "steps=50", "timeout_s=7", "trial=3", "results_dir=/tmp/x"
    )
    assert one != ids("library=deepspeed", "stages=4", "seed=2")


def test_an_id_changes_with_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ids("library=deepspeed")
    bench.plan.versions_of.cache_clear()
    monkeypatch.setattr(bench.plan, "_version", lambda name: "0.0.1")
    assert ids("library=deepspeed") != before
    bench.plan.versions_of.cache_clear()


def test_factors_without_meaning_do_not_make_cells() -> None:
    found = cells("library=single,ddp", "stages=1,2", "balance=uniform,parameters", "checkpoint=never,always")
    assert [(c.factors.library.name, c.factors.stages) for c in found] == [("single", 1), ("ddp", 1), ("ddp", 2)]


def test_native_is_the_librarys_own_schedule() -> None:
    found = {c.factors.library.name: c.factors.schedule for c in cells("library=torchgpipe,fairscale,deepspeed,torch")}
    assert found == {"torchgpipe": "gpipe", "fairscale": "gpipe", "deepspeed": "1f1b", "torch": "1f1b"}
    assert ids("library=torch") == ids("library=torch", "schedule=1f1b")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["library=deepspeed", "checkpoint=except_last"], "checkpoint"),
        (["library=deepspeed", "schedule=gpipe"], "schedule"),
        (["library=torch", "stages=4", "micro_batches=2"], "micro_batches"),
        (["library=torch", "schedule=interleaved_1f1b"], "virtual_stages"),
        (["library=torch", "virtual_stages=2"], "virtual_stages"),
        (["library=torch", "schedule=zbv_zero_bubble", "virtual_stages=2", "checkpoint=always"], "checkpoint"),
        (
            [
                "library=torch",
                "schedule=interleaved_1f1b",
                "virtual_stages=2",
                "stages=3",
                "micro_batches=8",
                "batch_size=24",
            ],
            None,
        ),
        (["library=ddp", "stages=3", "micro_batches=4", "batch_size=24"], "micro_batches"),
        (["batch_size=30"], "micro_batches"),
        (["library=torchgpipe", "stages=16"], "stages"),
        (["library=torchgpipe", "nodes=2"], "nodes"),
        (["precision=tf32"], "precision"),
        (["library=single", "stages=2"], "stages"),
        (["library=single", "checkpoint=always"], "checkpoint"),
        (["balance=manual", "balance.layers=[8,8]"], "balance.layers"),
        (["balance=manual"], "balance.layers"),
        (["data=imagefolder", "data.path=/no/such/folder"], "data.path"),
        (["model=custom", "model.target=no_such.build"], "model.target"),
    ],
)
def test_alone_a_cell_that_cannot_run_is_the_users_mistake(overrides: list[str], key: str | None) -> None:
    if key is None:
        assert cells(*overrides)[0].problem is None
        return
    with pytest.raises(UserError) as caught:
        cells(*overrides)
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


def test_in_a_sweep_it_is_a_row_with_its_reason() -> None:
    found = cells("library=deepspeed", "checkpoint=never,except_last")
    assert [bool(c.problem) for c in found] == [False, True]
    assert "activation_checkpoint_interval" in found[1].reason


def test_a_sweep_in_which_nothing_can_run_is_a_mistake() -> None:
    with pytest.raises(UserError, match="batch_size"):
        cells("batch_size=30", "stages=1,2")


def test_a_library_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    known = bench.plan._version
    monkeypatch.setattr(bench.plan, "_version", lambda name: None if name == "torchgpipe" else known(name))
    found = cells("library=torchgpipe,torch")
    assert "pip install 'pipeline-bench[torchgpipe]'" in found[0].reason
    assert found[1].problem is None


def test_a_sweep_gets_the_baselines_it_needs_once() -> None:
    overrides = ["device=cpu", "library=torch,ddp", "stages=2,4", "micro_batches=4,8", "model=resnet18,resnet34"]
    found = plan(expand(overrides))
    baselines = [c for c in found if c.baseline]
    assert [(c.factors.model.name, c.factors.micro_batches) for c in baselines] == [("resnet18", 1), ("resnet34", 1)]
    assert len({c.id for c in found}) == len(found)
    assert not [c for c in plan(expand([*overrides, "baseline=false"])) if c.baseline]
    assert sum(c.baseline for c in plan(expand([*overrides, "library=single", "micro_batches=1,4"]))) == 2


def test_every_registered_library_has_capabilities_and_normalises() -> None:
    for library in libraries().values():
        factors = Factors(library=library, model=Model(name="m", target="models.resnet.resnet18"), device="cpu")
        assert normalise(normalise(factors)) == normalise(factors)
        assert normalise(factors).schedule != "native"


def test_the_plan_prints_json_lines() -> None:
    command = [
        sys.executable,
        "-m",
        "bench.plan",
        "device=cpu",
        "library=deepspeed,single",
        "checkpoint=never,except_last",
    ]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(r["library"], bool(r["reason"])) for r in rows] == [
        ("single", False),
        ("deepspeed", False),
        ("deepspeed", True),
        ("single", False),
    ]


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({"device": "cpu"}, 0),
        ({"device": "cuda", "stages": 4}, 4),
        ({"device": "cuda", "stages": 4, "nodes": 2}, 2),
        ({"device": "cuda", "stages": 4, "share_devices": True}, 1),
    ],
)
def test_the_gpus_that_a_cell_needs(changes: dict[str, object], gpus: int) -> None:
    factors = expand(["library=torch", "device=cpu"]).factors[0].replace(**changes)
    assert gpus_needed(factors) == gpus


def test_a_plan_says_what_is_done_and_how_long_the_rest_will_take(
    tmp_path: Path, made_record: Callable[..., Record], capsys: pytest.CaptureFixture[str]
) -> None:
    axes = ["library=torch,ddp", "stages=2", "trial=0,1", "device=cpu", "baseline=false", f"results_dir={tmp_path}"]
    assert main([*axes, "--json"]) == 0
    before = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["done"], row["estimated_s"]) for row in before] == [(0, None), (0, None)]
    cells = plan(expand(axes))
    made = {"factors": cells[0].factors, "hardware": cells[0].hardware, "wall_s": 30.0}
    write(dataclasses.replace(made_record("done", cell_id=cells[0].id), **made), tmp_path)
    assert main([*axes, "--json"]) == 0
    after = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["done"], row["estimated_s"]) for row in after] == [(1, 30), (0, 60)]
    assert main(axes) == 0
    assert "2 cells, 2 valid, 4 runs, 1 done; about 90 s" in capsys.readouterr().out
