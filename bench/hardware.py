"""The devices of this host, without torch."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Gpu", "cpu_name", "device_locks", "fingerprint", "link", "peak_flops", "visible_gpus"]

# FLOP/s of one GPU, dense, from NVIDIA's data sheets, by the devices' fingerprint.  A variant
# that is not named here is unknown: its form factors differ by a third.  No fp64, whose peak depends on
# whether tensor cores are used.
_PEAKS = {
    "cuda-nvidia-h200": {"fp32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12},
    "cuda-nvidia-h100-80gb-hbm3": {"fp32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12},
    "cuda-nvidia-h100-pcie": {"fp32": 51e12, "tf32": 378e12, "bf16": 756e12},
    "cuda-nvidia-a100-sxm4-40gb": {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12},
    "cuda-nvidia-a100-sxm4-80gb": {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12},
    "cuda-tesla-v100-sxm2-16gb": {"fp32": 15.7e12},
    "cuda-tesla-v100-sxm2-32gb": {"fp32": 15.7e12},
}

LOCK_FOLDER = Path("/tmp/pipeline-bench-device-locks")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A visible GPU; ``index`` is torch's, its place in CUDA_VISIBLE_DEVICES."""

    index: int
    uuid: str
    name: str
    pci_address: str
    memory_bytes: int
    driver: str


@functools.cache
def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES shows, by NVML; none where there is no driver.

    NVML counts in PCI order, so the workers run with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        uuids = [_text(pynvml.nvmlDeviceGetUUID(h)) for h in handles]
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        return tuple(
            Gpu(
                index=place,
                uuid=uuids[i],
                name=_text(pynvml.nvmlDeviceGetName(handles[i])),
                pci_address=_text(pynvml.nvmlDeviceGetPciInfo(handles[i]).busId),
                memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handles[i]).total),
                driver=driver,
            )
            for place, i in enumerate(chosen(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids))
        )
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def chosen(visible: str | None, uuids: Sequence[str]) -> list[int]:
    """The NVML indices that a CUDA_VISIBLE_DEVICES shows, in its order.

    As CUDA does: entries are indices or beginnings of UUIDs, the first bad one ends the list, and a
    GPU named twice leaves none.
    """
    if visible is None:
        return list(range(len(uuids)))
    words = [word.strip() for word in visible.split(",")]
    named = list(itertools.takewhile(re.compile(r"\d+$|GPU-").match, words))
    if len(set(named)) < len(named):
        return []
    found: list[int] = []
    for word in named:
        if word.isdigit():
            matches = [int(word)] if int(word) < len(uuids) else []
        else:
            matches = [i for i, uuid in enumerate(uuids) if uuid.startswith(word)]
        if len(matches) != 1:
            break
        if matches[0] in found:
            return []
        found += matches
    return found


def peak_flops(hardware: str, precision: str) -> float | None:
    """The peak FLOP/s of one GPU of this fingerprint; None where it is not known, never a guess."""
    return _PEAKS.get(hardware, {}).get(precision)


def link(first: Gpu, second: Gpu) -> str:
    """How two GPUs are connected: NVLink, or the nearest common ancestor on the PCI tree."""
    import pynvml

    try:
        pynvml.nvmlInit()
        a, b = (pynvml.nvmlDeviceGetHandleByUUID(g.uuid) for g in (first, second))
        status = pynvml.nvmlDeviceGetP2PStatus(a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if status == pynvml.NVML_P2P_STATUS_OK:
            return "nvlink"
        level = pynvml.nvmlDeviceGetTopologyCommonAncestor(a, b)
    except pynvml.NVMLError as error:
        return f"unknown ({error})"
    names = {0: "internal", 10: "pci-switch", 20: "pci-switches", 30: "host-bridge", 40: "node", 50: "system"}
    return names.get(level, f"level {level}")


@functools.cache
def cpu_name() -> str:
    """The CPU's model name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def fingerprint(device: str, gpus: Sequence[Gpu]) -> str:
    """What a result is a result of: the CPU's name and cores, or the GPUs' name.

    The host's name is not part of it: two nodes with the same hardware are the same.
    """
    if device == "cuda":
        return "cuda-" + "+".join(sorted({_slug(g.name) for g in gpus}))
    cores = os.cpu_count() or 1
    digest = hashlib.sha256(f"{cpu_name()}/{cores}".encode()).hexdigest()[:6]
    return f"cpu-{_slug(cpu_name())[:24].strip('-')}-{cores}c-{digest}"


def device_locks(device: str, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Host-wide lock files to hold while measuring: one a GPU, or one for all cores."""
    LOCK_FOLDER.mkdir(exist_ok=True)
    try:
        LOCK_FOLDER.chmod(0o1777)
    except PermissionError:
        pass  # another user's folder, which has that mode already
    names = sorted({g.uuid for g in gpus}) if device == "cuda" else ["cpu"]
    return tuple(str(LOCK_FOLDER / f"{name}.lock") for name in names)
