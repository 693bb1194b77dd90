"""The gate closes: a fault put into any library's work is caught before anything is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.factors import Factors, Model
from bench.jobs import Job
from bench.registry import libraries

HERE = Path(__file__).parent
SCHEDULES = {"single": "none", "ddp": "none", "deepspeed": "1f1b"}
FAULTS = [
    "none",
    "clipping",
    "learning_rate",
    "learning_rate_silently",
    "momentum",
    "momentum_silently",
    "dropped_micro_batch",
    "wrong_boundary",
    "kept_gradients",
    "summed_loss",
    "one_micro_batch",
]


def _job(name: str, tmp_path: Path) -> Job:
    stages = 1 if name == "single" else 2
    factors = Factors(
        library=libraries()[name],
        model=Model(name="tiny", target="tiny.build"),
        image_size=8,
        num_classes=5,
        batch_size=16,
        micro_batches=4,
        stages=stages,
        schedule=SCHEDULES.get(name, "gpipe"),
        device="cpu",
    )
    whole = name in ("single", "ddp")
    return Job(
        run_id="gate",
        cell_id="gate",
        factors=factors,
        partition=(6,) if whole else (4, 2),
        world_size=2 if name in ("ddp", "deepspeed", "torch") else 1,
        warmup_steps=0,
        steps=0,
        device_indices=(),
        rendezvous=str(tmp_path / "rendezvous"),
        cache_dir=str(tmp_path),
        lock_paths=(),
        double_parity=True,
        timeout_s=60,
        parent_pid=os.getpid(),
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["single", "ddp", "torchgpipe", "fairscale", "deepspeed", "torch"])
def test_every_fault_is_caught(name: str, tmp_path: Path) -> None:
    job = _job(name, tmp_path)
    file = tmp_path / "job.json"
    file.write_text(job.dumps())
    faults = [f for f in FAULTS if not (name == "ddp" and f == "one_micro_batch")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[2])]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(HERE.parents[2] / ".cache" / "torch_extensions"),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "gate_rank.py"), str(file), str(rank), *faults],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.world_size)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(job.world_size)
    ]
    try:
        outputs = [p.communicate(timeout=220)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
    for output in outputs:
        verdicts = json.loads(output.splitlines()[-1]) if output.strip() else {}
        assert verdicts.get("none") == "passed", output[-3000:]
        missed = [f for f in faults[1:] if not verdicts[f].startswith(("parity_failed", "read back"))]
        assert not missed, verdicts
