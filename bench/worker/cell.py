"""The path of one rank through its cell."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from adapters.protocol import Capabilities, Pipeline
from bench.jobs import Job, RankResult, SpanResult, StageResult, TraceResult
from bench.registry import capabilities
from bench.worker import memory, parity
from bench.worker.build import Work, build, forget_model
from bench.worker.channel import Channel
from bench.worker.data import loader, synthetic
from bench.worker.measure import device_lock, enough_steps, foreign_load, run_steps
from bench.worker.ranks import Ranks, join, set_precision
from bench.worker.trace import trace

__all__ = ["lanes", "run_rank"]


def lanes(job: Job, can: Capabilities) -> Callable[[int], int]:
    """The map from a model stage to its device, under the schedule's placement."""
    stages = job.factors.stages
    rule = next((r for r in can.schedules if r.name == job.factors.schedule), None)
    if rule is not None and rule.placement == "v":
        return lambda k: k if k < stages else 2 * stages - 1 - k
    return lambda k: k % stages


def run_rank(job: Job, rank: int, channel: Channel) -> RankResult:
    """Build → parity → warm up → measure → memory pass → trace pass; a failed parity ends it before the clock."""
    # It dumps its whole schedule at each error, which would bury the cause in the log.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    can = capabilities(job.factors.library)
    replicas = can.stages_are == "replicas"
    calls = job.factors.micro_batches // (job.factors.stages if replicas else 1)
    dtype = set_precision(job.factors.precision)
    ranks = join(job, rank, grouped=can.ranks == "per_stage")

    channel.phase("parity")
    outcome = parity.check(job, ranks, channel, calls=calls)
    double = parity.check_double(job, ranks, channel, calls=calls) if job.double_parity else None
    read_back = {**outcome.counts, "schedule": job.factors.schedule, "checkpoint": job.factors.checkpoint}
    result = RankResult(
        rank=rank,
        phases={},
        steps=(),
        stages=(),
        read_back=read_back,
        parity=outcome.result,
        parity_double=double.result if double else None,
        parity_unchecked=outcome.unchecked or (double.unchecked if double else ""),
        notes=can.notes,
    )
    if any(r is not None and not r.passed for r in (result.parity, result.parity_double)):
        return _leave(ranks, channel, result)

    channel.phase("build")
    work = Work(dtype=dtype, batch_size=job.factors.batch_size, optimizer=job.factors.optimizer, dropout=True)
    pipeline = build(job, ranks, work)
    forget_model()
    ranks.release_memory()
    next_batch = _batches(job, pipeline, work)
    # Dropout's draws must not depend on what was imported or built before, and when.
    torch.manual_seed(job.factors.seed)
    enough = enough_steps(job.steps, job.target_ci, job.max_steps)
    with device_lock(ranks, channel, job.lock_paths), foreign_load(ranks) as load:
        steps = run_steps(ranks, channel, pipeline, next_batch, warmup_steps=job.warmup_steps, enough=enough)
        busy = load()

    lane = (lambda k: rank) if replicas else lanes(job, can)
    batch = next_batch()
    peaks: dict[int, memory.Peak] = {}
    if job.memory:
        channel.phase("memory")
        with channel.stepping():
            peaks = memory.peaks(ranks, pipeline, batch, lane)
    stages = tuple(
        _stage(job, ranks, pipeline, stage, lane, peaks.get(stage), str(dtype).removeprefix("torch."))
        for stage in sorted({lane(k) for k in pipeline.stages()})
    )
    traced: TraceResult | None = None
    spans: tuple[SpanResult, ...] = ()
    if job.trace:
        channel.phase("trace")
        traced, spans = trace(ranks, channel, pipeline, batch, lane)
    pipeline.close()
    del pipeline
    gc.collect()
    return _leave(
        ranks, channel, replace(result, steps=steps, stages=stages, foreign_load=busy, trace=traced, spans=spans)
    )


def _leave(ranks: Ranks, channel: Channel, result: RankResult) -> RankResult:
    ranks.barrier()
    if ranks.group is not None:
        dist.destroy_process_group()
    return replace(result, phases=channel.seconds(), stepping_s=channel.stepping_s)


def _batches(job: Job, pipeline: Pipeline, work: Work) -> Callable[[], Any]:
    stream = loader(job.factors, work.dtype)
    if stream is not None:
        return lambda: pipeline.place(*next(stream))
    factors = job.factors
    placed = pipeline.place(
        *synthetic(
            seed=factors.seed,
            batch_size=factors.batch_size,
            image_size=factors.image_size,
            num_classes=factors.num_classes,
            dtype=work.dtype,
        )
    )
    return lambda: placed


def _stage(
    job: Job,
    ranks: Ranks,
    pipeline: Pipeline,
    stage: int,
    lane: Callable[[int], int],
    peak: memory.Peak | None,
    dtype: str,
) -> StageResult:
    bounds = [sum(job.partition[:i]) for i in range(len(job.partition) + 1)]
    layers = tuple(
        layer for k in sorted(pipeline.stages()) if lane(k) == stage for layer in range(bounds[k], bounds[k + 1])
    )
    live = pipeline.layers()
    parameters = [p for layer in layers for p in live[layer].parameters()]
    measured = StageResult(
        stage=stage,
        rank=ranks.rank,
        device=str(ranks.devices[stage]),
        layers=layers,
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        dtype=dtype,
    )
    if peak is None:
        return measured
    return replace(
        measured,
        peak_allocated_bytes=peak.allocated,
        peak_reserved_bytes=peak.reserved,
        peak_parameters_bytes=peak.parameters,
        peak_gradients_bytes=peak.gradients,
        peak_optimizer_state_bytes=peak.optimizer_state,
        peak_placed_bytes=peak.placed,
        peak_activations_bytes=peak.activations,
        allocator_retries=peak.retries,
    )
