"""A model whose layers sleep for as long as they are told, so that its best partition is known by hand."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Sleep(nn.Module):
    """y = w · x after a sleep; its backward sleeps twice as long."""

    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.forward_s = forward_s
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Sleep.apply(x, self.forward_s, 2 * self.forward_s)  # type: ignore[no-untyped-call]
        return y * self.weight


class Widen(nn.Module):
    """x, ``times`` times side by side."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, self.times)


class Narrow(nn.Module):
    """The mean of what ``Widen`` put side by side."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), self.times, -1).mean(1)


def planted(num_classes: int, sleep_s: float, times: int) -> nn.Sequential:
    """Two sleeping layers, one that widens, one that narrows, two sleeping layers.

    In two stages 3-3 is even by time, and the only cut that something wide crosses.
    """
    return nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes), Sleep(sleep_s)),
        Sleep(sleep_s),
        Widen(times),
        Narrow(times),
        Sleep(sleep_s),
        Sleep(sleep_s),
    )


def even(num_classes: int, layers: int, sleep_s: float, slow: int = -1) -> nn.Sequential:
    """``layers`` layers that sleep ``sleep_s`` forward and twice that backward; ``slow`` takes twice as long."""
    times = [sleep_s * (2 if i == slow else 1) for i in range(layers)]
    first = nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes), Sleep(times[0]))
    return nn.Sequential(first, *(Sleep(t) for t in times[1:]))
