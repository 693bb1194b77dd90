"""The same commands on a GPU; with a single one the stages share it, which proves correctness only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.hardware import visible_gpus
from bench.record import load_all

PROJECT = Path(__file__).resolve().parents[1]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_every_library_runs_on_cuda_with_parity(tmp_path: Path, precision: str) -> None:
    share = "true" if len(visible_gpus()) < 2 else "false"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench",
            "-m",
            "experiment=smoke",
            "device=cuda",
            "image_size=64",
            f"precision={precision}",
            f"share_devices={share}",
            "results_dir=results",
        ],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cells = [r for r in load_all(tmp_path / "results")[0] if r.kind == "cell"]
    assert len(cells) >= 6
    for r in cells:
        assert r.status in ("ok", "unsupported"), r.fail_reason
        if r.status == "ok":
            assert all(s.peak_reserved_bytes and s.device_uuid for s in r.stages)
            assert r.hardware.startswith("cuda-")
