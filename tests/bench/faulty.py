"""A three-layer model that does harm on purpose: ``fault`` is what, in which phase and in which rank, as
``kill-measure-1``; nothing happens where the working directory has no file ``armed``."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.worker.channel import Channel


def _fill() -> None:
    """Leave no byte free where the results are."""
    with open("results/filler", "wb", buffering=0) as out:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    out.write(b"0" * size)
            except OSError:
                continue


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(1 << 31)


def _raise() -> None:
    raise ValueError("the planted cause")


def _wait() -> None:
    Path("reached").touch()
    time.sleep(600)


HARM: dict[str, Any] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "allocator": lambda: torch.empty(1 << 50, dtype=torch.uint8),
    "limit": _limit,
    "hang": lambda: time.sleep(600),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _raise,
    "silent": lambda: os._exit(0),
    "code": lambda: os._exit(3),
    "fill": _fill,
    "wait": _wait,
}


class Layer(nn.Module):
    """Linear, and the harm in its forward once the phase has come."""

    def __init__(self, fault: Fault, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the linear layer, if it ends."""
        self.fault.strike()
        out: torch.Tensor = self.linear(x)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        made = Layer(self.fault, self.linear.in_features)
        made.linear.load_state_dict(self.linear.state_dict())
        return made


_entered = Channel.phase
_now = ["parity"]  # the first model is built for it, and this module imported for that


def _phase(channel: Channel, name: str) -> None:
    _now[0] = name
    _entered(channel, name)


Channel.phase = _phase  # type: ignore[method-assign]


class Fault:
    """What is to happen in this process, and when."""

    def __init__(self, text: str) -> None:
        self.kind, self.phase, rank = text.split("-")
        self.here = os.environ.get("RANK") == rank and Path("armed").exists()

    def strike(self) -> None:
        """Do it, once, if its time has come."""
        if self.here and _now[0] == self.phase:
            self.here = False
            HARM[self.kind]()


def build(num_classes: int, fault: str = "none-build-0") -> nn.Sequential:
    """Takes (N, 3, H, W)."""
    planned = Fault(fault)
    planned.strike()
    first = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), Layer(planned, 12))
    return nn.Sequential(first, Layer(planned, 12), nn.Sequential(Layer(planned, 12), nn.Linear(12, num_classes)))
