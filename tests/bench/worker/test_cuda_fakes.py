"""The CUDA paths of clock and memory against made-up devices that state what is assumed of real ones."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from bench.worker import memory
from bench.worker.clock import CudaClock, clock_for
from bench.worker.ranks import Ranks

pytestmark = pytest.mark.alone

GPUS = (torch.device("cuda", 0), torch.device("cuda", 1))
BOTH = Ranks(rank=0, world_size=1, devices=GPUS, local=GPUS, group=None)


class Device:
    """Two GPUs whose work lasts as long as it is told to: a stream is the time at which it will be idle.

    Assumed of CUDA: an event is passed when all work that its stream was given before is done;
    ``elapsed_time`` is in milliseconds and only for two events of one device; ``synchronize`` waits.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.idle_at = {0: 0.0, 1: 0.0}
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device.index)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self, enable_timing))

    def work(self, index: int, seconds: float) -> None:
        self.idle_at[index] = max(self.idle_at[index], time.monotonic()) + seconds

    def wait(self, device: torch.device) -> None:
        assert device.index is not None
        time.sleep(max(0.0, self.idle_at[device.index] - time.monotonic()))


class Event:
    def __init__(self, device: Device, enable_timing: bool) -> None:
        assert enable_timing
        self.device, self.index, self.at = device, -1, -1.0

    def record(self, stream: int) -> None:
        self.index, self.at = stream, max(self.device.idle_at[stream], time.monotonic())

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at - time.monotonic()))

    def elapsed_time(self, other: Event) -> float:
        assert self.index == other.index, "events of two devices cannot be subtracted"
        return (other.at - self.at) * 1e3


def test_events_of_both_devices_stand_on_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    clock = clock_for(GPUS)
    assert isinstance(clock, CudaClock)
    begin = time.monotonic()
    first = clock.stamp(GPUS[0])
    device.work(0, 0.05)  # a kernel: the host goes on at once
    second = clock.stamp(GPUS[0])
    device.work(1, 0.02)
    third = clock.stamp(GPUS[1])
    assert time.monotonic() - begin < 0.015
    seconds = [clock.seconds(stamp) - begin for stamp in (first, second, third)]
    assert seconds == pytest.approx([0.0, 0.05, 0.02], abs=0.005)


def test_work_that_was_under_way_before_does_not_shift_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.work(0, 0.05)
    clock = clock_for(GPUS)
    now = time.monotonic()
    assert clock.seconds(clock.stamp(GPUS[0])) == pytest.approx(now, abs=0.005)


class Allocator:
    """Assumed of torch's caching allocator: peaks since they were last reset, per device; retries are a total."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak = {0: 10**9, 1: 10**9}  # of building and measuring, and no matter here
        self.retries = {0: 3, 1: 0}
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda device: self.peak.update({device.index: 0}))
        monkeypatch.setattr(cuda, "max_memory_allocated", lambda device: self.peak[device.index])
        monkeypatch.setattr(cuda, "max_memory_reserved", lambda device: self.peak[device.index] + 1000)
        monkeypatch.setattr(cuda, "memory_stats", lambda device: {"num_alloc_retries": self.retries[device.index]})


class TwoStages:
    """10 numbers on the first GPU, 20 on the second, momentum for each."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._stages = {0: nn.Linear(2, 4, bias=False), 1: nn.Linear(4, 5, bias=False)}
        weights = [p for m in self._stages.values() for p in m.parameters()]
        self._sgd = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
        for p in weights:
            p.grad = torch.zeros_like(p)
        self._sgd.step()

    def stages(self) -> dict[int, nn.Module]:
        return dict(self._stages)

    def optimizer(self) -> torch.optim.Optimizer:
        return self._sgd

    def step(self, batch: Any) -> None:
        self._allocator.peak = {0: 5000, 1: 7000}
        self._allocator.retries = {0: 4, 1: 0}


def test_the_allocators_peak_of_one_step_and_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline: Any = TwoStages(Allocator(monkeypatch))
    batch = (torch.zeros(6, 2), torch.zeros(6, dtype=torch.long))
    found = memory.peaks(BOTH, pipeline, batch, lambda k: k)
    first, second = found[0], found[1]
    assert (first.allocated, first.reserved, first.retries) == (5000, 6000, 1)
    assert (second.allocated, second.reserved, second.retries) == (7000, 8000, 0)
    assert (first.parameters, first.gradients, first.optimizer_state) == (32, 32, 32)
    assert (second.parameters, second.gradients, second.optimizer_state) == (80, 80, 80)
    assert (first.placed, second.placed) == (48, 48)  # 12 floats on the first, 6 whole numbers on the last
    assert first.activations == 5000 - 3 * 32 - 48
    assert second.activations == 7000 - 3 * 80 - 48
