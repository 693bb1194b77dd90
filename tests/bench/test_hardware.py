"""Devices as torch counts them, and names that are the same on every like machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from bench import hardware
from bench.hardware import Gpu, chosen, cpu_name, device_locks, fingerprint, link, peak_flops, visible_gpus

UUIDS = ["GPU-1a2b-0", "GPU-1a2c-1", "GPU-9f00-2"]


def _gpu(index: int, name: str = "NVIDIA H200") -> Gpu:
    return Gpu(
        index=index, uuid=UUIDS[index], name=name, pci_address=f"0000:0{index}:00.0", memory_bytes=2**37, driver="1"
    )


def _torch_shows(visible: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What torch's own count, which is what the workers will see, makes of it on these GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    words = torch.cuda._parse_visible_devices()
    if words and isinstance(words[0], str):
        return list(torch.cuda._transform_uuid_to_ordinals(words, UUIDS))
    first_bad = next((i for i, n in enumerate(words) if n >= len(UUIDS)), len(words))
    return list(words[:first_bad])


indices = st.lists(st.sampled_from(["0", "1", "2", "3", "-1", " 1", ""]), max_size=4)
names = st.lists(st.sampled_from([*UUIDS, "GPU-1a2", "GPU-9", "GPU-x"]), max_size=4)


@given(st.one_of(indices, names))
@example(["2", "0"])
@example(["GPU-9", "GPU-1a2b"])
def test_cuda_visible_devices_means_what_it_means_to_torch(words: list[str]) -> None:
    visible = ",".join(words)
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert chosen(visible, UUIDS) == _torch_shows(visible, monkeypatch)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("0,-1,1", [0]),
        ("0,5,1", [0]),
        ("1,1", []),
        ("GPU-9f00,GPU-1a2b", [2, 0]),
        ("GPU-1a", []),
        ("MIG-1a2b", []),
    ],
)
def test_cuda_visible_devices(visible: str | None, expected: list[int]) -> None:
    assert chosen(visible, UUIDS) == expected


def test_the_fingerprint_is_the_hardware_and_not_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    two = fingerprint("cuda", [_gpu(0), _gpu(1)])
    assert two == fingerprint("cuda", [_gpu(2)]) == "cuda-nvidia-h200"
    assert fingerprint("cuda", [_gpu(0), _gpu(1, "NVIDIA A100-SXM4-40GB")]) == "cuda-nvidia-a100-sxm4-40gb+nvidia-h200"
    here = fingerprint("cpu", ())
    assert here.startswith("cpu-")
    assert f"-{os.cpu_count()}c-" in here
    assert here == fingerprint("cpu", [_gpu(0)])
    monkeypatch.setattr(os, "cpu_count", lambda: 999)
    assert fingerprint("cpu", ()) != here


def test_the_cpu_has_a_name() -> None:
    assert cpu_name().strip()
    assert "\n" not in cpu_name()


def test_locks_are_one_a_gpu_and_open_to_all_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "LOCK_FOLDER", tmp_path / "locks")
    shared = device_locks("cuda", [_gpu(1), _gpu(0), _gpu(1)])
    assert [Path(p).name for p in shared] == ["GPU-1a2b-0.lock", "GPU-1a2c-1.lock"]
    assert [Path(p).name for p in device_locks("cpu", ())] == ["cpu.lock"]
    assert stat.S_IMODE((tmp_path / "locks").stat().st_mode) == 0o1777


@pytest.mark.gpu
def test_gpus_are_those_of_torch() -> None:
    gpus = visible_gpus()
    assert len(gpus) == torch.cuda.device_count()
    for gpu in gpus:
        found = torch.cuda.get_device_properties(gpu.index)
        assert gpu.name == found.name
        assert str(found.uuid) in gpu.uuid
        assert link(gpu, gpu)


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "fp32", 67e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 PCIe", "fp32", 51e12),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
        ("NVIDIA H100 NVL", "fp32", None),
        ("NVIDIA GH200 480GB", "fp32", None),
        ("NVIDIA H200", "fp64", None),
        ("Tesla V100-SXM2-16GB", "bf16", None),
    ],
)
def test_a_peak_is_that_of_the_very_device_or_unknown(name: str, precision: str, peak: float | None) -> None:
    """A word of the name was looked for: an H100 PCIe had the peak of the SXM form, a third too high."""
    gpu = Gpu(index=0, uuid="GPU-1", name=name, pci_address="0", memory_bytes=1, driver="1")
    assert peak_flops(fingerprint("cuda", [gpu]), precision) == peak
    assert peak_flops(fingerprint("cuda", [gpu, gpu]), precision) == peak
    other = Gpu(index=1, uuid="GPU-2", name="Another", pci_address="1", memory_bytes=1, driver="1")
    assert peak_flops(fingerprint("cuda", [gpu, other]), precision) is None
