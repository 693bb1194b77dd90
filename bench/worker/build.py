"""Build a cell's pipeline on this rank and check that the library does what was asked."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from adapters.protocol import Pipeline, Task
from bench.factors import Factors, Model, Optimizer
from bench.jobs import Job
from bench.worker.ranks import Ranks
from bench.worker.stage_hooks import Counts
from models.build import build_model

__all__ = [
    "ReadBackError",
    "Work",
    "build",
    "check_built",
    "check_counts",
    "forget_model",
    "make_model",
    "make_optimizer",
    "make_task",
]


class ReadBackError(RuntimeError):
    """What the library really did differs from what was asked."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one build is to train: the cell's own work, or the variant that parity compares."""

    dtype: torch.dtype
    batch_size: int
    optimizer: Optimizer
    dropout: bool


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy, the mean over the samples given."""
    return nn.functional.cross_entropy(output, target)


@functools.lru_cache(maxsize=1)
def _pristine(model: Model, granularity: str, num_classes: int, seed: int) -> nn.Sequential:
    """Drawing the weights takes longer than copying them, and parity needs them up to four times."""
    return build_model(model, granularity=granularity, num_classes=num_classes, seed=seed, dtype=torch.float32)


def forget_model() -> None:
    """Free the weights kept for further builds of this process."""
    _pristine.cache_clear()


def make_model(factors: Factors, work: Work) -> nn.Sequential:
    """The seeded model on the CPU; without ``work.dropout`` every Dropout has p = 0."""
    kept = _pristine(factors.model, factors.granularity, factors.num_classes, factors.seed)
    model = copy.deepcopy(kept).to(work.dtype).train()
    if not work.dropout:
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
    return model


def make_optimizer(asked: Optimizer) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """The one optimizer of a study: plain SGD with momentum, no weight decay."""
    return lambda parameters: torch.optim.SGD(parameters, lr=asked.lr, momentum=asked.momentum)


def make_task(job: Job, ranks: Ranks, work: Work) -> Task:
    """What the library's adapter is asked for."""
    factors = job.factors
    return Task(
        model=make_model(factors, work),
        partition=job.partition,
        stages=factors.stages,
        virtual_stages=factors.virtual_stages,
        rank=ranks.rank,
        world_size=ranks.world_size,
        devices=ranks.devices,
        batch_size=work.batch_size,
        micro_batches=factors.micro_batches,
        input_shape=(work.batch_size // factors.micro_batches, 3, factors.image_size, factors.image_size),
        num_classes=factors.num_classes,
        dtype=work.dtype,
        schedule=factors.schedule,
        checkpoint=factors.checkpoint,
        loss=loss,
        make_optimizer=make_optimizer(work.optimizer),
        options=dict(factors.library.options),
    )


def build(job: Job, ranks: Ranks, work: Work) -> Pipeline:
    """Build with the library's adapter and read back what was built."""
    task = make_task(job, ranks, work)
    pipeline: Pipeline = importlib.import_module(job.factors.library.adapter).build(task)
    check_built(job, ranks, work, pipeline)
    return pipeline


def _differ(what: str, asked: object, found: object) -> None:
    if asked != found:
        raise ReadBackError(f"read back {what}={found} where {what}={asked} was asked")


def check_built(job: Job, ranks: Ranks, work: Work, pipeline: Pipeline) -> None:
    """Compare what the library's own objects say with what was asked; a difference is an error."""
    factors = job.factors
    found = pipeline.read_back()
    _differ("micro_batches", factors.micro_batches, found.micro_batches)
    _differ("schedule", factors.schedule, found.schedule)
    _differ("checkpoint", factors.checkpoint, found.checkpoint)
    for stage, layers in found.partition.items():
        _differ(f"partition[{stage}]", job.partition[stage], layers)
    _differ("stage modules", sorted(found.partition), sorted(pipeline.stages()))
    held = sorted(pipeline.layers())
    bounds = [sum(job.partition[:i]) for i in range(len(job.partition) + 1)]
    asked = [layer for stage in sorted(found.partition) for layer in range(bounds[stage], bounds[stage + 1])]
    _differ("layers", asked, held)
    dtypes = {p.dtype for layer in pipeline.layers().values() for p in layer.parameters()}
    _differ("dtype", {work.dtype} if dtypes else set(), dtypes)
    everywhere = sorted({layer for layers in ranks.gather(held) for layer in layers})
    _differ("layers of all ranks", list(range(sum(job.partition))), everywhere)
    optimizer = pipeline.optimizer()
    trained = {id(p) for group in (optimizer.param_groups if optimizer else ()) for p in group["params"]}
    missing = [i for i, layer in pipeline.layers().items() for p in layer.parameters() if id(p) not in trained]
    _differ("layers that the optimizer leaves out", [], missing)
    for group in optimizer.param_groups if optimizer else ():
        for key, value in {"lr": work.optimizer.lr, "momentum": work.optimizer.momentum}.items():
            _differ(f"optimizer.{key}", value, group.get(key))
        _differ("optimizer.weight_decay", 0, group.get("weight_decay", 0))


def check_counts(job: Job, counts: Counts, stages: Mapping[int, nn.Module], *, calls: int) -> dict[str, object]:
    """Compare the counted calls of one step with what was asked and return them for the record.

    ``calls``: forwards a stage must have made.  Recomputations: none, all, or all but the last.
    In flight (one virtual stage): m under gpipe, min(m, p − stage) under 1f1b.
    """
    factors = job.factors
    recomputes = {"never": 0, "always": calls, "except_last": calls - 1}[factors.checkpoint]
    for stage in stages:
        _differ(f"forwards of stage {stage}", calls, counts.forwards[stage])
        _differ(f"recomputations of stage {stage}", recomputes, counts.recomputes[stage])
        if factors.virtual_stages == 1 and factors.schedule in ("gpipe", "1f1b"):
            limit = {"gpipe": calls, "1f1b": min(calls, factors.stages - stage)}[factors.schedule]
            _differ(f"micro-batches in flight on stage {stage}", limit, counts.in_flight[stage])
    return {
        "forwards": {str(s): counts.forwards[s] for s in stages},
        "recomputes": {str(s): counts.recomputes[s] for s in stages},
        "in_flight": {str(s): counts.in_flight[s] for s in stages},
    }
