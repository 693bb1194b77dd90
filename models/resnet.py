"""torchvision's ResNets, flat.

``granularity="block"``: each residual block is one layer.  ``"op"``: each convolution, norm and
activation is; the skip then travels beside the activations as a tuple ``(activations, skip)``.
No layer of the flat list works in place (inside a residual block it may), since a stage may start
with any of them.
"""

from __future__ import annotations

import torch
from torch import nn
from torchvision.models import resnet as source  # type: ignore[import-untyped]

__all__ = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]

Pair = tuple[torch.Tensor, torch.Tensor]


class Fork(nn.Module):
    """Starts a residual block: x → (op(x), x)."""

    def __init__(self, op: nn.Module) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: torch.Tensor) -> Pair:
        return self.op(x), x


class OnActivations(nn.Module):
    """(x, skip) → (op(x), skip)."""

    def __init__(self, op: nn.Module) -> None:
        super().__init__()
        self.op = op

    def forward(self, pair: Pair) -> Pair:
        return self.op(pair[0]), pair[1]


class OnSkip(nn.Module):
    """(x, skip) → (x, op(skip))."""

    def __init__(self, op: nn.Module) -> None:
        super().__init__()
        self.op = op

    def forward(self, pair: Pair) -> Pair:
        return pair[0], self.op(pair[1])


class Join(nn.Module):
    """Ends a residual block: (x, skip) → x + skip."""

    def forward(self, pair: Pair) -> torch.Tensor:
        return pair[0] + pair[1]


def _ops(block: nn.Module) -> list[nn.Module]:
    """A residual block's operations in the order in which torchvision's block runs them."""
    count = 3 if isinstance(block, source.Bottleneck) else 2
    layers: list[nn.Module] = []
    for i in range(1, count + 1):
        conv, norm = getattr(block, f"conv{i}"), getattr(block, f"bn{i}")
        layers += [Fork(conv) if i == 1 else OnActivations(conv), OnActivations(norm)]
        if i < count:
            layers.append(OnActivations(nn.ReLU()))
    if isinstance(block.downsample, nn.Module):
        layers += [OnSkip(op) for op in block.downsample.children()]
    return [*layers, Join(), nn.ReLU()]


def _flatten(net: source.ResNet, granularity: str) -> nn.Sequential:
    layers: list[nn.Module] = [net.conv1, net.bn1, nn.ReLU(), net.maxpool]
    for group in (net.layer1, net.layer2, net.layer3, net.layer4):
        for block in group:
            layers += [block] if granularity == "block" else _ops(block)
    return nn.Sequential(*layers, net.avgpool, nn.Flatten(1), net.fc)


def resnet18(granularity: str, num_classes: int) -> nn.Sequential:
    """ResNet-18; (N, 3, H, W) → (N, num_classes)."""
    return _flatten(source.resnet18(num_classes=num_classes), granularity)


def resnet34(granularity: str, num_classes: int) -> nn.Sequential:
    """ResNet-34; (N, 3, H, W) → (N, num_classes)."""
    return _flatten(source.resnet34(num_classes=num_classes), granularity)


def resnet50(granularity: str, num_classes: int) -> nn.Sequential:
    """ResNet-50; (N, 3, H, W) → (N, num_classes)."""
    return _flatten(source.resnet50(num_classes=num_classes), granularity)


def resnet101(granularity: str, num_classes: int) -> nn.Sequential:
    """ResNet-101; (N, 3, H, W) → (N, num_classes)."""
    return _flatten(source.resnet101(num_classes=num_classes), granularity)


def resnet152(granularity: str, num_classes: int) -> nn.Sequential:
    """ResNet-152; (N, 3, H, W) → (N, num_classes)."""
    return _flatten(source.resnet152(num_classes=num_classes), granularity)
