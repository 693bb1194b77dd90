"""A small model with convolution, batch norm and dropout for tests: six flat layers."""

from __future__ import annotations

from torch import nn


def build(num_classes: int) -> nn.Sequential:
    """Takes (N, 3, H, W)."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(8, num_classes),
    )
