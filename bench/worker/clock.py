"""Stamps on the device that computes, and their place on the host's clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CpuClock", "CudaClock", "clock_for", "stamp_cost_s"]


class Clock(Protocol):
    """``stamp`` is cheap and may be called on any thread; ``seconds`` places a stamp on the host's monotonic clock."""

    def stamp(self, device: torch.device) -> Any: ...

    def seconds(self, stamp: Any) -> float: ...


class CpuClock:
    """CLOCK_MONOTONIC, which has the same zero in every process of a host."""

    def stamp(self, device: torch.device) -> int:
        return time.monotonic_ns()

    def seconds(self, stamp: int) -> float:
        return stamp * 1e-9


class CudaClock:
    """CUDA events on the current stream, counted from one base event a device, taken when it was idle.

    Assumes that events of one device can be subtracted from each other, and that an idle device
    passes its base event when the host has just recorded it.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._bases: dict[int, tuple[Any, int]] = {}
        for device in devices:
            torch.cuda.synchronize(device)
            event = self._event(device)
            event.synchronize()
            assert device.index is not None
            self._bases[device.index] = (event, time.monotonic_ns())

    @staticmethod
    def _event(device: torch.device) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(device):
            event.record(torch.cuda.current_stream(device))
        return event

    def stamp(self, device: torch.device) -> tuple[int, Any]:
        assert device.index is not None
        return device.index, self._event(device)

    def seconds(self, stamp: tuple[int, Any]) -> float:
        index, event = stamp
        base, host_ns = self._bases[index]
        return host_ns * 1e-9 + float(base.elapsed_time(event)) * 1e-3


def clock_for(devices: Sequence[torch.device]) -> Clock:
    """The clock of this process's devices."""
    return CudaClock(devices) if devices[0].type == "cuda" else CpuClock()


def stamp_cost_s(clock: Clock, device: torch.device, count: int = 1000) -> float:
    """Host seconds that one stamp takes."""
    start = time.perf_counter_ns()
    for _ in range(count):
        clock.stamp(device)
    return (time.perf_counter_ns() - start) * 1e-9 / count
