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
    """y = w · x, ``width`` times side by side, after a sleep; its backward sleeps twice as long."""

    def __init__(self, forward_s: float, width: int = 1, narrow: int = 1) -> None:
        super().__init__()
        self.forward_s, self.width, self.narrow = forward_s, width, narrow
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _Sleep.apply(x, self.forward_s, 2 * self.forward_s) * self.weight
        if self.narrow > 1:
            return x.view(len(x), self.narrow, -1).mean(1)
        return x.repeat(1, self.width) if self.width > 1 else x


def planted(num_classes: int, unit_s: float, wide: int) -> nn.Sequential:
    """Sleeps of 4, 4, 1, 1, 4, 4 units forward; what crosses between the middle two is ``wide`` times as wide.

    In two stages 3-3 is even by time and the only cut that crosses the wide boundary.
    """
    return nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes), Sleep(4 * unit_s)),
        Sleep(4 * unit_s),
        Sleep(unit_s, width=wide),
        Sleep(unit_s, narrow=wide),
        Sleep(4 * unit_s),
        Sleep(4 * unit_s),
    )
