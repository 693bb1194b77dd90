"""Mini-batches: seeded, the same on every rank, real ones from a folder on disk."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bench.factors import Data, Factors, Library, Model
from bench.worker.data import loader, synthetic

FACTORS = Factors(
    library=Library(name="x", adapter="x"),
    model=Model(name="x", target="x"),
    image_size=16,
    num_classes=10,
    batch_size=4,
)


@pytest.fixture
def image_folder(tmp_path: Path) -> Factors:
    generator = np.random.default_rng(0)
    for label in ("cat", "dog", "fox"):
        (tmp_path / label).mkdir()
        for i in range(3):
            pixels = generator.integers(0, 255, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / label / f"{i}.png")
    return FACTORS.replace(data=Data(name="imagefolder", path=str(tmp_path)))


def test_synthetic_data_are_the_same_numbers_in_every_dtype() -> None:
    kinds = {"seed": 3, "batch_size": 4, "image_size": 8, "num_classes": 5}
    x, y = synthetic(**kinds, dtype=torch.float32)
    x64, y64 = synthetic(**kinds, dtype=torch.float64)
    assert torch.equal(x.double(), x64)
    assert torch.equal(y, y64)
    assert x.shape == (4, 3, 8, 8)
    assert int(y.max()) < 5
    assert not torch.equal(x, synthetic(**{**kinds, "seed": 4}, dtype=torch.float32)[0])


def test_synthetic_has_no_stream() -> None:
    assert loader(FACTORS, torch.float32) is None


def test_an_image_folder_gives_whole_seeded_mini_batches_for_ever(image_folder: Factors) -> None:
    first, second = loader(image_folder, torch.float32), loader(image_folder, torch.float32)
    assert first is not None
    assert second is not None
    # Nine images make two batches of four; the ninth is dropped, and then it goes on.
    for (x, y), (x2, y2) in itertools.islice(zip(first, second, strict=False), 5):
        assert x.shape == (4, 3, 16, 16)
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)
        assert 0 <= float(x.min()) <= float(x.max()) <= 1


@pytest.mark.parametrize(
    ("changes", "part"), [({"num_classes": 2}, "num_classes=2"), ({"batch_size": 10}, "batch_size=10")]
)
def test_a_data_set_that_does_not_fit(image_folder: Factors, changes: dict[str, object], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        loader(image_folder.replace(**changes), torch.float32)


def test_cifar10_from_a_path_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (4, 3072), dtype=np.uint8)
    for i in range(1, 6):
        (folder / f"data_batch_{i}").write_bytes(pickle.dumps({"data": pixels, "labels": [0, 1, 2, 3]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))
    from torchvision.datasets import CIFAR10

    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)  # made-up files have other checksums
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    stream = loader(FACTORS.replace(data=Data(name="cifar10", path=str(tmp_path))), torch.float32)
    assert stream is not None
    x, y = next(stream)
    assert x.shape == (4, 3, 16, 16)
    assert set(y.tolist()) <= {0, 1, 2, 3}
