"""What the GPUs' clocks did while a cell was measured, seen by NVML from the parent, which is idle then."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.hardware import Gpu
from bench.jobs import Message

__all__ = ["GpuSeen", "GpuWatch", "reasons"]

EVERY_S = 0.2

# Bits of nvmlDeviceGetCurrentClocksThrottleReasons (nvml.h); idle and what a user has set are no throttling.
_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


def reasons(bits: int) -> tuple[str, ...]:
    """The names of the throttle reasons in NVML's bit mask."""
    return tuple(name for bit, name in _REASONS.items() if bits & bit)


@dataclass(kw_only=True)
class GpuSeen:
    """SM clocks in MHz over all samples of one GPU, and every throttle reason that was ever up."""

    low_mhz: int
    high_mhz: int
    throttled: set[str] = field(default_factory=set)


class GpuWatch:
    """Samples clocks and throttle reasons in the measure phase; a context manager.  Without GPUs it does nothing.

    Assumes of NVML: a handle is found by the device's UUID, ``nvmlDeviceGetClockInfo(handle,
    NVML_CLOCK_SM)`` is the clock of now in MHz, the throttle reasons are a mask of bits.  A GPU that
    does not tell is left out.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._uuids = tuple(dict.fromkeys(g.uuid for g in gpus))
        self._seen: dict[str, GpuSeen] = {}
        self._measuring, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> GpuWatch:
        if self._uuids:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._measuring.set()
        if self._uuids:
            self._thread.join()

    def hear(self, message: Message) -> None:
        """Take the phase from rank 0's messages."""
        if message.rank == 0 and message.kind == "phase":
            (self._measuring.set if message.phase == "measure" else self._measuring.clear)()

    def seen(self) -> dict[str, GpuSeen]:
        """What was seen so far, by UUID."""
        return dict(self._seen)

    def _run(self) -> None:
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        try:
            while not self._ended.is_set():
                self._measuring.wait()
                for uuid in self._uuids:
                    if not self._ended.is_set():
                        self._look(pynvml, uuid)
                self._ended.wait(EVERY_S)
        finally:
            pynvml.nvmlShutdown()

    def _look(self, nvml: Any, uuid: str) -> None:
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            clock = int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
            bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        except nvml.NVMLError:
            return
        seen = self._seen.setdefault(uuid, GpuSeen(low_mhz=clock, high_mhz=clock))
        seen.low_mhz, seen.high_mhz = min(seen.low_mhz, clock), max(seen.high_mhz, clock)
        seen.throttled.update(reasons(bits))
