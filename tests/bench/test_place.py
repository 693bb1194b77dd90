"""Which node a process is on, as SLURM's and torchrun's variables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.errors import UserError
from bench.place import Place, read_place

STEP = {
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[3-4]",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "5",
}
TORCHRUN = {
    "GROUP_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that knows one list of nodes: the real one needs a cluster, which tests/bench/slurm has."""
    command = tmp_path / "scontrol"
    command.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[3-4]" ] && printf "n3\\nn4\\n"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_alone_without_either_and_in_a_batch_script_which_runs_on_one_node() -> None:
    assert read_place({}) == Place(index=0, count=1)
    assert read_place({"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_NODEID": "0"}).count == 1
    assert read_place({**STEP, "SLURM_STEP_NUM_NODES": "1"}).count == 1
    assert read_place({**TORCHRUN, "GROUP_WORLD_SIZE": "1"}).count == 1


@pytest.mark.usefixtures("scontrol")
def test_in_a_step_of_slurm() -> None:
    assert read_place(STEP) == Place(index=1, count=2, address="n3", port=20089)
    # Jobs that share a node, and steps of one job, must not meet at one port.
    others = [{"SLURM_JOB_ID": "13"}, {"SLURM_STEP_ID": "6"}]
    assert len({read_place({**STEP, **other}).port for other in [{}, *others]}) == 3


def test_under_torchrun_also_within_a_step_of_slurm() -> None:
    expected = Place(index=1, count=2, address="first", port=29501)
    assert read_place(TORCHRUN) == read_place({**STEP, **TORCHRUN}) == expected
    assert read_place({**TORCHRUN, "PIPELINE_BENCH_PORT": "4000"}).port == 4000


@pytest.mark.usefixtures("scontrol")
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({**STEP, "SLURM_STEP_NUM_TASKS": "8"}, "srun=8 tasks: each of the 2 nodes takes one task"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, "--nproc-per-node=4: each node takes one process"),
        ({**TORCHRUN, "PIPELINE_BENCH_PORT": "x"}, "PIPELINE_BENCH_PORT=x: must be a port, 1 to 65535"),
        ({**STEP, "SLURM_STEP_NODELIST": "other"}, "SLURM_STEP_NODELIST=other: scontrol cannot name its first host"),
    ],
)
def test_what_cannot_be_is_one_line(variables: dict[str, str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        read_place(variables)
    assert str(caught.value).startswith(said)
    assert len(str(caught.value).splitlines()) == 1
