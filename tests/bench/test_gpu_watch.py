"""Clocks and throttle reasons, against a made-up NVML that answers as its header says."""

from __future__ import annotations

import sys
import time
import types

import pytest

from bench.gpu_watch import GpuWatch, reasons
from bench.hardware import Gpu
from bench.jobs import Message


def gpu(uuid: str) -> Gpu:
    return Gpu(index=0, uuid=uuid, name="made up", pci_address="0", memory_bytes=1, driver="1")


class Nvml(types.ModuleType):
    """GPU-a slows down more and more and is hot; GPU-b tells nothing (as some boards do)."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.clock, self.looks, self.shut = 2000, 0, False

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None:
        self.shut = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid == "GPU-b":
            raise self.NVMLError("not supported")
        return uuid

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert (handle, kind) == ("GPU-a", self.NVML_CLOCK_SM)
        self.looks += 1
        self.clock -= 100
        return self.clock

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x01 | 0x40  # idle between kernels, and too hot


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    made = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr("bench.gpu_watch.EVERY_S", 0.01)
    return made


def phase(name: str, rank: int = 0) -> Message:
    return Message(kind="phase", rank=rank, phase=name)


def wait_for(nvml: Nvml, looks: int) -> None:
    end = time.monotonic() + 10
    while nvml.looks < looks:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_it_looks_while_measuring_and_at_no_other_time(nvml: Nvml) -> None:
    with GpuWatch([gpu("GPU-a"), gpu("GPU-b"), gpu("GPU-a")]) as watch:
        watch.hear(phase("warmup"))
        time.sleep(0.1)
        assert nvml.looks == 0
        watch.hear(phase("measure"))
        wait_for(nvml, 5)
        watch.hear(phase("memory", rank=1))  # another rank's word does not count
        wait_for(nvml, nvml.looks + 3)
        watch.hear(phase("memory"))
        time.sleep(0.1)
        looks = nvml.looks
        time.sleep(0.1)
        assert nvml.looks == looks
    assert nvml.shut
    seen = watch.seen()
    assert set(seen) == {"GPU-a"}
    assert (seen["GPU-a"].high_mhz, seen["GPU-a"].low_mhz) == (1900, 2000 - 100 * looks)
    assert seen["GPU-a"].throttled == {"hw_thermal_slowdown"}


def test_it_ends_with_a_cell_that_never_measured(nvml: Nvml) -> None:
    with GpuWatch([gpu("GPU-a")]) as watch:
        pass
    assert watch.seen() == {}


def test_without_gpus_there_is_no_thread() -> None:
    with GpuWatch([]) as watch:
        watch.hear(phase("measure"))
    assert watch.seen() == {}


def test_idle_and_a_users_own_clocks_are_no_throttling() -> None:
    assert reasons(0x01 | 0x02) == ()
    assert reasons(0x04 | 0x20) == ("sw_power_cap", "sw_thermal_slowdown")
