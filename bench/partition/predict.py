"""What a partition will cost: the step time and the memory of each stage, from what each layer costs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from bench.partition.simulate import Boundary, Costs, Pipeline, Schedule, StageCost, step_times

__all__ = ["LayerCost", "Link", "Problem"]

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What one layer costs, for one micro-batch unless said otherwise.

    ``forward_s``, ``backward_s``: seconds; recomputing it takes ``forward_s`` again.  ``update_s``:
    seconds of the optimizer for its parameters, once a step.  ``boundary_bytes``: its output, which
    crosses to the next stage if the layer ends one, and whose gradient, of the same size, comes
    back.  ``activation_bytes``: what autograd saves for its backward and for no earlier layer's;
    ``saved_input_bytes``: what it saves of its input besides, kept by the layer before too unless
    that is another stage's.  ``state_bytes``: its parameters, gradients and optimizer state, held
    throughout.
    """

    forward_s: float
    backward_s: float
    boundary_bytes: float = 0
    update_s: float = 0.0
    activation_bytes: float = 0
    saved_input_bytes: float = 0
    state_bytes: float = 0


@dataclass(frozen=True, kw_only=True)
class Link:
    """The way between two neighbouring stages: a transfer takes latency_s + bytes / bandwidth_bytes_per_s."""

    bandwidth_bytes_per_s: float = math.inf
    latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Layers to be cut into ``stages`` stages; predicts any partition of them.

    ``input_bytes``: the model's input, one micro-batch, which stage 0 keeps where it recomputes.
    """

    layers: tuple[LayerCost, ...]
    stages: int
    schedule: Schedule
    link: Link = Link()
    input_bytes: float = 0

    def __post_init__(self) -> None:
        if not 1 <= self.stages <= len(self.layers):
            raise ValueError(f"{len(self.layers)} layers cannot fill {self.stages} stages")
        values = [value for layer in self.layers for value in vars(layer).values()]
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError("costs must be finite and not negative")
        if not (self.link.bandwidth_bytes_per_s > 0 and 0 <= self.link.latency_s < math.inf):
            raise ValueError("a link needs a positive bandwidth and a finite latency")

    @functools.cached_property
    def sums(self) -> dict[str, Numbers]:
        """Of each cost, the sum over the first k layers, k = 0 … number of layers."""
        return {
            name: np.concatenate([[0.0], np.cumsum([getattr(layer, name) for layer in self.layers])])
            for name in ("forward_s", "backward_s", "update_s", "activation_bytes", "state_bytes")
        }

    @functools.cached_property
    def entering_bytes(self) -> Numbers:
        """What enters layer k (what leaves the last for k = number of layers), one micro-batch."""
        return np.array([self.input_bytes, *(layer.boundary_bytes for layer in self.layers)], dtype=np.float64)

    @functools.cached_property
    def saved_input_bytes(self) -> Numbers:
        """What layer k saves of its input where it is the first of its stage; 0 past the last."""
        return np.array([*(layer.saved_input_bytes for layer in self.layers), 0], dtype=np.float64)

    @functools.cached_property
    def transfer_s(self) -> Numbers:
        """Seconds one micro-batch takes to cross a boundary before layer k, one way."""
        return self.link.latency_s + self.entering_bytes / self.link.bandwidth_bytes_per_s

    def pipeline(self, partition: Sequence[int]) -> Pipeline:
        """What ``simulate`` takes, for a timeline of this partition."""
        costs = self._costs(self._ends(partition))
        stages = zip(costs.forward_s, costs.backward_s, costs.recompute_s, costs.update_s, strict=True)
        sends = zip(costs.send_forward_s, costs.send_backward_s, strict=True)
        return Pipeline(
            stages=tuple(
                StageCost(forward_s=float(f[0]), backward_s=float(b[0]), recompute_s=float(r[0]), update_s=float(u[0]))
                for f, b, r, u in stages
            ),
            boundaries=tuple(Boundary(forward_s=float(f[0]), backward_s=float(b[0])) for f, b in sends),
            schedule=self.schedule,
        )

    def step_time_s(self, partition: Sequence[int]) -> float:
        """The simulated step of this partition."""
        return float(self.step_times(self._ends(partition))[0])

    def memory_bytes(self, partition: Sequence[int]) -> tuple[float, ...]:
        """The most each stage holds at once under this partition; see ``memory``."""
        ends = self._ends(partition)
        return tuple(float(self.memory(stage, ends[:, stage], ends[:, stage + 1])[0]) for stage in range(self.stages))

    def step_times(self, ends: Integers) -> Numbers:
        """The simulated steps of many partitions: a row each, the p + 1 boundaries 0 … number of layers."""
        return step_times(self._costs(ends), self.schedule)

    def memory(self, stage: int, start: Integers, end: Integers) -> Numbers:
        """Bytes ``stage`` holds at its peak with layers ``start`` up to, not including, ``end``.

        State, and of each micro-batch in flight the activations; where a micro-batch is to be
        recomputed, its input instead, and beside them all the activations of the one that is being
        recomputed.  An estimate from above: a recomputed micro-batch counts its input twice where
        its first layer saves it too.
        """
        state = self.sums["state_bytes"][end] - self.sums["state_bytes"][start]
        saved = self.sums["activation_bytes"][end] - self.sums["activation_bytes"][start]
        kept = self.entering_bytes[start]
        schedule, flying = self.schedule, self.schedule.in_flight(stage, self.stages)
        if schedule.checkpoint == "never":
            return state + flying * (saved + self.saved_input_bytes[start])
        if schedule.checkpoint == "always":
            return state + flying * kept + saved
        if schedule.micro_batches == 1:
            return state + saved + self.saved_input_bytes[start]
        # The last micro-batch keeps its activations; is it still there when another is recomputed?
        if flying == 1:
            return state + kept + saved
        together = schedule.name == "1f1b" or not schedule.last_first
        return state + (flying - 1) * kept + (2 if together else 1) * saved

    def _ends(self, partition: Sequence[int]) -> Integers:
        if len(partition) != self.stages or min(partition) < 1 or sum(partition) != len(self.layers):
            raise ValueError(f"{list(partition)} does not cut {len(self.layers)} layers into {self.stages} stages")
        return np.array([[0, *accumulate(partition)]], dtype=np.int64)

    def _costs(self, ends: Integers) -> Costs:
        ends = ends.T
        per_stage = {name: np.diff(self.sums[name][ends], axis=0) for name in ("forward_s", "backward_s", "update_s")}
        crossing = self.transfer_s[ends[1:-1]]
        return Costs(recompute_s=per_stage["forward_s"], send_forward_s=crossing, send_backward_s=crossing, **per_stage)
