"""Prove the work equal before anything is timed: the pipeline against the reference."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adapters.protocol import Pipeline
from bench.factors import Optimizer
from bench.jobs import Job, ParityResult
from bench.worker import reference
from bench.worker.build import ReadBackError, Work, build, check_counts
from bench.worker.channel import Channel
from bench.worker.ranks import DTYPES, Ranks, set_precision
from bench.worker.stage_hooks import Counts

__all__ = ["PARITY_OPTIMIZER", "ParityOutcome", "check", "check_double"]

PARITY_OPTIMIZER = Optimizer(lr=0.1, momentum=0.9)
TOLERANCES = {"fp32": (1e-6, 2e-5), "fp64": (1e-10, 1e-10)}
# tf32 and bf16 have no tolerance but a multiple of the reference's own difference between two orders
# of the micro-batches.  Where float32 or float64 misses its tolerance, the same multiple is allowed
# if it is larger: a model that amplifies rounding (BatchNorm over two values, say) misses it against
# itself, and no library could meet it.
NOISE_FACTOR = 3.0
DOUBLE_STEPS = 3
DOUBLE_SAMPLES = 2


@dataclass(frozen=True, kw_only=True)
class ParityOutcome:
    """``result`` is None where the reference fits nowhere (``unchecked`` says so).  ``counts`` are the
    calls that were counted in the compared step."""

    result: ParityResult | None
    unchecked: str
    counts: dict[str, object]


def check(job: Job, ranks: Ranks, channel: Channel, *, calls: int) -> ParityOutcome:
    """Parity (a): the cell's own precision, one step on a mini-batch of its own."""
    work = Work(
        dtype=DTYPES[job.factors.precision],
        batch_size=job.factors.batch_size,
        optimizer=PARITY_OPTIMIZER,
        dropout=False,
    )
    return _compare(job, ranks, channel, work, job.factors.precision, 1, calls)


def check_double(job: Job, ranks: Ranks, channel: Channel, *, calls: int) -> ParityOutcome:
    """Parity (b): float64, three steps on different data, the same partition, schedule, checkpoint and m.

    Two samples a micro-batch suffice: what could differ does not depend on their number.
    """
    factors = job.factors
    samples = min(DOUBLE_SAMPLES, factors.batch_size // factors.micro_batches)
    work = Work(
        dtype=torch.float64,
        batch_size=samples * factors.micro_batches,
        optimizer=PARITY_OPTIMIZER,
        dropout=False,
    )
    return _compare(job, ranks, channel, work, "fp64", DOUBLE_STEPS, calls)


@contextmanager
def _deterministic() -> Any:
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def _compare(
    job: Job, ranks: Ranks, channel: Channel, work: Work, precision: str, steps: int, calls: int
) -> ParityOutcome:
    set_precision(precision)
    with _deterministic():
        noisy = precision not in TOLERANCES
        path, unchecked = _reference(job, ranks, channel, work, steps, noise=noisy)
        pipeline = build(job, ranks, work)
        try:
            gradient, update, buffers, counts = _train(job, ranks, channel, pipeline, work, steps, calls)
        finally:
            pipeline.close()
            del pipeline
            gc.collect()
            ranks.release_memory()
    if path is None:
        set_precision(job.factors.precision)
        return ParityOutcome(result=None, unchecked=unchecked, counts=counts)
    known = reference.read(path)
    gathered = ranks.gather(
        (
            reference.worst(gradient, known.gradient),
            reference.worst(update, known.update),
            reference.worst(buffers, known.buffers),
        )
    )
    (grad_error, grad_layer), (update_error, update_layer), (buffer_error, _) = (
        max(errors) for errors in zip(*gathered, strict=True)
    )
    grad_floor, update_floor = TOLERANCES.get(precision, (0.0, 0.0))
    if not noisy and (grad_error > grad_floor or update_error > update_floor):
        with _deterministic():
            path, unchecked = _reference(job, ranks, channel, work, steps, noise=True)
        known = known if path is None else reference.read(path)
    set_precision(job.factors.precision)
    grad_tolerance = max(grad_floor, NOISE_FACTOR * known.noise_gradient)
    update_tolerance = max(update_floor, NOISE_FACTOR * known.noise_update)
    result = ParityResult(
        precision=precision,
        batch_size=work.batch_size,
        steps=steps,
        gradient_error=grad_error,
        gradient_layer=grad_layer,
        gradient_tolerance=grad_tolerance,
        update_error=update_error,
        update_layer=update_layer,
        update_tolerance=update_tolerance,
        buffer_error=buffer_error,
        dropout_off=True,
        reference_device=known.device,
        passed=grad_error <= grad_tolerance and update_error <= update_tolerance,
    )
    ranks.barrier()
    return ParityOutcome(result=result, unchecked="", counts=counts)


def _reference(
    job: Job, ranks: Ranks, channel: Channel, work: Work, steps: int, *, noise: bool
) -> tuple[Path | None, str]:
    """The reference's file, obtained by rank 0 while the others wait."""
    found: tuple[Path | None, str] = (None, "")
    if ranks.rank == 0:
        cache = Path(job.cache_dir)
        found = reference.obtain(
            job.factors, work, steps, ranks.devices[0], noise=noise, cache_dir=cache, channel=channel
        )
        ranks.release_memory()
    first: tuple[Path | None, str] = ranks.gather(found)[0]
    return first


Tensors = dict[int, torch.Tensor]


def _train(
    job: Job, ranks: Ranks, channel: Channel, pipeline: Pipeline, work: Work, steps: int, calls: int
) -> tuple[Tensors, Tensors, Tensors, dict[str, object]]:
    layers = pipeline.layers()
    start = reference.layer_tensors(layers)
    gradient: Tensors = {}
    counts = Counts(pipeline.stages())
    optimizer = pipeline.optimizer()
    for step in range(steps):
        last = step == steps - 1
        # The gradients as the optimizer is about to use them: after any clipping or scaling.
        handle = (
            optimizer.register_step_pre_hook(lambda *_: gradient.update(_gradients(layers)))
            if optimizer is not None and last
            else None
        )
        batch = pipeline.place(*reference.mini_batch(job.factors, work, step))
        ranks.barrier()
        if step == 0:
            with counts.hooks, channel.stepping():
                pipeline.step(batch)
                ranks.sync()
        else:
            with channel.stepping():
                pipeline.step(batch)
                ranks.sync()
        if handle is not None:
            handle.remove()
        kept = [i for i, layer in layers.items() for p in layer.parameters() if _nonzero(p.grad)]
        if kept:
            raise ReadBackError(f"gradients of layers {sorted(set(kept))} are not cleared after a step")
        channel.step(step)
    counted = check_counts(job, counts, pipeline.stages(), calls=calls)
    end = reference.layer_tensors(layers)
    update = {i: reference.difference(end[i], start[i]) for i in end}
    # A rank whose optimizer never stepped left ``gradient`` empty: that is an error, not a pass.
    missing = {i: torch.empty(0) for i in layers} | gradient
    return missing, update, reference.layer_tensors(layers, buffers=True), counted


def _gradients(layers: Mapping[int, torch.nn.Module]) -> Tensors:
    return {
        i: reference.flat([p.grad for p in layer.parameters() if p.grad is not None]) for i, layer in layers.items()
    }


def _nonzero(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(gradient.count_nonzero())
