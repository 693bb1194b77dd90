"""torchvision's VGGs, flat, with a classifier of any width.

``granularity="block"``: a convolution with its norm and activation is one layer, and so is a linear
layer with its activation.  ``"op"``: each operation is.  No layer of the flat list works in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torchvision.models import vgg as source  # type: ignore[import-untyped]

__all__ = [
    "vgg11",
    "vgg11_bn",
    "vgg13",
    "vgg13_bn",
    "vgg16",
    "vgg16_bn",
    "vgg19",
    "vgg19_bn",
]


def _narrow(net: source.VGG, num_classes: int, hidden: int) -> nn.Sequential:
    """torchvision's classifier with ``hidden`` instead of 4096 features, initialised its way."""
    classifier = nn.Sequential(
        nn.Linear(512 * 7 * 7, hidden),
        nn.ReLU(),
        nn.Dropout(net.classifier[2].p),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Dropout(net.classifier[5].p),
        nn.Linear(hidden, num_classes),
    )
    for layer in classifier:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0, 0.01)
            nn.init.constant_(layer.bias, 0)
    return classifier


def _grouped(ops: list[nn.Module]) -> list[nn.Module]:
    """Group each parametric operation with the norm and activation that follow it."""
    groups: list[list[nn.Module]] = []
    for op in ops:
        follows = isinstance(op, nn.BatchNorm2d | nn.ReLU)
        if follows and groups and isinstance(groups[-1][0], nn.Conv2d | nn.Linear):
            groups[-1].append(op)
        else:
            groups.append([op])
    return [group[0] if len(group) == 1 else nn.Sequential(*group) for group in groups]


def _build(make: Callable[..., source.VGG], granularity: str, num_classes: int, hidden: int) -> nn.Sequential:
    # torchvision's own classifier would cost 120 M parameters that ``hidden`` throws away; on the
    # meta device it costs nothing, and its features are then initialised by torchvision's own rule.
    with torch.device("meta"):
        net = make(num_classes=num_classes)
    classifier = _narrow(net, num_classes, hidden)
    features = net.features.to_empty(device="cpu")
    for op in features:
        if isinstance(op, nn.Conv2d):
            nn.init.kaiming_normal_(op.weight, mode="fan_out", nonlinearity="relu")
            if op.bias is not None:
                nn.init.constant_(op.bias, 0)
        elif isinstance(op, nn.BatchNorm2d):
            op.reset_running_stats()
            nn.init.constant_(op.weight, 1)
            nn.init.constant_(op.bias, 0)
    ops: list[nn.Module] = [nn.ReLU() if isinstance(op, nn.ReLU) else op for op in features]
    ops += [net.avgpool, nn.Flatten(1), *classifier]
    return nn.Sequential(*(ops if granularity == "op" else _grouped(ops)))


def vgg11(granularity: str, num_classes: int, hidden: int = 4096) -> nn.Sequential:
    """VGG-11; (N, 3, H, W) → (N, num_classes)."""
    return _build(source.vgg11, granularity, num_classes, hidden)


def vgg11_bn(granularity: str, num_classes: int, hidden: int = 4096) -> nn.Sequential:
    """VGG-11 with batch norm; (N, 3, H, W) → (N, num_classes)."""
    return _build(source.vgg11_bn, granularity, num_classes, hidden)


def vgg13(granularity: str, num_classes: int, hidden: int = 4096) -> nn.Sequential:
    """VGG-13; (N, 3, H, W) → (N, num_classes)."""
    return _build(source.vgg13, granularity, num_classes, hidden)


def vgg13_bn(granularity: str, num_classes: int, hidden: int = 4096) -> nn.Sequential:
    """VGG-13 with batch norm; (N, 3, H, W) → (N, num_classes)."""
    return _build(source.vgg13_bn, granularity, num_classes, hidden)


def vgg16(granularity: str, num_classes: int, hidden: int = 4096) -> nn.Sequential:
    """VGG-16; (N, 3, H, W) → (N, num_classes)."""
    return _build(source.vgg16, granularity, num_classes, hidden)


def vgg16_bn(granularity: str, num_classes: int, hidden: int = 4096) -> nn.Sequential:
    """VGG-16 with batch norm; (N, 3, H, W) → (N, num_classes)."""
    return _build(source.vgg16_bn, granularity, num_classes, hidden)


def vgg19(granularity: str, num_classes: int, hidden: int = 4096) -> nn.Sequential:
    """VGG-19; (N, 3, H, W) → (N, num_classes)."""
    return _build(source.vgg19, granularity, num_classes, hidden)


def vgg19_bn(granularity: str, num_classes: int, hidden: int = 4096) -> nn.Sequential:
    """VGG-19 with batch norm; (N, 3, H, W) → (N, num_classes)."""
    return _build(source.vgg19_bn, granularity, num_classes, hidden)
