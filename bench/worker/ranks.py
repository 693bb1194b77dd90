"""One rank's place in the cell: its devices, the process group, barrier and device sync."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench.jobs import Job

__all__ = ["Ranks", "join", "set_precision"]

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


def set_precision(precision: str) -> torch.dtype:
    """Allow or forbid TF32 for this process and return the dtype of the precision."""
    allow = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = allow
    torch.backends.cudnn.allow_tf32 = allow
    return DTYPES[precision]


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """``devices``: one a stage; ``local``: those this process drives; ``group``: the harness's own
    gloo group, apart from the library's communication (None for a single process); ``nodes``: as many
    ranks on each."""

    rank: int
    world_size: int
    devices: tuple[torch.device, ...]
    local: tuple[torch.device, ...]
    group: Any
    nodes: int = 1

    def barrier(self) -> None:
        """Wait for every rank; on the host, so that it puts no work on a device."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def sync(self) -> None:
        """Wait for all work on *every* device of this process."""
        for device in self.local:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    @property
    def node(self) -> int:
        """Which of the job's nodes this is."""
        return self.rank // (self.world_size // self.nodes)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on all ranks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def release_memory(self) -> None:
        """Give cached device memory back and forget the peaks so far."""
        for device in self.local:
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)


def _store(job: Job, rank: int, patience: datetime.timedelta) -> dist.Store:
    if not job.store:
        return dist.FileStore(job.rendezvous, job.world_size)
    host, _, port = job.store.rpartition(":")
    return dist.TCPStore(host, int(port), job.world_size, is_master=rank == 0, timeout=patience)


def join(job: Job, rank: int, *, grouped: bool) -> Ranks:
    """Pick the devices, set the current one and form the process group where the library runs one
    rank a stage (``grouped``; even for a single rank, since such a library asks for one)."""
    if job.factors.device == "cuda":
        devices = tuple(torch.device("cuda", index) for index in job.device_indices)
        torch.cuda.set_device(devices[rank])
    else:
        torch.set_num_threads(1)
        devices = (torch.device("cpu"),) * job.factors.stages
    group = None
    if grouped:
        backend = "cpu:gloo,cuda:nccl" if job.factors.device == "cuda" else "gloo"
        # Well above the slowest step: a peer's death is the parent's to notice, within seconds.
        patience = datetime.timedelta(seconds=max(1800.0, 4 * job.timeout_s))
        dist.init_process_group(
            backend,
            store=_store(job, rank, patience),
            rank=rank,
            world_size=job.world_size,
            timeout=patience,
        )
        group = dist.new_group(backend="gloo", timeout=patience)
    local = (devices[rank],) if grouped else tuple(dict.fromkeys(devices))
    return Ranks(rank=rank, world_size=job.world_size, devices=devices, local=local, group=group, nodes=job.nodes)
