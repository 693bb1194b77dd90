"""One rank that checks many combinations of factors in one process group.

``python combinations_rank.py JOBS_FILE RANK``: JOBS_FILE holds a JSON list of jobs.  The last line of
stdout is a JSON list: for each job ``""`` or what was wrong, and the error of the buffers.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from bench.jobs import Job
from bench.registry import capabilities
from bench.worker import parity
from bench.worker.build import forget_model
from bench.worker.channel import Channel
from bench.worker.ranks import Ranks, join, set_precision


def verdict(job: Job, ranks: Ranks, channel: Channel) -> tuple[str, float]:
    replicas = capabilities(job.factors.library).stages_are == "replicas"
    calls = job.factors.micro_batches // (job.factors.stages if replicas else 1)
    try:
        set_precision(job.factors.precision)
        own = parity.check(job, ranks, channel, calls=calls).result
        double = parity.check_double(job, ranks, channel, calls=calls).result
    except Exception as error:
        return f"{type(error).__name__}: {error}", -1.0
    assert own is not None
    assert double is not None
    wrong = "" if own.passed and double.passed else f"{own} {double}"
    if double.gradient_tolerance > 1e-10:
        wrong += f" tolerance of float64 is {double.gradient_tolerance}"
    return wrong, double.buffer_error


def main() -> None:
    jobs = [Job.loads(json.dumps(data)) for data in json.loads(Path(sys.argv[1]).read_text())]
    rank = int(sys.argv[2])
    ranks = join(jobs[0], rank, grouped=capabilities(jobs[0].factors.library).ranks == "per_stage")
    channel = Channel(rank, os.open(os.devnull, os.O_WRONLY))
    found = []
    for job in jobs:
        forget_model()
        found.append(verdict(job, ranks, channel))
    print(json.dumps(found))
    sys.stdout.flush()
    ranks.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
