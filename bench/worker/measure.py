"""The clock: warm-up and measured steps under the host-wide device lock."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import torch
from filelock import FileLock, Timeout

from adapters.protocol import Pipeline
from bench.jobs import StepResult
from bench.series import median_interval
from bench.worker.channel import Channel
from bench.worker.ranks import Ranks

__all__ = ["device_lock", "enough_steps", "foreign_load", "run_steps", "timed"]

LOCK_POLL_S = 1.0
# Fewer steps than these can agree by chance.
LEAST_STEPS = 10


@contextmanager
def device_lock(ranks: Ranks, channel: Channel, paths: Sequence[str]) -> Iterator[None]:
    """Hold the devices' locks, so that no two cells of a host ever time each other.

    The first rank of each host holds them (the kernel frees them if it dies); the others wait for it.
    Hosts come one after the other, by name: two cells on the same hosts never hold one each.
    """
    hosts = ranks.gather(socket.gethostname())
    with ExitStack() as stack:
        for host in sorted(set(hosts)):
            if ranks.rank == hosts.index(host):
                _acquire(stack, channel, paths)
            ranks.barrier()
        yield
        ranks.barrier()


def _acquire(stack: ExitStack, channel: Channel, paths: Sequence[str]) -> None:
    for path in sorted(paths):
        lock = FileLock(path, mode=0o666)
        while True:
            try:
                lock.acquire(timeout=LOCK_POLL_S)
                break
            except Timeout:
                channel.alive("waiting for the device: another run is measuring", waiting=True)
        stack.callback(lock.release)


def timed(ranks: Ranks, step: Callable[[Any], torch.Tensor | None], batch: Any) -> tuple[float, Any]:
    """(seconds, loss) of one step: barrier, sync every device, clock, step, sync every device, clock."""
    ranks.barrier()
    ranks.sync()
    start = time.monotonic_ns()
    loss = step(batch)
    ranks.sync()
    return (time.monotonic_ns() - start) * 1e-9, loss


def run_steps(
    ranks: Ranks,
    channel: Channel,
    pipeline: Pipeline,
    next_batch: Callable[[], Any],
    *,
    warmup_steps: int,
    enough: Callable[[Sequence[float]], bool],
) -> tuple[StepResult, ...]:
    """All steps, warm-ups kept and marked.  ``next_batch`` gives placed mini-batches, off the clock.

    Goes on until ``enough`` says so of the measured steps' times, each the slowest rank's; rank 0
    asks it between steps, and all do as it says.
    """
    results: list[StepResult] = []
    measured: list[float] = []
    channel.phase("warmup")
    if not warmup_steps:
        channel.phase("measure")
    while len(results) < warmup_steps or not ranks.gather(enough(measured))[0]:
        index = len(results)
        seconds, loss = timed(ranks, pipeline.step, next_batch())
        channel.stepping_s += seconds
        results.append(
            StepResult(
                index=index,
                warmup=index < warmup_steps,
                time_s=seconds,
                loss=None if loss is None else float(loss),
            )
        )
        if index >= warmup_steps:
            measured.append(max(ranks.gather(seconds)))
        channel.step(index)
        if index == warmup_steps - 1:
            channel.phase("measure")
    return tuple(results)


def enough_steps(steps: int, target_ci: float, max_steps: int) -> Callable[[Sequence[float]], bool]:
    """Whether so many steps are measured or, with 0 of them asked for, whether the median is known well enough."""

    def known(times: Sequence[float]) -> bool:
        if len(times) < LEAST_STEPS:
            return False
        low, high = median_interval(times)
        return (high - low) / 2 <= target_ci * statistics.median(times)

    return (lambda times: len(times) >= steps) if steps else (lambda times: len(times) >= max_steps or known(times))


@contextmanager
def foreign_load(ranks: Ranks) -> Iterator[Callable[[], float]]:
    """Yields a function for the mean number of cores of this node that other processes kept busy meanwhile."""

    def busy() -> tuple[float, float, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # guest time is already in user time, steal is another machine's
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        steal = getattr(times, "steal", 0.0)
        spent = ranks.gather((ranks.node, sum(psutil.Process().cpu_times()[:2])))
        own = sum(seconds for node, seconds in spent if node == ranks.node)
        return total - idle - steal, own, time.monotonic()

    before = busy()

    def load() -> float:
        after = busy()
        used = (after[0] - before[0]) - (after[1] - before[1])
        return max(0.0, used / max(after[2] - before[2], 1e-9))

    yield load
