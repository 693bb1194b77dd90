"""What the harness asks of a library and what it gets: the only thing an adapter must fit.

An adapter is a module with these names:

* ``capabilities``: a ``Capabilities``, plain data that the plan reads without importing the library;
* ``build(task)``: makes a ``Pipeline`` on this rank, importing the library inside the function;

and, where ``capabilities.native_balances`` names any, ``native_partition(rule, options, task)``: the
numbers of layers that the library's own routine picks for ``task.model``, called on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Capabilities", "Pipeline", "ReadBack", "ScheduleRule", "Task"]

CHECKPOINTS = ("never", "except_last", "always")


@dataclass(frozen=True, kw_only=True)
class ScheduleRule:
    """A schedule a library offers and the limits it sets (p stages, v virtual stages, m micro-batches).

    ``virtual_stages`` are the allowed v (None: any above 1).  ``min_micro_batches``: ``one``,
    ``stages`` (m ≥ p) or ``model_stages`` (m ≥ p·v).  ``whole_rounds``: m must be a multiple of
    max(1, m // p).  ``checkpoints``: the checkpoint modes it can run with.
    ``placement``: ``loop`` puts model stage k on device k mod p, ``v`` on k and 2p−1−k.
    """

    name: str
    virtual_stages: tuple[int, ...] | None = (1,)
    min_micro_batches: Literal["one", "stages", "model_stages"] = "one"
    whole_rounds: bool = False
    checkpoints: tuple[str, ...] = CHECKPOINTS
    placement: Literal["loop", "v"] = "loop"
    min_stages: int = 1


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a library can do, as plain data.

    ``distribution``: pip name whose version goes into the cell's id (None: torch itself).
    ``extra``: the project's extra that installs it.  ``modules``: what its processes import.
    ``ranks``: one process for all devices, or one a stage.  ``stages_are``: ``devices`` of a
    pipeline, ``replicas`` (ddp) or ``none`` (single).  ``schedules``: the first is ``native``;
    empty where a schedule has no meaning.
    ``recomputes_ahead``: every stage but the last recomputes the next micro-batch before the backward of
    the one at work.
    ``native_balances``: the library's own routines for a partition by name (``time`` for
    ``balance=native_time``), and the device kinds on which each runs.
    ``reasons``: ``"factor=value"`` → why it is unsupported, for messages.  ``environment``: variables that
    each process must have, "{device}" standing for cpu or cuda.  ``notes``: asymmetries
    that cannot be removed through the public API; they stand in every record.
    """

    distribution: str | None
    extra: str | None
    modules: tuple[str, ...] = ()
    ranks: Literal["one", "per_stage"]
    stages_are: Literal["devices", "replicas", "none"]
    schedules: tuple[ScheduleRule, ...] = ()
    checkpoints: tuple[str, ...] = CHECKPOINTS
    precisions: tuple[str, ...] = ("fp64", "fp32", "tf32", "bf16")
    several_nodes: bool = False
    overlap_on_cpu: bool = True
    recomputes_ahead: bool = False
    native_balances: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Task:
    """What an adapter is asked to build on this rank.

    ``model``: the whole flat model on the CPU, seeded and in its final dtype, the same on every
    rank; the adapter keeps what this rank needs (it may move the layers in place).
    ``partition``: p·v numbers of layers, model stage by model stage; empty for
    ``native_partition``.  ``devices``: one a stage (p of them); stage i runs on ``devices[i]``.
    The process group exists when ``capabilities.ranks == "per_stage"`` (rank == stage or replica).
    ``input_shape`` is one micro-batch (N, C, H, W); ``loss``: ``loss(output, target)``, the mean
    over the samples given.
    ``make_optimizer`` turns parameters into the one optimizer of the study.
    """

    model: nn.Sequential
    partition: tuple[int, ...]
    stages: int
    virtual_stages: int
    rank: int
    world_size: int
    devices: tuple[torch.device, ...]
    batch_size: int
    micro_batches: int
    input_shape: tuple[int, ...]
    num_classes: int
    dtype: torch.dtype
    schedule: str
    checkpoint: str
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReadBack:
    """What the library says it does, read from the library's own objects after building.

    ``partition``: numbers of layers of *all* model stages where the process can see them,
    else of those on this rank, keyed by model stage.
    """

    partition: Mapping[int, int]
    micro_batches: int
    schedule: str
    checkpoint: str


class Pipeline(Protocol):
    """A built pipeline on one rank.

    Where a schedule runs a backward in halves, which no hook on a module sees, the pipeline also has
    ``backward_halves()``: model stage → (object, {"backward": method that gives the input's
    gradient, "backward_weight": method that gives the parameters'}), each called with the
    micro-batch first.
    """

    def place(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        """Put a mini-batch (on the CPU, whole, the same on every rank) where the library wants it.

        Outside the clock.  ``x`` (batch_size, 3, H, W) already in the dtype; ``y`` (batch_size,).
        """

    def step(self, batch: Any) -> torch.Tensor | None:
        """One optimizer step: forward, loss, backward, optimizer step, gradients set to None.

        ``batch`` is what ``place`` returned.  Returns the mean loss over this rank's samples
        (detached, on its device) where this rank knows it, else None.  No device sync of its own
        (unless the library does one).
        """

    def stages(self) -> Mapping[int, nn.Module]:
        """Model stage → the module that is *called* once per micro-batch on this rank."""

    def layers(self) -> Mapping[int, nn.Module]:
        """Flat layer index → the live module being trained on this rank."""

    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of this rank's parameters (None where it holds none)."""

    def read_back(self) -> ReadBack:
        """See ``ReadBack``."""

    def close(self) -> None:
        """Drop what would keep the process from leaving; the harness ends the process group."""
