"""Measure what each layer of a model costs: times, FLOPs and bytes, and what a transfer costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from bench.jobs import Job, RankResult
from bench.worker.build import Work, make_model, make_optimizer
from bench.worker.channel import Channel
from bench.worker.data import synthetic
from bench.worker.measure import device_lock
from bench.worker.ranks import Ranks, join, set_precision

__all__ = ["LayerRun", "count_layers", "measure_layers", "repeat_layers", "run_rank"]

WARMUP, LEAST, MOST = 2, 5, 30
# Repetitions go on for so long, and from the least number on end where they take too long.
ENOUGH_S, TOO_LONG_S = 3.0, 60.0
PING_BYTES = (4, 2**23)
PINGS = 20


def run_rank(job: Job, rank: int, channel: Channel) -> RankResult:
    """``read_back`` of every rank: ``layers`` (what ``measure_layers`` gives), ``link_latency_s``,
    ``link_bytes_per_s``, ``repetitions``."""
    channel.phase("plan")
    factors = job.factors
    dtype = set_precision(factors.precision)
    ranks = join(job, rank, grouped=job.world_size > 1)
    work = Work(dtype=dtype, batch_size=factors.batch_size, optimizer=factors.optimizer, dropout=True)
    device = ranks.devices[rank]
    model = make_model(factors, work).to(device)
    x, _ = synthetic(
        seed=factors.seed,
        batch_size=factors.batch_size // factors.micro_batches,
        image_size=factors.image_size,
        num_classes=factors.num_classes,
        dtype=dtype,
    )
    runs = [LayerRun(layer, make_optimizer(factors.optimizer)) for layer in model]
    count_layers(runs, x.to(device))
    # As in a step on the other stages' devices, whose cores share caches and memory, all ranks run at once.
    with device_lock(ranks, channel, job.lock_paths):
        repetitions = measure_layers(ranks, channel, runs, x.to(device))
        latency, bandwidth = _link(ranks, device)
    same = ranks.gather([run.medians() for run in runs])
    layers = [
        {**run.counts, **{key: statistics.fmean(m[i][key] for m in same) for key in same[0][i]}}
        for i, run in enumerate(runs)
    ]
    found = {
        "layers": layers,
        "link_latency_s": latency,
        "link_bytes_per_s": bandwidth,
        "repetitions": repetitions,
    }
    ranks.barrier()
    if ranks.group is not None:
        dist.destroy_process_group()
    return RankResult(rank=rank, phases={}, steps=(), stages=(), read_back=found)


def _detached(value: Any) -> Any:
    """The same tensors as leaves of a graph of their own."""
    return tree_map(lambda t: t.detach().requires_grad_(t.is_floating_point()), value)


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(value))


class LayerRun:
    """One layer and what was found out about it; run forward and backward apart from its neighbours."""

    def __init__(self, layer: nn.Module, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.layer = layer
        self.parameters = list(layer.parameters())
        self.optimizer = make(self.parameters) if self.parameters else None
        self.counts: dict[str, int] = {}
        self.times: dict[str, list[float]] = {"forward_s": [], "backward_s": [], "update_s": []}
        self._input: Any = None
        self._output: Any = None

    def forward(self, value: Any) -> Any:
        """The layer's output, detached: what enters the next layer."""
        self._input = value
        self._output = self.layer(value)
        return _detached(self._output)

    def backward(self, gradients: Any) -> Any:
        """The gradients of its input; those of its parameters are added to what is there."""
        pairs = zip(tree_leaves(self._output), tree_leaves(gradients), strict=True)
        wanted = [(output, gradient) for output, gradient in pairs if output.requires_grad]
        torch.autograd.backward([o for o, _ in wanted], [g for _, g in wanted])
        entering = tree_map(lambda t: t.grad, self._input)
        self._input = self._output = None
        return entering

    def update(self) -> None:
        """The optimizer's step for this layer."""
        if self.optimizer is not None:
            self.optimizer.step()

    def clear(self) -> None:
        """Drop the gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def medians(self) -> dict[str, float]:
        """Seconds of each kind."""
        return {key: statistics.median(values) for key, values in self.times.items()}


def _ones(value: Any) -> Any:
    return tree_map(torch.ones_like, value)


def count_layers(runs: list[LayerRun], x: torch.Tensor) -> None:
    """FLOPs, saved bytes, output and state bytes of each layer, from one pass and one optimizer step."""
    known = {t.untyped_storage()._cdata for run in runs for t in [*run.parameters, *run.layer.buffers()]}
    known.add(x.untyped_storage()._cdata)
    value: Any = x
    alive: list[Any] = []  # a storage that is freed would lend its identity to another
    for run in runs:
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage.nbytes()
            alive.append(tensor.detach())
            return tensor.detach()

        entering = {t.untyped_storage()._cdata for t in tree_leaves(value)}
        with (
            FlopCounterMode(display=False) as flops,
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            value = run.forward(value)
        run.counts = {
            "forward_flops": flops.get_total_flops(),
            "saved_bytes": sum(size for key, size in saved.items() if key not in known),
            "saved_input_bytes": sum(size for key, size in saved.items() if key in known and key in entering),
            "output_bytes": _bytes(value),
        }
        known |= saved.keys()
        alive.append(value)
    gradients = _ones(value)
    for run in reversed(runs):
        with FlopCounterMode(display=False) as flops:
            gradients = run.backward(gradients)
        run.counts["backward_flops"] = flops.get_total_flops()
    for run in runs:
        run.update()
        state = run.optimizer.state if run.optimizer is not None else {}
        held = [t for p in run.parameters for t in (p, p.grad, *state[p].values()) if isinstance(t, torch.Tensor)]
        run.counts["state_bytes"] = _bytes(held)
        run.counts["largest_parameter_bytes"] = max((_bytes(p) for p in run.parameters), default=0)
        run.clear()


def measure_layers(ranks: Ranks, channel: Channel, runs: list[LayerRun], x: torch.Tensor) -> int:
    """Time every layer again and again, on all ranks at once; how often."""
    start = time.monotonic()
    repetition = 0
    while True:
        ranks.barrier()
        repeat_layers(runs, x, timed=repetition >= WARMUP)
        repetition += 1
        spent, done = time.monotonic() - start, repetition - WARMUP
        channel.alive(f"profiling the layers, repetition {done} after {spent:.0f} s")
        enough = (done >= LEAST and spent > ENOUGH_S) or done >= MOST or (done >= 3 and spent > TOO_LONG_S)
        if ranks.gather(enough)[0]:
            return done


def repeat_layers(runs: list[LayerRun], x: torch.Tensor, *, timed: bool) -> None:
    """Two micro-batches, of which the second is timed, since all but the first of a step add to
    gradients that are there, and an optimizer step."""
    _micro_batch(runs, x, timed=False)
    _micro_batch(runs, x, timed=timed)
    for run in runs:
        with _clock(run, "update_s", x.device, timed):
            run.update()
    _settle(runs)
    for run in runs:
        run.clear()


def _micro_batch(runs: list[LayerRun], x: torch.Tensor, *, timed: bool) -> None:
    value: Any = x
    for run in runs:
        with _clock(run, "forward_s", x.device, timed):
            value = run.forward(value)
    gradients = _ones(value)
    for run in reversed(runs):
        with _clock(run, "backward_s", x.device, timed):
            gradients = run.backward(gradients)


@contextmanager
def _clock(run: LayerRun, key: str, device: torch.device, timed: bool) -> Iterator[None]:
    """Times what is inside; on CUDA by events, so that no synchronisation stands between two layers."""
    if not timed:
        yield
    elif device.type == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        run.times[key].append((first, last))  # type: ignore[arg-type]  # seconds once ``_settle`` ran
    else:
        start = time.perf_counter_ns()
        yield
        run.times[key].append((time.perf_counter_ns() - start) * 1e-9)


def _settle(runs: list[LayerRun]) -> None:
    """Turn pairs of events into seconds."""
    for run in runs:
        for values in run.times.values():
            if values and isinstance(values[-1], tuple):
                first, last = values[-1]
                last.synchronize()
                values[-1] = first.elapsed_time(last) * 1e-3


def _link(ranks: Ranks, device: torch.device) -> tuple[float, float]:
    """(latency in s, bytes/s) of a transfer between ranks 0 and 1, from ping-pong of two sizes."""
    if ranks.world_size < 2:
        return 0.0, float("inf")
    medians = []
    for size in PING_BYTES:
        tensor = torch.zeros(size, dtype=torch.uint8, device=device)
        times = []
        for _ in range(PINGS):
            ranks.barrier()
            start = time.perf_counter_ns()
            if ranks.rank == 0:
                dist.send(tensor, 1)
                dist.recv(tensor, 1)
            else:
                dist.recv(tensor, 0)
                dist.send(tensor, 0)
            ranks.sync()
            times.append((time.perf_counter_ns() - start) * 1e-9 / 2)
        medians.append(statistics.median(times))
    short, long = medians
    return short, (PING_BYTES[1] - PING_BYTES[0]) / max(long - short, 1e-9)
