"""One rank that tries every fault on one adapter within one process group and prints what the gate said.

``python gate_rank.py JOB_FILE RANK FAULT…``; the last line of stdout is JSON: fault → verdict.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from bench.jobs import Job
from bench.registry import capabilities
from bench.worker import build as building
from bench.worker import parity
from bench.worker.channel import Channel
from bench.worker.ranks import join

sys.path.insert(0, str(Path(__file__).parent))
from sabotage import sabotaged


def main() -> None:
    job = Job.loads(Path(sys.argv[1]).read_text())
    rank = int(sys.argv[2])
    can = capabilities(job.factors.library)
    calls = job.factors.micro_batches // (job.factors.stages if can.stages_are == "replicas" else 1)
    ranks = join(job, rank, grouped=can.ranks == "per_stage")
    channel = Channel(rank, os.open(os.devnull, os.O_WRONLY))
    adapter = importlib.import_module(job.factors.library.adapter)
    honest = adapter.build
    verdicts = {}
    for fault in sys.argv[3:]:
        adapter.build = sabotaged(honest, fault)
        verdicts[fault] = _verdict(job, ranks, channel, calls)
    print(json.dumps(verdicts))
    sys.stdout.flush()
    ranks.barrier()
    os._exit(0)


def _verdict(job: Job, ranks: object, channel: Channel, calls: int) -> str:
    for check in (parity.check, parity.check_double):
        try:
            outcome = check(replace(job), ranks, channel, calls=calls)  # type: ignore[arg-type]
        except building.ReadBackError as error:
            return f"read back: {error}"
        assert outcome.result is not None
        if not outcome.result.passed:
            return "parity_failed"
    return "passed"


if __name__ == "__main__":
    main()
