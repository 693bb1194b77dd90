"""The factors of one cell as frozen dataclasses: the border behind which no config object passes.

Nothing here imports torch. ``Factors`` makes the cell's id; ``Settings`` says how it is run and
never enters the id.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Balance", "Data", "Factors", "Library", "Model", "Optimizer", "Scalar", "Settings"]

Scalar = str | int | float | bool | None
Options = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library under test; ``adapter`` is the dotted name of its adapter module."""

    name: str
    adapter: str
    options: Options = ()


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model; ``target`` is ``package.module.function`` returning a flat ``nn.Sequential``.

    The function is called as ``target(granularity=…, num_classes=…, **options)``.
    """

    name: str
    target: str
    options: Options = ()


@dataclass(frozen=True, kw_only=True)
class Balance:
    """The rule that picks the stage boundaries; ``layers`` only for ``manual``.

    Options: ``max_memory`` of ``optimal``, ``regex`` of ``native_regex``.
    """

    name: str
    layers: tuple[int, ...] | None = None
    options: Options = ()


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where mini-batches come from: ``synthetic``, ``imagefolder`` or ``cifar10`` (at ``path``)."""

    name: str = "synthetic"
    path: str | None = None


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Plain SGD, the only optimizer; ``lr`` and ``momentum`` of the measured steps."""

    name: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.9


@dataclass(frozen=True, kw_only=True)
class Factors:
    """One point of a sweep.  ``shared/words``: see README, *Words*.

    In a *normalised* Factors (``plan.normalise``) ``device`` is ``cpu`` or ``cuda``, ``schedule``
    is resolved, and factors without meaning for the library hold fixed values.
    """

    library: Library
    model: Model
    granularity: Literal["block", "op"] = "block"
    image_size: int = 64
    num_classes: int = 1000
    batch_size: int = 32
    micro_batches: int = 4
    stages: int = 2
    virtual_stages: int = 1
    nodes: int = 1
    balance: Balance = Balance(name="uniform")
    schedule: str = "native"
    checkpoint: Literal["never", "except_last", "always"] = "never"
    precision: Literal["fp64", "fp32", "tf32", "bf16"] = "fp32"
    optimizer: Optimizer = Optimizer()
    data: Data = Data()
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    share_devices: bool = False

    def replace(self, **changes: object) -> Factors:
        """A copy with some fields changed.

        As ``dataclasses.replace``, which takes ten times as long: a plan makes hundreds of thousands of copies.
        """
        unknown = changes.keys() - vars(self).keys()
        if unknown:
            raise TypeError(f"Factors has no field {min(unknown)}")
        made = object.__new__(Factors)
        vars(made).update(vars(self), **changes)
        return made


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How cells are run; none of it enters a cell's id.

    ``on_existing``: what a sweep does with a run that has a record: ``skip`` it, however it ended (an
    interrupted one has not ended), ``retry_failed`` (skip only ok and unsupported ones) or ``rerun``;
    ``on_error``: go on after a failed run, or stop.  ``steps=auto`` goes on until half the interval
    of the median step is within ``target_ci`` of it, or for ``max_steps``.  ``devices`` are indices
    into the visible GPUs (None: the first ``stages``); ``timeout_s`` ends a cell that reports nothing
    for so long, ``wall_limit_s`` bounds the whole cell (waiting for the device lock excepted).
    ``profile``: measure the model's layers for every cell, so that its step time is predicted, not
    only where the balance needs it.  ``preload``: fork ranks from a process that has imported the
    library, instead of fresh interpreters.  ``memory``: add a pass that counts what each stage holds.
    ``trace``: add one that stamps what every device does when.
    """

    trials: tuple[int, ...] = (0,)
    on_existing: Literal["skip", "rerun", "retry_failed"] = "skip"
    on_error: Literal["continue", "stop"] = "continue"
    warmup_steps: int = 3
    steps: int | Literal["auto"] = 10
    target_ci: float = 0.01
    max_steps: int = 200
    devices: tuple[int, ...] | None = None
    timeout_s: float = 300.0
    wall_limit_s: float = 3600.0
    results_dir: Path = Path("results")
    baseline: bool = True
    profile: bool = False
    preload: bool = True
    memory: bool = True
    trace: bool = True
