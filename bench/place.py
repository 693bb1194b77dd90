"""Which of several nodes this process is on, as SLURM or torchrun says; without torch."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from bench.errors import UserError

__all__ = ["Place", "place", "read_place"]

PORT_VARIABLE = "PIPELINE_BENCH_PORT"
TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Node ``index`` of ``count``; node 0 listens at ``address`` and ``port``."""

    index: int = 0
    count: int = 1
    address: str = "127.0.0.1"
    port: int = 0


@functools.cache
def place() -> Place:
    """This process's; see ``read_place``."""
    return read_place(os.environ)


def read_place(environment: Mapping[str, str]) -> Place:
    """From torchrun's variables, else from those of a SLURM step; the only node where neither names several.

    ``PIPELINE_BENCH_PORT`` names another port for node 0 to listen at.  Raises UserError where there is
    not one process a node.
    """
    found = _of_torchrun(environment) or _of_slurm(environment) or Place()
    typed = environment.get(PORT_VARIABLE)
    if typed is None or found.count == 1:
        return found
    if not typed.isdigit() or not 0 < int(typed) < 65536:
        raise UserError(PORT_VARIABLE, typed, "must be a port, 1 to 65535", "mend or unset it")
    return Place(index=found.index, count=found.count, address=found.address, port=int(typed))


def _of_torchrun(environment: Mapping[str, str]) -> Place | None:
    count = int(environment.get("GROUP_WORLD_SIZE", "1"))
    if count == 1 or "MASTER_ADDR" not in environment:
        return None
    if environment.get("LOCAL_WORLD_SIZE") != "1":
        raise UserError(
            "--nproc-per-node",
            environment.get("LOCAL_WORLD_SIZE", "missing"),
            "each node takes one process, which starts the ranks itself",
            "write torchrun --nproc-per-node=1",
        )
    # MASTER_PORT itself is torchrun's own store.
    port = int(environment["MASTER_PORT"]) + 1
    return Place(index=int(environment["GROUP_RANK"]), count=count, address=environment["MASTER_ADDR"], port=port)


def _of_slurm(environment: Mapping[str, str]) -> Place | None:
    """Only within a step, which srun starts on every node: a batch script runs on the first alone."""
    count = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    if count == 1:
        return None
    tasks = environment.get("SLURM_STEP_NUM_TASKS")
    if tasks != str(count):
        raise UserError(
            "srun",
            f"{tasks} tasks",
            f"each of the {count} nodes takes one task, which starts the ranks itself",
            "write srun --ntasks-per-node=1",
        )
    # Jobs that share a node get different ports, and so do a job's steps.
    port = 20000 + (int(environment["SLURM_JOB_ID"]) * 7 + int(environment.get("SLURM_STEP_ID", "0"))) % 10000
    first = _first_host(environment["SLURM_STEP_NODELIST"])
    return Place(index=int(environment["SLURM_NODEID"]), count=count, address=first, port=port)


def _first_host(nodes: str) -> str:
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise UserError(
            "SLURM_STEP_NODELIST", nodes, f"scontrol cannot name its first host ({error})", "put scontrol on the PATH"
        ) from None
