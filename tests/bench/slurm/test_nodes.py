"""Cells on two nodes of a real SLURM, each with its own network: nothing of it works over one host alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.record import Record, load_all
from tests.bench.slurm.conftest import ROOT, User

pytestmark = pytest.mark.timeout(400)
NODES = 2

SMALL = (
    *("device=cpu", "model=resnet18", "image_size=32", "num_classes=10", "batch_size=8", "micro_batches=2"),
    *("warmup_steps=1", "baseline=false"),
)
# Without preload a rank's command line tells it from the process that forked it.
ENDLESS = ("steps=100000", "preload=false")


def _records(user: User) -> dict[str, Record]:
    found, errors = load_all(user.results)
    assert errors == []
    return {r.factors.library.name: r for r in found if r.kind == "cell"}


def test_a_deepspeed_a_torch_and_a_ddp_cell_run_on_two_nodes_and_a_single_process_library_says_why_not(
    user: User,
) -> None:
    study = user.submit_cells(
        *SMALL, "library=deepspeed,torch,ddp,torchgpipe", "stages=2", "nodes=2", "steps=3", "slurm.exclusive=false"
    )
    user.wait_until_over()
    found = _records(user)
    said = user.run("status", study)
    assert {name: r.status for name, r in found.items()} == {
        "deepspeed": "ok",
        "torch": "ok",
        "ddp": "ok",
        "torchgpipe": "unsupported",
    }, said + user.logs()
    assert found["torchgpipe"].fail_reason.startswith("nodes=2: the library runs in one process")
    for name in ("deepspeed", "torch", "ddp"):
        r = found[name]
        assert r.environment["host"] == "n0"
        (other,) = r.environment["nodes"]
        assert (other["host"], other["interface"]) == ("n1", "eth0")
        assert [s.rank for s in r.stages] == [0, 1]
        assert r.parity is not None
        assert r.parity.passed
        assert len(r.steps) == 4
        # Two clocks: no timeline, and the record says so.
        assert r.account is None
        assert any("no timeline" in note for note in r.notes)
        assert (user.results / r.log).with_name(f"{Path(r.log).stem}.node1.log").exists()


def _on_two_nodes(user: User, *overrides: str) -> subprocess.Popen[str]:
    """``python -m bench`` by hand: one process a node."""
    command = [sys.executable, "-m", "bench", *SMALL, *overrides]
    return subprocess.Popen(
        ["srun", "--nodes=2", "--ntasks-per-node=1", *command], cwd=user.folder, text=True,
        env={**user.cluster.environment(), "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def _ranks(user: User, node: str) -> list[psutil.Process]:
    """The ranks of a cell that are working on a node."""
    mark, found = str(user.cluster.conf), []
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            words = process.cmdline()
        except psutil.Error:
            continue
        here = variables.get("SLURM_CONF") == mark and variables.get("SLURMD_NODENAME") == node
        if here and "RANK" in variables and "bench.worker" in words:
            found.append(process)
    return found


@pytest.mark.parametrize("node", ["n0", "n1"])
def test_a_rank_killed_on_either_node_ends_all_of_them_and_is_named(user: User, node: str) -> None:
    process = _on_two_nodes(user, "library=torch", "stages=4", "nodes=2", "schedule=gpipe", *ENDLESS)
    user.wait(lambda: len(_ranks(user, "n0")) == len(_ranks(user, "n1")) == 2)
    victim = max(_ranks(user, node), key=lambda p: int(p.environ()["RANK"]))
    number = int(victim.environ()["RANK"])
    assert number == {"n0": 1, "n1": 3}[node]
    victim.kill()
    said, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    (r,) = _records(user).values()
    assert (r.status, r.fail_reason.split(",")[0]) == ("error", f"rank {number} was killed by SIGKILL"), said
    assert _ranks(user, "n0") == _ranks(user, "n1") == []


def test_the_warning_of_the_time_limit_reaches_the_cell_through_srun_and_it_is_run_again(user: User) -> None:
    study = user.submit("gated", library="torch", overrides=("stages=2", "nodes=2"))
    user.wait((user.folder / "waiting").exists)
    user.cluster.ask("scancel", "--batch", "--signal=USR1", user.job(study))
    user.wait(lambda: len(user.records().get("gated", [])) == 1)
    (user.folder / "open").touch()
    user.wait_until_over()
    first, second = user.records()["gated"]
    assert (first.status, second.status) == ("interrupted", "ok"), user.logs()
    assert "SLURM's warning that the time limit is near (SIGUSR1)" in first.fail_reason
    assert second.environment["variables"]["SLURM_RESTART_COUNT"] == "1"


def test_an_agent_that_is_gone_ends_the_cell_and_its_node_is_named(user: User) -> None:
    process = _on_two_nodes(user, "library=torch", "stages=2", "nodes=2", *ENDLESS)
    user.wait(lambda: len(_ranks(user, "n1")) == 1)
    (rank,) = _ranks(user, "n1")
    os.kill(rank.ppid(), signal.SIGKILL)
    said, _ = process.communicate(timeout=120)
    (r,) = _records(user).values()
    assert r.status == "error", said
    assert r.fail_reason == "rank 1 node 1 (n1): it is gone: the connection to its agent has ended"
    assert _ranks(user, "n0") == _ranks(user, "n1") == []


def test_a_mistake_starts_nothing_and_is_one_line(user: User) -> None:
    process = _on_two_nodes(user, "library=torch", "stages=2", "nodes=2", "stagse=3")
    said, _ = process.communicate(timeout=120)
    lines = [line for line in said.splitlines() if not line.startswith("srun: ")]
    assert lines == ["stagse=3: there is no such key; did you mean stages?"]
    assert not (user.results / "records").exists()
