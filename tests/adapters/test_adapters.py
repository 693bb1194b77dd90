"""Every claim of every adapter, run for real: parity in its own precision and in float64 over three steps.

Parity also counts the forwards and recomputations of each stage and reads back boundaries, schedule and
dtype, so a claim that is not kept fails here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.factors import Factors, Model
from bench.jobs import Job, to_json
from bench.registry import capabilities, libraries

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
SPLITS = {
    "residual": {1: (12,), 2: (4, 8), 4: (3, 2, 2, 5)},
    "awkward": {1: (10,), 2: (4, 6), 4: (2, 2, 4, 2)},
    "tiny": {1: (6,), 2: (4, 2)},
}
NO_PARAMETERS = (2, 2, 2, 2, 2)


def job(name: str, folder: Path, model: str, stages: int, **changes: object) -> Job:
    can = capabilities(libraries()[name])
    factors = Factors(
        library=libraries()[name],
        model=Model(
            name=model, target=f"{'tiny' if model == 'tiny' else 'tiny_models'}.{'build' if model == 'tiny' else model}"
        ),
        image_size=8,
        num_classes=5,
        batch_size=16,
        micro_batches=4,
        stages=stages,
        schedule=can.schedules[0].name if can.schedules else "none",
        device="cpu",
    ).replace(**{k: v for k, v in changes.items() if k != "partition"})
    whole = sum(SPLITS[model][1])
    partition = SPLITS[model].get(stages * factors.virtual_stages, ())
    made = Job(
        run_id="x",
        cell_id="x",
        factors=factors,
        partition=partition if can.stages_are == "devices" else (whole,),
        world_size=stages if can.ranks == "per_stage" else 1,
        warmup_steps=0,
        steps=0,
        device_indices=(),
        rendezvous=str(folder / "rendezvous"),
        cache_dir=str(folder),
        lock_paths=(),
        double_parity=True,
        timeout_s=60,
        parent_pid=os.getpid(),
    )
    return replace(made, partition=changes["partition"]) if "partition" in changes else made  # type: ignore[arg-type]


def run(jobs: list[Job], folder: Path) -> list[tuple[str, float]]:
    file = folder / "jobs.json"
    file.write_text(json.dumps([to_json(j) for j in jobs]))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [HERE, HERE.parent / "bench" / "worker", PROJECT])),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(PROJECT / ".cache" / "torch_extensions")),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(jobs[0].world_size),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "combinations_rank.py"), str(file), str(rank)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(jobs[0].world_size)
    ]
    try:
        outputs = [p.communicate(timeout=200)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
    found: list[tuple[str, float]] = []
    for output in outputs:
        last = output.splitlines()[-1] if output.strip() else ""
        assert last.startswith("[["), output[-3000:]
        found = json.loads(last)
        wrong = {describe(j): text for j, (text, _) in zip(jobs, found, strict=True) if text}
        assert not wrong, json.dumps(wrong, indent=1)
    return found


def describe(made: Job) -> str:
    f = made.factors
    kind = f"{f.schedule} v={f.virtual_stages} {f.checkpoint} {f.precision}"
    return f"{f.model.name} {made.partition} m={f.micro_batches} {kind}"


def shared_memory() -> set[str]:
    return {p.name for p in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", ["single", "ddp", "torchgpipe", "fairscale", "deepspeed", "torch"])
def test_every_claim_holds(name: str, stages: int, tmp_path: Path) -> None:
    can = capabilities(libraries()[name])
    if can.stages_are == "none" and stages > 1:
        pytest.skip("one device only")
    if stages == 4 and can.stages_are == "replicas":
        pytest.skip("two replicas show what four would")
    jobs = []
    for checkpoint in can.checkpoints:
        jobs += [
            job(name, tmp_path, model, stages, checkpoint=checkpoint)
            for model in ("residual", "awkward")
            if not (stages == 4 and model == "residual" and checkpoint == "except_last")
        ]
    if stages <= 2:
        jobs += [job(name, tmp_path, "tiny", stages, precision=precision) for precision in ("bf16", "fp64")]
        if can.stages_are == "devices":
            m = 1 if can.schedules[0].min_micro_batches == "one" else stages
            jobs.append(job(name, tmp_path, "tiny", stages, micro_batches=m))
    if stages == 4 and can.stages_are == "devices":
        # The third stage has no parameters and ends in a Flatten, the second starts with a ReLU.
        jobs.append(job(name, tmp_path, "awkward", 4, partition=(2, 2, 4, 2)))
    before = shared_memory()
    run(jobs, tmp_path)
    assert shared_memory() == before


@pytest.mark.timeout(240)
def test_every_schedule_of_the_library_with_several(tmp_path: Path) -> None:
    name = next(n for n, lib in libraries().items() if len(capabilities(lib).schedules) > 1)
    jobs = []
    for rule in capabilities(libraries()[name]).schedules:
        v = 1 if rule.virtual_stages == (1,) else 2
        for checkpoint in rule.checkpoints:
            for model in ("residual", "awkward"):
                jobs.append(
                    job(
                        name,
                        tmp_path,
                        model,
                        2,
                        schedule=rule.name,
                        virtual_stages=v,
                        checkpoint=checkpoint,
                    )
                )
    found = run(jobs, tmp_path)
    # Its recomputation is ours to wrap, so it must not move BatchNorm statistics a second time.
    buffers = {describe(j): error for j, (_, error) in zip(jobs, found, strict=True)}
    assert max(buffers.values()) < 1e-12, buffers
