"""A user's own model for tests of arrays, whose first layer behaves as it is told."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn


class Behaving(nn.Module):
    """``ok`` passes its input on; ``fails`` raises, ``hangs`` sleeps, ``killed`` takes its whole task down,
    ``gated`` waits until a file ``open`` lies in the folder, having left one named ``waiting``."""

    def __init__(self, behaviour: str) -> None:
        super().__init__()
        self.behaviour = behaviour

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same."""
        if self.behaviour == "fails":
            raise ValueError("it fails as told")
        if self.behaviour == "hangs":
            time.sleep(3600)
        if self.behaviour == "killed":
            os.kill(os.getppid(), signal.SIGKILL)  # with preload=false the task itself
            time.sleep(60)
        if self.behaviour == "gated":
            Path("waiting").touch()
            while not Path("open").exists():
                time.sleep(0.05)
        return x


def build(num_classes: int, behaviour: str = "ok") -> nn.Sequential:
    """Takes (N, 3, 8, 8)."""
    return nn.Sequential(Behaving(behaviour), nn.Flatten(), nn.Linear(3 * 8 * 8, num_classes))
