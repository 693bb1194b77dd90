"""The reference that parity compares with: the model trained by the plainest loop there is.

It shares no code with any adapter, so that a fault in the plain one-device adapter is caught too.
References are cached by what determines them, so that a study computes each once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import nn

from bench.atomic import replacing
from bench.factors import Factors
from bench.worker.build import Work, loss, make_model, make_optimizer
from bench.worker.channel import Channel
from bench.worker.data import synthetic
from bench.worker.errors import is_out_of_memory

__all__ = ["Reference", "difference", "flat", "layer_tensors", "mini_batch", "obtain", "read", "worst"]

CACHE_LIMIT_BYTES = 8 * 2**30


@dataclass(frozen=True, kw_only=True)
class Reference:
    """By flat layer index, all tensors of a layer flattened together, on the CPU: ``gradient`` of the
    last step, ``update`` w_end − w_0, ``buffers`` at the end.  ``noise_gradient`` and
    ``noise_update`` are the worst layer's difference of the reference from itself with the
    micro-batches in another order.  ``device``: the kind it ran on."""

    gradient: dict[int, torch.Tensor]
    update: dict[int, torch.Tensor]
    buffers: dict[int, torch.Tensor]
    noise_gradient: float
    noise_update: float
    device: str


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of all tensors as one vector on the CPU, in their own dtype (empty for none)."""
    floating = [t.detach().reshape(-1).cpu() for t in tensors if t.is_floating_point()]
    return torch.cat(floating) if floating else torch.empty(0)


def mini_batch(factors: Factors, work: Work, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parity's mini-batch of a step: of its own, different data each step."""
    return synthetic(
        seed=1_000_003 * (factors.seed + 1) + step,
        batch_size=work.batch_size,
        image_size=factors.image_size,
        num_classes=factors.num_classes,
        dtype=work.dtype,
    )


def worst(found: dict[int, torch.Tensor], expected: dict[int, torch.Tensor]) -> tuple[float, int]:
    """The largest norm-relative error over the layers of ``found``, and its layer (-1: none)."""
    error, layer = 0.0, -1
    for index, tensor in found.items():
        if tensor.numel() != expected[index].numel():
            return float("inf"), index
        if tensor.numel() == 0:
            continue
        known = expected[index].double()
        apart = torch.linalg.vector_norm(tensor.double() - known).item()
        norm = torch.linalg.vector_norm(known).item()
        relative = apart / norm if norm > 0 else (0.0 if apart == 0 else float("inf"))
        if not relative <= error:  # a NaN is the worst of all
            error, layer = (relative if relative == relative else float("inf")), index
        elif layer < 0:
            layer = index
    return error, layer


def difference(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """after − before, exactly as float32 or float64 gives it (bfloat16 is widened first)."""
    if after.dtype == torch.bfloat16:
        after, before = after.float(), before.float()
    return after - before


def _train(
    factors: Factors,
    work: Work,
    steps: int,
    device: torch.device,
    order: Callable[[int], Sequence[int]],
    channel: Channel,
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    model = make_model(factors, work).to(device)
    optimizer = make_optimizer(work.optimizer)(model.parameters())
    start = {i: flat(list(layer.parameters())) for i, layer in enumerate(model)}
    gradient: dict[int, torch.Tensor] = {}
    for step in range(steps):
        x, y = (t.to(device) for t in mini_batch(factors, work, step))
        xs, ys = x.chunk(factors.micro_batches), y.chunk(factors.micro_batches)
        with channel.stepping():
            for index in order(factors.micro_batches):
                (loss(model(xs[index]), ys[index]) / factors.micro_batches).backward()
                channel.alive("computing the parity reference")
        if step == steps - 1:
            gradient = {
                i: flat([p.grad for p in layer.parameters() if p.grad is not None]) for i, layer in enumerate(model)
            }
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    end = {i: flat(list(layer.parameters())) for i, layer in enumerate(model)}
    buffers = {i: flat(list(layer.buffers())) for i, layer in enumerate(model)}
    return gradient, {i: difference(end[i], start[i]) for i in end}, buffers


def _compute(
    factors: Factors, work: Work, steps: int, device: torch.device, noise: bool, channel: Channel
) -> Reference:
    gradient, update, buffers = _train(factors, work, steps, device, range, channel)
    noise_gradient = noise_update = 0.0
    if noise:
        other = _train(factors, work, steps, device, lambda m: range(m - 1, -1, -1), channel)
        noise_gradient, noise_update = worst(other[0], gradient)[0], worst(other[1], update)[0]
    return Reference(
        gradient=gradient,
        update=update,
        buffers=buffers,
        noise_gradient=noise_gradient,
        noise_update=noise_update,
        device=device.type,
    )


def _source_hash() -> str:
    """Changes with the code that makes a model or this loop, so that no stale reference is used."""
    files = [Path(__file__), *sorted((Path(__file__).parents[2] / "models").glob("*.py"))]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def _key(factors: Factors, work: Work, steps: int, device: torch.device, noise: bool) -> str:
    parts = {
        "model": asdict(factors.model),
        "granularity": factors.granularity,
        "image_size": factors.image_size,
        "num_classes": factors.num_classes,
        "micro_batches": factors.micro_batches,
        "seed": factors.seed,
        "precision": factors.precision,
        "work": {k: str(v) for k, v in asdict(work).items()},
        "steps": steps,
        "noise": noise,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        "torch": torch.__version__,
        "source": _source_hash(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _cpu() -> str:
    return torch.backends.cpu.get_cpu_capability()


def _prune(folder: Path, keep: Path) -> None:
    """Drop the oldest references beyond ``CACHE_LIMIT_BYTES``; each can be computed again."""
    files = sorted(folder.glob("*.pt"), key=lambda f: f.stat().st_mtime, reverse=True)
    total = 0
    for file in files:
        total += file.stat().st_size
        if total > CACHE_LIMIT_BYTES and file != keep:
            file.unlink(missing_ok=True)


def obtain(
    factors: Factors,
    work: Work,
    steps: int,
    device: torch.device,
    *,
    noise: bool,
    cache_dir: Path,
    channel: Channel,
) -> tuple[Path | None, str]:
    """The file of the reference, computed now if no earlier cell of the study did.

    On the device, or on the CPU where it does not fit there; (None, reason) where it fits nowhere.
    ``noise`` asks for the run in another micro-batch order as well.
    """
    folder = cache_dir / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    reasons = []
    for where in dict.fromkeys((device, torch.device("cpu"))):
        path = folder / f"{_key(factors, work, steps, where, noise)}.pt"
        with FileLock(f"{path}.lock"):
            if path.exists():
                return path, ""
            try:
                reference = _compute(factors, work, steps, where, noise, channel)
            except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                reasons.append(f"the reference does not fit on {where}")
                continue
            with replacing(path) as temporary:
                torch.save(asdict(reference), temporary)
        _prune(folder, path)
        return path, ""
    return None, "; ".join(reasons)


def read(path: Path) -> Reference:
    """Read a reference back, its tensors mapped from the file and not loaded."""
    data: dict[str, Any] = torch.load(path, mmap=True, weights_only=True)
    return Reference(**data)


def layer_tensors(layers: Mapping[int, nn.Module], *, buffers: bool = False) -> dict[int, torch.Tensor]:
    """Parameters (or buffers) of live layers, each layer's flattened together."""
    return {i: flat(list(layer.buffers() if buffers else layer.parameters())) for i, layer in layers.items()}
