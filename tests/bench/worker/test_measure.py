"""The clock and what guards it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.worker.channel import Channel
from bench.worker.measure import device_lock, enough_steps, foreign_load, run_steps, timed
from bench.worker.ranks import Ranks

CPU = torch.device("cpu")
ALONE = Ranks(rank=0, world_size=1, devices=(CPU,), local=(CPU,), group=None)
HOLD = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def channel() -> tuple[Channel, int]:
    reading, writing = os.pipe()
    return Channel(0, writing), reading


def test_a_step_is_timed_from_barrier_to_end() -> None:
    seconds, loss = timed(ALONE, lambda batch: time.sleep(0.05) or torch.tensor(batch), 3.0)
    assert 0.05 <= seconds < 0.08
    assert loss == 3.0


def test_every_local_device_is_synchronised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers were seen to synchronise the first device only, which hides the others' work."""
    order: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append(device.index))
    devices = (torch.device("cuda", 0), torch.device("cuda", 1))
    ranks = Ranks(rank=0, world_size=1, devices=devices, local=devices, group=None)
    timed(ranks, lambda batch: order.append("step"), None)
    assert order == [0, 1, "step", 0, 1]


class _Steps:
    """A pipeline whose n-th step takes as long as told."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds

    def step(self, batch: Any) -> None:
        time.sleep(self.seconds.pop(0))


def counted(seconds: list[float], *, warmup_steps: int, **asked: Any) -> list[bool]:
    found = run_steps(
        ALONE,
        channel()[0],
        _Steps(seconds),  # type: ignore[arg-type]
        lambda: None,
        warmup_steps=warmup_steps,
        enough=enough_steps(**asked),
    )
    assert [s.index for s in found] == list(range(len(found)))
    return [s.warmup for s in found]


def test_as_many_steps_as_asked() -> None:
    for warmup_steps in (0, 2):
        flags = counted([0.001] * 9, warmup_steps=warmup_steps, steps=3, target_ci=0.01, max_steps=200)
        assert flags == [True] * warmup_steps + [False] * 3


def test_auto_ends_when_the_median_is_known_and_not_by_chance_before() -> None:
    even = counted([0.02] * 50, warmup_steps=1, steps=0, target_ci=0.05, max_steps=40)
    assert even == [True] + [False] * 10
    uneven = [0.01 if i % 2 else 0.03 for i in range(50)]
    assert counted(uneven, warmup_steps=0, steps=0, target_ci=0.05, max_steps=15) == [False] * 15


def test_two_runs_never_measure_at_the_same_time_and_the_second_says_that_it_waits(tmp_path: Path) -> None:
    path = str(tmp_path / "cpu.lock")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path, "2.5"], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline().strip() == b"held"
    line, reading = channel()
    start = time.monotonic()
    with device_lock(ALONE, line, [path]):
        assert time.monotonic() - start > 1.5
    said = os.read(reading, 65536).decode()
    assert "waiting for the device" in said
    assert '"waiting": true' in said
    assert holder.wait() == 0


def test_a_killed_holder_frees_the_device(tmp_path: Path) -> None:
    path = str(tmp_path / "cpu.lock")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path, "60"], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    holder.kill()
    holder.wait()
    start = time.monotonic()
    with device_lock(ALONE, channel()[0], [path]):
        assert time.monotonic() - start < 2


def test_another_processs_load_is_seen_and_our_own_is_not() -> None:
    with foreign_load(ALONE) as load:
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            pass
        quiet = load()
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        with foreign_load(ALONE) as load:
            time.sleep(1.0)
            busy = load()
    finally:
        burner.kill()
        burner.wait()
    assert busy > quiet + 0.4
