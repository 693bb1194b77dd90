"""A three-layer model that does harm on purpose: ``faults.json`` in the working directory says for a cell's seed
what, in which phase and in which rank, as ``kill-measure-1``.

The seed tells cells apart and, unlike an option of the model, costs no description of the model of its own.
"""

from __future__ import annotations

import json
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
    # Room for what tells of it, as there is where a machine's memory runs out at a large request.
    room = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (1 << 28)
    resource.setrlimit(resource.RLIMIT_AS, (room, resource.getrlimit(resource.RLIMIT_AS)[1]))
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


_faults: list[Fault] = []
_entered = Channel.phase
_now = ["parity"]  # the first model is built for it, and this module imported for that


def _phase(channel: Channel, name: str) -> None:
    _now[0] = name
    _entered(channel, name)
    if name == "build":  # in which no layer runs
        for fault in _faults:
            fault.strike()


Channel.phase = _phase  # type: ignore[method-assign]


class Fault:
    """What is to happen in this process, and when."""

    def __init__(self, text: str) -> None:
        self.kind, self.phase, rank = text.split("-")
        self.here = os.environ.get("RANK") == rank
        _faults.append(self)

    def strike(self) -> None:
        """Do it, once, if its time has come."""
        if self.here and _now[0] == self.phase:
            self.here = False
            HARM[self.kind]()


def build(num_classes: int) -> nn.Sequential:
    """Takes (N, 3, H, W)."""
    planned = Fault(json.loads(Path("faults.json").read_text()).get(str(torch.initial_seed()), "none-none-none"))
    planned.strike()
    first = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), Layer(planned, 12))
    return nn.Sequential(first, Layer(planned, 12), nn.Sequential(Layer(planned, 12), nn.Linear(12, num_classes)))
