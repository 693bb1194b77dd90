"""Mini-batches: the same ones on every rank, whole and on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.factors import Factors

__all__ = ["loader", "synthetic"]


def synthetic(
    *, seed: int, batch_size: int, image_size: int, num_classes: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """One made-up mini-batch: x (batch_size, 3, H, W) standard normal, y (batch_size,) labels.

    Drawn in float32 from its own generator and then cast, so that precisions see the same numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch_size, 3, image_size, image_size, generator=generator)
    y = torch.randint(num_classes, (batch_size,), generator=generator)
    return x.to(dtype), y


def loader(factors: Factors, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]] | None:
    """An endless, seeded stream of real mini-batches, or None for synthetic data.

    The last partial batch of each pass is dropped. Raises ValueError where the labels do not fit
    into ``num_classes`` or the data set holds less than one mini-batch.
    """
    if factors.data.name == "synthetic":
        return None
    from torchvision import datasets, transforms  # type: ignore[import-untyped]

    size = factors.image_size
    resize = transforms.Compose([transforms.Resize(size), transforms.CenterCrop(size), transforms.ToTensor()])
    if factors.data.name == "imagefolder":
        dataset = datasets.ImageFolder(factors.data.path, transform=resize)
    else:
        dataset = datasets.CIFAR10(factors.data.path, train=True, transform=resize, download=False)
    if len(dataset.classes) > factors.num_classes:
        raise ValueError(
            f"num_classes={factors.num_classes}: the data set at {factors.data.path} has {len(dataset.classes)}"
        )
    if len(dataset) < factors.batch_size:
        raise ValueError(
            f"batch_size={factors.batch_size}: the data set at {factors.data.path} has {len(dataset)} samples"
        )
    batches = torch.utils.data.DataLoader(
        dataset,
        batch_size=factors.batch_size,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(factors.seed),
    )

    def endless() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            for x, y in batches:
                yield x.to(dtype), y

    return endless()
