"""One rank that builds a cell, steps once and traces, without parity and measuring before."""

from __future__ import annotations

import torch.distributed as dist

from bench.jobs import Job, RankResult
from bench.registry import capabilities
from bench.worker.build import Work, build
from bench.worker.cell import lanes
from bench.worker.channel import Channel
from bench.worker.data import synthetic
from bench.worker.ranks import join, set_precision
from bench.worker.trace import trace


def run_rank(job: Job, rank: int, channel: Channel) -> RankResult:
    factors = job.factors
    can = capabilities(factors.library)
    dtype = set_precision(factors.precision)
    ranks = join(job, rank, grouped=can.ranks == "per_stage")
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
    pipeline.step(batch)
    lane = (lambda k: rank) if can.stages_are == "replicas" else lanes(job, can)
    traced, spans = trace(ranks, channel, pipeline, batch, lane)
    ranks.barrier()
    if ranks.group is not None:
        dist.destroy_process_group()
    return RankResult(rank=rank, phases={}, steps=(), stages=(), read_back={}, trace=traced, spans=spans)
