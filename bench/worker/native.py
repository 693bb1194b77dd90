"""Ask a library for the partition that its own routine picks."""

from __future__ import annotations

import importlib

import torch.distributed as dist

from bench.jobs import Job, RankResult
from bench.registry import capabilities
from bench.worker.build import Work, make_task
from bench.worker.channel import Channel
from bench.worker.measure import device_lock
from bench.worker.ranks import join, set_precision

__all__ = ["run_rank"]


def run_rank(job: Job, rank: int, channel: Channel) -> RankResult:
    """``read_back["partition"]``: what the routine picked, the same on every rank."""
    channel.phase("plan")
    factors = job.factors
    dtype = set_precision(factors.precision)
    ranks = join(job, rank, grouped=capabilities(factors.library).ranks == "per_stage")
    work = Work(dtype=dtype, batch_size=factors.batch_size, optimizer=factors.optimizer, dropout=True)
    adapter = importlib.import_module(factors.library.adapter)
    rule = factors.balance.name.removeprefix("native_")
    # A routine may measure times of its own.
    with device_lock(ranks, channel, job.lock_paths):
        picked = adapter.native_partition(rule, dict(factors.balance.options), make_task(job, ranks, work))
    ranks.barrier()
    if ranks.group is not None:
        dist.destroy_process_group()
    return RankResult(
        rank=rank, phases={}, steps=(), stages=(), read_back={"partition": [int(count) for count in picked]}
    )
