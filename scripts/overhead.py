"""What the harness's step costs over a step written directly against the library.

    python scripts/overhead.py [LIBRARY …] [KEY=VALUE …]

Builds one cell a library and alternates, step by step in the same process group, the harness's timed
step with a step written here against the library's own objects, with the same barrier, device sync and
clock.  Prints the median of the pair ratios with its 95 % interval, and the same for the direct step
against itself (A/A).  Both sides' order alternates, so that neither profits from coming second.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from bench.jobs import Job, RankResult, to_json  # noqa: E402

PAIRS = 200
WARMUP = 5
CELL = ["batch_size=8", "image_size=32", "micro_batches=2", "stages=2", "device=cpu", "seed=0"]
LIBRARIES = ("single", "ddp", "torchgpipe", "fairscale", "deepspeed", "torch")


def _direct(name: str, pipeline: Any, batch: Any) -> Callable[[], Any]:
    """One optimizer step in the library's own words, on the objects of the built pipeline."""
    if name == "deepspeed":
        engine = pipeline.engine
        return lambda: engine.train_batch(iter(batch) if batch else None)

    optimizer, loss_of = pipeline.optim, pipeline.task.loss

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    if name == "single":
        model, m = pipeline.model, len(batch)

        def single() -> None:
            for x, y in batch:
                (loss_of(model(x), y) / m).backward()
            update()

        return single
    if name == "ddp":
        replica = pipeline.replica

        def ddp() -> None:
            for index, (x, y) in enumerate(batch):
                with replica.no_sync() if index < len(batch) - 1 else nullcontext():
                    (loss_of(replica(x), y) / len(batch)).backward()
            update()

        return ddp
    if name == "torch":
        schedule, (x, y) = pipeline.schedule, batch

        def pipelining() -> None:
            arguments = () if x is None else (x,)
            keywords = {} if y is None else {"target": y, "losses": []}
            schedule.step(*arguments, **keywords, return_outputs=False)
            update()

        return pipelining
    pipe, (x, y) = pipeline.pipe, batch

    def one_graph() -> None:
        loss_of(pipe(x), y).backward()
        update()

    return one_graph


def worker(job_file: str, rank_text: str, fd: str) -> None:
    """One rank: alternate the two steps and bring the times home."""
    from bench.lifeline import die_with_parent
    from bench.registry import capabilities
    from bench.worker.build import Work, build
    from bench.worker.channel import Channel
    from bench.worker.data import synthetic
    from bench.worker.measure import device_lock, timed
    from bench.worker.ranks import join, set_precision

    job, rank = Job.loads(Path(job_file).read_text()), int(rank_text)
    die_with_parent(job.parent_pid)
    channel = Channel(rank, int(fd))
    factors = job.factors
    dtype = set_precision(factors.precision)
    ranks = join(job, rank, grouped=capabilities(factors.library).ranks == "per_stage")
    work = Work(dtype=dtype, batch_size=factors.batch_size, optimizer=factors.optimizer, dropout=True)
    pipeline = build(job, ranks, work)
    batch = pipeline.place(
        *synthetic(
            seed=0,
            batch_size=factors.batch_size,
            image_size=factors.image_size,
            num_classes=factors.num_classes,
            dtype=dtype,
        )
    )
    step = _direct(factors.library.name, pipeline, batch)

    def direct() -> float:
        ranks.barrier()
        ranks.sync()
        start = time.monotonic_ns()
        step()
        ranks.sync()
        return (time.monotonic_ns() - start) * 1e-9

    def harness() -> float:
        return timed(ranks, pipeline.step, batch)[0]

    times: dict[str, list[float]] = {"harness": [], "direct": [], "a": [], "b": []}
    with device_lock(ranks, channel, job.lock_paths):
        for _ in range(WARMUP):
            harness(), direct()
        for index in range(job.steps):
            pairs: list[tuple[str, Callable[[], float]]] = [("harness", harness), ("direct", direct)]
            pairs += [("a", direct), ("b", direct)]
            if index % 2:
                pairs = [pairs[1], pairs[0], pairs[3], pairs[2]]
            for name, run in pairs:
                times[name].append(run())
            channel.step(index)
    channel.result(to_json(RankResult(rank=rank, phases={}, steps=(), stages=(), read_back=times, notes=())))
    sys.stdout.flush()
    os._exit(0)


def _ratios(results: list[RankResult], above: str, below: str) -> list[float]:
    """Pair ratios of the slowest rank's times."""

    def slowest(name: str) -> list[float]:
        return [max(same) for same in zip(*(r.read_back[name] for r in results), strict=True)]

    return [a / b for a, b in zip(slowest(above), slowest(below), strict=True)]


def measure(name: str, overrides: list[str]) -> tuple[list[float], list[float]]:
    """(harness over direct, direct over direct) of a library's cell."""
    from bench.expand import expand
    from bench.launch import launch
    from bench.plan import plan
    from bench.run import make_job, worker_environment
    from bench.warm import fresh

    typed = [o for o in CELL if not (name == "single" and o.startswith("stages"))]
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        sweep = expand([*typed, f"steps={PAIRS}", f"results_dir={folder}", *overrides, f"library={name}"])
        cell = plan(sweep)[0]
        job = make_job(cell, sweep.settings, "overhead", folder, double=False)
        log = Path(folder) / "log"
        outcome = launch(
            job,
            log,
            wall_limit_s=1200,
            environment=worker_environment(cell.factors),
            start=partial(fresh, worker=(str(Path(__file__).resolve()), "--worker")),
        )
        if outcome.status != "ok":
            raise RuntimeError(f"{name}: {outcome.fail_reason}\n{log.read_text()[-2000:]}")
    results = list(outcome.results)
    return _ratios(results, "harness", "direct"), _ratios(results, "a", "b")


def main(arguments: list[str]) -> int:
    """Exit code 1 where a library's upper end is above 1.02 or its A/A median is off by more than 0.01."""
    from bench.series import median_interval

    names = [a for a in arguments if "=" not in a] or list(LIBRARIES)
    print(f"{'library':12} {'harness / direct':>26} {'A/A':>26}  ({PAIRS} pairs, median [95 % interval])")
    missed = 0
    for name in names:
        cells = []
        for ratios in measure(name, [a for a in arguments if "=" in a]):
            low, high = median_interval(ratios)
            cells.append((statistics.median(ratios), low, high))
        (_, _, high), (same, _, _) = cells
        good = high <= 1.02 and abs(same - 1) <= 0.01
        missed += not good
        text = " ".join(f"{median:10.4f} [{low:.4f}, {high:.4f}]" for median, low, high in cells)
        print(f"{name:12} {text}  {'ok' if good else 'MISSED'}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    sys.exit(main(sys.argv[1:]))
