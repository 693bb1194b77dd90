"""What a record says about where it was made."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import os
import platform
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.factors import Library
from bench.hardware import Gpu, cpu_name, link
from bench.registry import capabilities

__all__ = ["describe"]

_PREFIXES = ("CUDA", "NCCL", "OMP", "MKL", "GLOO", "SLURM", "TORCH", "PYTORCH", "KMP")
_SECRET = ("TOKEN", "JWT", "SECRET", "PASSWORD", "KEY")  # a record may be published
_PACKAGES = ("torch", "torchvision", "numpy", "hydra-core")


def describe(library: Library, gpus: tuple[Gpu, ...]) -> dict[str, Any]:
    """Versions, host, CPU, the GPUs used and the links between neighbours, git commit, relevant
    environment variables and the command line."""
    can = capabilities(library)
    packages = [*_PACKAGES, *([can.distribution] if can.distribution else [])]
    commit, dirty = _git()
    return {
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in packages}},
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "gpus": [{"index": g.index, "uuid": g.uuid, "name": g.name, "pci_address": g.pci_address} for g in gpus],
        "driver": gpus[0].driver if gpus else "",
        "links": [link(a, b) for a, b in itertools.pairwise(gpus)],
        "git_commit": commit,
        "git_dirty": dirty,
        "variables": _variables(),
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
    }


def _variables() -> dict[str, str]:
    chosen = {k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)}
    return {k: v for k, v in chosen.items() if not any(word in k for word in _SECRET)}


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _git() -> tuple[str, bool]:
    """(commit, whether the tree has changes) of the checkout that holds this file; ("", False) for none."""
    top = Path(__file__).resolve().parent.parent
    if not (top / ".git").exists():
        return "", False
    try:
        run = functools.partial(subprocess.run, cwd=top, capture_output=True, text=True, timeout=20, check=True)
        commit = run(["git", "rev-parse", "HEAD"]).stdout.strip()
        return commit, bool(run(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip())
    except (OSError, subprocess.SubprocessError):
        return "", False
