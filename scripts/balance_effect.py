"""What a balance is worth: step times of several balances, alternated step by step in one process group.

    python scripts/balance_effect.py RESULTS_DIR [trials=5] [rounds=5] KEY=VALUE …
    python scripts/balance_effect.py RESULTS_DIR --table

Takes what one cell takes.  Each trial is a fresh process group that builds the cell once for each distinct
partition and then steps through them in turns, so that a drift of the machine falls on all alike; the order
is another one each round.  In each round the layers are timed once too, as a profile does it: a trial's
predictions come from its own times, since here the same work takes up to a third longer from one minute to
the next.  The partitions come from the profile in RESULTS_DIR.  Appends every step to RESULTS_DIR/effect.csv,
from which ``--table`` prints the predicted and the measured step of each balance.
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
    """One rank: ``read_back`` has ``steps``, partition → step times of the rounds after the first, and
    ``layers``, the medians of each layer's times."""
    import torch.distributed as dist

    from bench.registry import capabilities
    from bench.worker.build import Work, build, make_model, make_optimizer
    from bench.worker.data import synthetic
    from bench.worker.measure import device_lock, timed
    from bench.worker.profile import LayerRun, repeat_layers
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
    layers = [LayerRun(layer, make_optimizer(factors.optimizer)) for layer in make_model(factors, work)]
    piece = x[: factors.batch_size // factors.micro_batches]
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
            repeat_layers(layers, piece, timed=turn > 0)
    medians = [run.medians() for run in layers]
    ranks.barrier()
    dist.destroy_process_group()
    return RankResult(rank=rank, phases={}, steps=(), stages=(), read_back={"steps": times, "layers": medians})


def trial(
    cell: Cell, settings: Settings, partitions: list[tuple[int, ...]], number: int
) -> tuple[dict[str, list[float]], list[dict[str, float]]]:
    """(partition → the slowest rank's step times, the mean over ranks of each layer's times)."""
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
    found = [r.read_back for r in outcome.results]
    steps = {
        name: [max(same) for same in zip(*(f["steps"][name] for f in found), strict=True)] for name in found[0]["steps"]
    }
    layers = [
        {key: statistics.fmean(each[key] for each in same) for key in same[0]}
        for same in zip(*(f["layers"] for f in found), strict=True)
    ]
    return steps, layers


def measure(results_dir: Path, overrides: list[str], trials: int, rounds: int) -> Iterator[dict[str, Any]]:
    """The rows of all trials."""
    from bench.expand import expand
    from bench.partition.prediction import predict
    from bench.partition.rules import schedule_of
    from bench.plan import known_profile, plan
    from bench.resolve import resolve

    sweep = expand([*overrides, "baseline=false", "profile=true", f"steps={rounds}", f"results_dir={results_dir}",
                    f"balance={','.join(BALANCES)}"])  # fmt: skip
    cells = [resolve(cell, sweep.settings) for cell in plan(sweep)]
    profile = known_profile(cells[0].factors, results_dir)
    assert profile is not None
    distinct = list(dict.fromkeys(cell.partition for cell in cells))
    for number in range(trials):
        found, times = trial(cells[0], sweep.settings, distinct, number)
        layers = [replace(a, **b) for a, b in zip(profile.layers, times, strict=True)]  # type: ignore[arg-type]
        own = replace(profile, layers=tuple(layers))
        for cell in cells:
            f, name = cell.factors, "-".join(map(str, cell.partition))
            predicted = predict(own, cell.partition, schedule_of(f), overlap=True)
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
                "predicted_step_time_s": predicted.step_time_s,
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
    heads = [
        *("model", "library", "balance", "partition", "predicted s", "measured s (least, most trial)"),
        *("predicted/measured (least, most trial)", "optimal's throughput over this one's (least, most trial)"),
    ]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for (model, library), cell in rows.groupby(["model", "library"], sort=False):
        medians = cell.pivot_table(index="trial", columns="balance", values="step_time_s", aggfunc="median")
        steps = cell.pivot_table(index=["trial", "round"], columns="balance", values="step_time_s")
        for balance, of in cell.groupby("balance", sort=False):
            own = medians[balance]
            # Within a trial, steps of one round stand side by side: the ratio is taken round by round.
            gain = (steps[balance] / steps["optimal"]).groupby("trial").median()
            predicted = of.groupby("trial")["predicted_step_time_s"].first()
            ratio = predicted / own
            cells = [model, library, balance, of["partition"].iloc[0], f"{predicted.median():.3f}"]
            cells += [
                f"{v.median():.{d}f} ({v.min():.{d}f}, {v.max():.{d}f})" for v, d in ((own, 3), (ratio, 2), (gain, 3))
            ]
            lines.append(f"| {' | '.join(cells)} |")
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
