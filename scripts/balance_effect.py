"""What a balance is worth: step times of several balances, alternated step by step in one process group.

    python scripts/balance_effect.py RESULTS_DIR [trials=5] [rounds=5] KEY=VALUE …
    python scripts/balance_effect.py RESULTS_DIR --table

Takes what one cell takes.  Each trial is a fresh process group that builds the cell once for each distinct
partition and then steps through them in turns, so that a drift of the machine falls on all alike; the order
is another one each round.  Appends every step to RESULTS_DIR/effect.csv, from which ``--table`` prints the
predicted and the measured step of each balance.
"""

from __future__ import annotations

import csv
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from bench.jobs import Job, RankResult  # noqa: E402

if TYPE_CHECKING:
    from bench.factors import Settings
    from bench.plan import Cell
    from bench.worker.channel import Channel

BALANCES = ("uniform", "parameters", "flops", "time", "size", "optimal")
COLUMNS = (
    *("model", "library", "schedule", "stages", "micro_batches", "batch_size", "image_size", "hardware", "balance"),
    *("partition", "predicted_step_time_s", "trial", "round", "step_time_s"),
)


def run_rank(job: Job, rank: int, channel: Channel) -> RankResult:
    """One rank: ``read_back`` is partition → the step times of the rounds after the first."""
    import torch.distributed as dist

    from bench.registry import capabilities
    from bench.worker.build import Work, build
    from bench.worker.data import synthetic
    from bench.worker.measure import device_lock, timed
    from bench.worker.ranks import join, set_precision

    factors = job.factors
    dtype = set_precision(factors.precision)
    ranks = join(job, rank, grouped=capabilities(factors.library).ranks == "per_stage")
    work = Work(dtype=dtype, batch_size=factors.batch_size, optimizer=factors.optimizer, dropout=True)
    x, y = synthetic(
        seed=factors.seed,
        batch_size=factors.batch_size,
        image_size=factors.image_size,
        num_classes=factors.num_classes,
        dtype=dtype,
    )
    built = {}
    for partition in json.loads(os.environ["PARTITIONS"]):
        pipeline = build(replace(job, partition=tuple(partition)), ranks, work)
        built["-".join(map(str, partition))] = (pipeline, pipeline.place(x, y))
        channel.alive(f"built {partition}")
    times: dict[str, list[float]] = {name: [] for name in built}
    order = list(built)
    generator = random.Random(job.run_id)
    with device_lock(ranks, channel, job.lock_paths):
        for turn in range(job.steps + 1):
            generator.shuffle(order)
            for name in order:
                pipeline, batch = built[name]
                seconds, _ = timed(ranks, pipeline.step, batch)
                if turn:  # the first warms up
                    times[name].append(seconds)
                channel.step(turn)
    ranks.barrier()
    dist.destroy_process_group()
    return RankResult(rank=rank, phases={}, steps=(), stages=(), read_back=times)


def trial(cell: Cell, settings: Settings, partitions: list[tuple[int, ...]], number: int) -> dict[str, list[float]]:
    """Partition → the slowest rank's step times."""
    from bench.launch import launch
    from bench.run import make_job, worker_environment

    with tempfile.TemporaryDirectory(prefix="effect-") as folder:
        job = make_job(replace(cell, partition=partitions[0]), settings, f"effect-{number}", folder, double=False)
        log = settings.results_dir / "logs" / f"effect-{cell.factors.library.name}-{number}.log"
        outcome = launch(
            replace(job, task="scripts.balance_effect"),
            log,
            wall_limit_s=settings.wall_limit_s,
            environment={**worker_environment(cell.factors), "PARTITIONS": json.dumps(partitions)},
        )
    if outcome.status != "ok":
        raise RuntimeError(f"{outcome.fail_reason}; log: {log}")
    names = outcome.results[0].read_back
    return {
        name: [max(same) for same in zip(*(r.read_back[name] for r in outcome.results), strict=True)] for name in names
    }


def measure(results_dir: Path, overrides: list[str], trials: int, rounds: int) -> Iterator[dict[str, Any]]:
    """The rows of all trials."""
    from bench.expand import expand
    from bench.plan import plan
    from bench.resolve import resolve

    sweep = expand([*overrides, "baseline=false", "profile=true", f"steps={rounds}", f"results_dir={results_dir}",
                    f"balance={','.join(BALANCES)}"])  # fmt: skip
    cells = [resolve(cell, sweep.settings) for cell in plan(sweep)]
    distinct = list(dict.fromkeys(cell.partition for cell in cells))
    for number in range(trials):
        found = trial(cells[0], sweep.settings, distinct, number)
        for cell in cells:
            f, name = cell.factors, "-".join(map(str, cell.partition))
            assert cell.prediction is not None
            fixed = {
                "model": f.model.name,
                "library": f.library.name,
                "schedule": f.schedule,
                "stages": f.stages,
                "micro_batches": f.micro_batches,
                "batch_size": f.batch_size,
                "image_size": f.image_size,
                "hardware": cell.hardware,
                "balance": f.balance.name,
                "partition": name,
                "predicted_step_time_s": cell.prediction.step_time_s,
            }
            for turn, seconds in enumerate(found[name]):
                yield {**fixed, "trial": number, "round": turn, "step_time_s": seconds}
        print(
            f"trial {number + 1} of {trials}: "
            + ", ".join(f"{k} {statistics.median(v):.3f} s" for k, v in found.items()),
            flush=True,
        )


def table(path: Path) -> str:
    """Markdown: a row a balance; the measured step is the median over trials of each trial's median."""
    import pandas as pd

    rows = pd.read_csv(path)
    lines = [
        "| model | library | balance | partition | predicted s | measured s (least, most trial) | predicted/measured "
        "| optimal's throughput over this one's (least, most trial) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (model, library), cell in rows.groupby(["model", "library"], sort=False):
        medians = cell.pivot_table(index="trial", columns="balance", values="step_time_s", aggfunc="median")
        steps = cell.pivot_table(index=["trial", "round"], columns="balance", values="step_time_s")
        for balance, of in cell.groupby("balance", sort=False):
            own = medians[balance]
            # Within a trial, steps of one round stand side by side: the ratio is taken round by round.
            gain = (steps[balance] / steps["optimal"]).groupby("trial").median()
            predicted = of["predicted_step_time_s"].iloc[0]
            lines.append(
                f"| {model} | {library} | {balance} | {of['partition'].iloc[0]} | {predicted:.3f} "
                f"| {own.median():.3f} ({own.min():.3f}, {own.max():.3f}) | {predicted / own.median():.2f} "
                f"| {gain.median():.3f} ({gain.min():.3f}, {gain.max():.3f}) |"
            )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Measure and append, or with ``--table`` print."""
    results_dir, rest = Path(arguments[0]), arguments[1:]
    path = results_dir / "effect.csv"
    if rest != ["--table"]:
        own = dict(a.split("=") for a in rest if a.startswith(("trials=", "rounds=")))
        overrides = [a for a in rest if not a.startswith(("trials=", "rounds="))]
        results_dir.mkdir(parents=True, exist_ok=True)
        old = path.exists()
        with open(path, "a", newline="") as out:
            writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
            if not old:
                writer.writeheader()
            for row in measure(results_dir, overrides, int(own.get("trials", 5)), int(own.get("rounds", 5))):
                writer.writerow(row)
                out.flush()
    print(table(path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
