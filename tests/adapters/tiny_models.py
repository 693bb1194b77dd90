"""Small flat models for the adapters: tuples at the boundaries, and stages that are awkward to run."""

from __future__ import annotations

from torch import nn

from models.resnet import Fork, Join, OnActivations, OnSkip


def residual(num_classes: int) -> nn.Sequential:
    """Twelve layers; between 2 and 7 a pair crosses every boundary."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        Fork(nn.Conv2d(4, 4, 3, padding=1)),
        OnActivations(nn.BatchNorm2d(4)),
        OnActivations(nn.ReLU()),
        OnActivations(nn.Conv2d(4, 4, 3, padding=1)),
        OnSkip(nn.Conv2d(4, 4, 1)),
        Join(),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )


def awkward(num_classes: int) -> nn.Sequential:
    """Cut 2-2-2-2: a stage starts with a ReLU, one has no parameters, one ends in a Flatten."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.Linear(8, num_classes),
    )
