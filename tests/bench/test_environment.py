"""What a record says of where it was made."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import environment
from bench.environment import describe
from bench.registry import libraries


def test_versions_host_and_cores_are_those_of_this_machine() -> None:
    found = describe(libraries()["torchgpipe"], ())
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["numpy"] == np.__version__
    assert torch.__version__.startswith(found["versions"]["torch"].split("+")[0])
    assert found["versions"]["torchgpipe"]
    assert "torchgpipe" not in describe(libraries()["single"], ())["versions"]
    assert found["host"] == socket.gethostname()
    assert found["kernel"] == platform.release()
    assert found["cores_allowed"] == len(os.sched_getaffinity(0))
    assert found["gpus"] == found["links"] == []
    assert json.loads(json.dumps(found)) == found


def test_variables_that_matter_are_kept_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "SLURM_JOB_ID", "SLURM_JWT", "TORCH_API_TOKEN", "MY_PASSWORD", "HOME"):
        monkeypatch.setenv(name, "set")
    variables = describe(libraries()["single"], ())["variables"]
    assert variables["NCCL_DEBUG"] == variables["SLURM_JOB_ID"] == "set"
    assert not {"SLURM_JWT", "TORCH_API_TOKEN", "MY_PASSWORD", "HOME"} & set(variables)


def test_the_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "-m", "stages=1,2", "data.path=/a folder"])
    assert describe(libraries()["single"], ())["command"] == "python -m bench -m stages=1,2 'data.path=/a folder'"


def _describe_git(top: Path) -> tuple[str, bool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "__file__", str(top / "bench" / "environment.py"))
        environment._git.cache_clear()
        try:
            found = describe(libraries()["single"], ())
        finally:
            environment._git.cache_clear()
    return found["git_commit"], found["git_dirty"]


def test_commit_and_changes_are_those_of_the_checkout(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert _describe_git(tmp_path) == ("", False)
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    assert _describe_git(tmp_path) == (commit, False)
    (tmp_path / "results").write_text("new files do not count")
    assert _describe_git(tmp_path) == (commit, False)
    (tmp_path / "file").write_text("two")
    assert _describe_git(tmp_path) == (commit, True)
