"""What a profile says of a partition: the figures that stand in a record beside the measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from bench.partition.memory import MemoryTerms, stage_memory
from bench.partition.profile import ITEM_BYTES, Profile
from bench.partition.simulate import Schedule

__all__ = ["Prediction", "predict"]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Per model stage, for one micro-batch: ``stage_times_s`` and ``stage_flops`` (forward and
    backward), ``stage_forward_flops``, ``stage_parameters``, ``boundary_bytes`` (what crosses each boundary, one way).

    ``imbalance``: the longest stage time over the mean.  ``memory`` (the peak of each stage, with its
    terms) and ``step_time_s`` come from the schedule and are empty where there is no simulation of it.
    """

    imbalance: float
    stage_times_s: tuple[float, ...]
    stage_flops: tuple[int, ...]
    stage_forward_flops: tuple[int, ...]
    stage_parameters: tuple[int, ...]
    boundary_bytes: tuple[int, ...]
    memory: tuple[MemoryTerms, ...] = ()
    step_time_s: float | None = None


def predict(
    profile: Profile,
    partition: Sequence[int],
    schedule: Schedule | None,
    *,
    overlap: bool,
    recomputes_ahead: bool = False,
) -> Prediction:
    """The figures of one partition; ``overlap``: can stages work at the same time?

    ``recomputes_ahead``: see ``memory.stage_memory``.  Where stages cannot overlap, the step is the sum of
    all stages' work, each boundary's transfers left out, since they are no copies within one process on one device.
    """
    bounds = list(pairwise([0, *accumulate(partition)]))
    stages = [profile.layers[start:end] for start, end in bounds]
    times = tuple(sum(layer.forward_s + layer.backward_s for layer in stage) for stage in stages)
    mean = sum(times) / len(times)
    memory: tuple[MemoryTerms, ...] = ()
    step: float | None = None
    if schedule is not None:
        problem = profile.problem(len(partition), schedule)
        entering = [int(problem.input_bytes), *(layer.output_bytes for layer in profile.layers)]
        memory = tuple(
            stage_memory(
                profile.layers[start:end],
                entering[start],
                schedule,
                stage,
                len(partition),
                ITEM_BYTES[profile.key.precision],
                recomputes_ahead=recomputes_ahead,
            )
            for stage, (start, end) in enumerate(bounds)
        )
        if overlap:
            step = problem.step_time_s(partition)
        else:
            recomputed = sum(schedule.recomputes(k) for k in range(schedule.micro_batches))
            forwards = schedule.micro_batches + recomputed
            step = sum(
                forwards * layer.forward_s + schedule.micro_batches * layer.backward_s + layer.update_s
                for layer in profile.layers
            )
    return Prediction(
        imbalance=max(times) / mean if mean else 1.0,
        stage_times_s=times,
        stage_flops=tuple(sum(layer.forward_flops + layer.backward_flops for layer in stage) for stage in stages),
        stage_forward_flops=tuple(sum(layer.forward_flops for layer in stage) for stage in stages),
        stage_parameters=tuple(sum(layer.parameters for layer in stage) for stage in stages),
        boundary_bytes=tuple(profile.layers[end - 1].output_bytes for _, end in bounds[:-1]),
        memory=memory,
        step_time_s=step,
    )
