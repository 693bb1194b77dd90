"""The command line as a user meets it: real processes, exit codes, one line for a mistake."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).resolve().parents[2]


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["library=deepsped"], ["library=deepsped", "torchgpipe", "did you mean deepspeed?"]),
        (["model=resnet19"], ["model=resnet19", "resnet18"]),
        (["balance=unifrom"], ["balance=unifrom", "uniform", "parameters", "manual"]),
        (["micro_batch=4"], ["micro_batch=4", "micro_batches"]),
        (["optimizer.lrr=1"], ["optimizer.lrr=1", "optimizer.lr"]),
        (["stages=two"], ["stages=two", "whole number"]),
        (["steps=some"], ["steps=some", "whole number"]),
        (["steps=auto", "target_ci=0"], ["target_ci=0", "above 0"]),
        (["stages=1.5"], ["stages=1.5", "whole number"]),
        (["share_devices=maybe"], ["share_devices=maybe", "true or false"]),
        (["stages=-1"], ["stages=-1", "above 0"]),
        (["precision=fp16"], ["precision=fp16", "bf16"]),
        (["stages=16", "micro_batches=16"], ["stages=16", "15 layers"]),
        (["batch_size=30"], ["micro_batches=4", "batch_size=30"]),
        (["device=cuda"], ["device=cuda", "no GPU"]),
        (["balance=manual", "balance.layers=[8,8]"], ["balance.layers=[8,8]", "16", "15"]),
        (["balance=manual", "balance.layers=[15,0]"], ["balance.layers=[15,0]", "at least one layer"]),
        (["library=deepspeed", "checkpoint=except_last"], ["checkpoint=except_last", "never, always"]),
        (["library=single", "stages=2"], ["stages=2", "single"]),
        (["data=imagefolder"], ["data.path", "data=imagefolder"]),
        (["data=imagefolder", "data.path=/no/such"], ["data.path=/no/such", "folder"]),
        (["results_dir=/proc/no/such"], ["results_dir=/proc/no/such", "cannot be written"]),
        (["model=custom"], ["model.target", "model=custom"]),
        (["model=custom", "model.target=nope.build"], ["model.target=nope.build", "nope"]),
        (["library=torch,ddp"], ["-m"]),
        (["--fast"], ["--fast", "--help"]),
        (["stages"], ["stages", "key=value"]),
        (["-m", "steps=1,2"], ["steps=1,2", "setting"]),
        (["-m", "experiment=smoke,demo"], ["experiment=smoke,demo", "choose one"]),
    ],
)
def test_a_mistake_gets_one_line_and_starts_nothing(tmp_path: Path, arguments: list[str], parts: list[str]) -> None:
    done = (
        run(tmp_path, "device=cpu", *arguments)
        if not any("device" in a for a in arguments)
        else run(tmp_path, *arguments)
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr
    assert not list(tmp_path.glob("results/records/*.json"))
    assert not (tmp_path / "results" / "logs").exists()
    # Hydra leaves nothing of its own behind.
    assert {p.name for p in tmp_path.iterdir()} <= {"results"}


@pytest.mark.alone
def test_help_explains_every_key_in_under_a_second(tmp_path: Path) -> None:
    seconds = []
    for _ in range(3):
        start = time.monotonic()
        done = run(tmp_path, "--help")
        seconds.append(time.monotonic() - start)
    assert done.returncode == 0
    tree = yaml.safe_load((PROJECT / "conf" / "config.yaml").read_text())
    keys = {k for k in tree if k not in ("defaults", "optimizer")} | {f"optimizer.{k}" for k in tree["optimizer"]}
    for key in keys:
        assert key in done.stdout
    for group in ("library", "model", "balance", "data", "experiment"):
        for path in (PROJECT / "conf" / group).glob("*.yaml"):
            assert path.stem in done.stdout
    assert min(seconds) < 1


@pytest.mark.parametrize("name", ["adapters", "models", "conf"])
def test_a_folder_that_shadows_ours_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    done = run(tmp_path, "library=torch")
    assert done.returncode == 2
    assert str(tmp_path / name) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_results_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "results").touch()
    done = run(tmp_path, "library=torch")
    assert done.returncode == 2
    assert "results_dir=results: cannot be written" in done.stderr
