"""Whole studies on a real SLURM: what fails, hangs, is killed, preempted, requeued or lost becomes a row."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tests.bench.slurm.conftest import User

pytestmark = pytest.mark.timeout(300)


def _counts(status: str) -> dict[str, int]:
    return {kind: int(count) for kind, count in (part.split() for part in status.splitlines()[1].split(", "))}


def test_an_ok_a_failing_a_hanging_and_a_killed_cell_become_rows(user: User) -> None:
    # A killed cell kills its parent, which without preload is the task; a loaded machine is slow to import torch.
    overrides = ("preload=false", "timeout_s=30", "slurm.cells_per_task=1")
    study = user.submit("ok", "fails", "hangs", "killed", overrides=overrides)
    user.wait_until_over()
    found = user.run("status", study, code=1)
    assert _counts(found) == {"done": 1, "running": 0, "pending": 0, "failed": 2, "lost": 1}, found + user.logs()
    assert "FAILED single-custom-p1-m2" in found
    assert "it fails as told" in found
    assert "LOST single-custom-p1-m2" in found
    said = user.run("collect", study, code=1)
    assert "1 records made of lost runs" in said
    records = user.records()
    assert {name: [r.status for r in own] for name, own in records.items()} == {
        "ok": ["ok"],
        "fails": ["error"],
        "hangs": ["timeout"],
        "killed": ["error"],
    }
    (killed,) = records["killed"]
    assert killed.fail_reason.startswith("SLURM ended job ")
    assert "without a record: FAILED (" in killed.fail_reason
    assert killed.fail_reason.endswith("exit code 0:9)")
    runs = pd.read_csv(user.results / "runs.csv")
    assert sorted(runs["status"]) == ["error", "error", "ok", "timeout"]
    # Done again it finds nothing new, and a second study has only done runs to skip.
    assert "0 records made of lost runs" in user.run("collect", study, code=1)
    assert _counts(user.run("status", Path(study).name, code=1))["failed"] == 3


@pytest.mark.parametrize("how", ["requeued", "warned", "preempted"])
def test_an_ended_attempt_is_run_again_without_what_it_had_finished(user: User, how: str) -> None:
    # SLURM looks each 30 s only, so that its warning comes up to that much early: after 10 to 40 s here.
    limit = ("slurm.time=1", "slurm.warn_s=20") if how == "warned" else ()
    study = user.submit("ok", "gated", overrides=("slurm.cells_per_task=2", *limit))
    user.wait((user.folder / "waiting").exists)
    job = user.job(study)
    assert _counts(user.run("status", study)) == {"done": 1, "running": 1, "pending": 0, "failed": 0, "lost": 0}
    if how == "requeued":
        user.cluster.ask("scontrol", "requeue", job)
    elif how == "preempted":
        user.cluster.ask("sbatch", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    user.wait(lambda: len(user.records().get("gated", [])) == 1)
    (user.folder / "open").touch()
    user.wait_until_over()
    records = user.records()
    assert [r.status for r in records["ok"]] == ["ok"], user.logs()
    assert [r.status for r in records["gated"]] == ["interrupted", "ok"], user.logs()
    expected = "SLURM's warning that the time limit is near (SIGUSR1)" if how == "warned" else "(SIGTERM)"
    assert expected in records["gated"][0].fail_reason
    assert records["gated"][1].environment["variables"]["SLURM_RESTART_COUNT"] == "1"
    assert _counts(user.run("status", study))["done"] == 2
    assert user.run("collect", study).startswith("0 records")


def test_what_had_not_begun_when_its_task_was_given_up_is_a_row_and_runs_in_the_next_study(user: User) -> None:
    overrides = ("slurm.cells_per_task=2", "slurm.max_requeues=0")
    study = user.submit("gated", "ok", overrides=overrides)
    user.wait((user.folder / "waiting").exists)
    user.cluster.ask("scancel", "--batch", "--signal=USR1", user.job(study))
    user.wait_until_over()
    assert "2 runs are left; not requeued, since slurm.max_requeues=0" in user.logs()
    assert _counts(user.run("status", study, code=1))["lost"] == 2
    assert "1 records made of lost runs" in user.run("collect", study, code=1)
    records = user.records()
    assert [r.status for r in records["gated"] + records["ok"]] == ["interrupted", "interrupted"]
    assert "SIGUSR1" in records["gated"][0].fail_reason
    assert records["ok"][0].fail_reason.endswith("it had not begun")
    assert "0 records made of lost runs" in user.run("collect", study, code=1)
    (user.folder / "open").touch()
    again = user.submit("gated", "ok", overrides=overrides)
    user.wait_until_over()
    assert _counts(user.run("status", again))["done"] == 2, user.logs()


def test_what_sbatch_refuses_is_one_line_and_leaves_nothing(user: User) -> None:
    said = user.run(*("submit", "library=single", "device=cpu", "model=vgg11", "slurm.partition=nowhere"), code=2)
    assert len(said.splitlines()) == 1
    assert said.startswith("sbatch=refused: invalid partition specified: nowhere")
    assert list((user.results / "slurm").iterdir()) == []
    assert user.cluster.ask("squeue", "--noheader") == ""
