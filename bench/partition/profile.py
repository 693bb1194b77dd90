"""What each layer of a model costs on a device, measured once and kept as a CSV that people can read."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from bench.atomic import replacing
from bench.factors import Factors
from bench.partition.predict import LayerCost, Link, Problem
from bench.partition.simulate import Schedule

__all__ = [
    "ITEM_BYTES",
    "LayerProfile",
    "Profile",
    "ProfileKey",
    "profile_key",
    "profile_path",
    "read_profile",
    "write_profile",
]

ITEM_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class ProfileKey:
    """What a profile is a profile of: nothing else changes what a layer costs.

    ``model``: target and options; ``source``: hash of its source; ``hardware``: the devices' fingerprint.
    """

    model: str
    source: str
    granularity: str
    num_classes: int
    micro_batch_size: int
    image_size: int
    precision: str
    device: str
    hardware: str
    torch: str


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One layer, for one micro-batch; medians of several repetitions.

    ``forward_s``, ``backward_s``: seconds, the gradients' accumulation included.  ``update_s``:
    seconds of the optimizer for its parameters.  FLOPs by ``torch.utils.flop_counter``.
    ``saved_bytes``: storages that autograd keeps for its backward and that no earlier layer keeps,
    parameters left out; ``saved_input_bytes``: what it keeps of its input besides, kept by an
    earlier layer too.  ``output_bytes``: what leaves it.  ``state_bytes``: parameters, gradients
    and optimizer state; ``largest_parameter_bytes``: its largest parameter.
    """

    layer: int
    kind: str
    parameters: int
    state_bytes: int
    largest_parameter_bytes: int
    forward_s: float
    backward_s: float
    update_s: float
    forward_flops: int
    backward_flops: int
    saved_bytes: int
    saved_input_bytes: int
    output_bytes: int


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model's layers on a device, and the link between two devices.

    ``link_latency_s`` and ``link_bytes_per_s``: what one transfer between neighbours costs; an
    infinite bandwidth where there was no second device to measure it with.  ``processes`` were
    profiling side by side, ``repetitions`` is how often each layer was timed.
    """

    key: ProfileKey
    layers: tuple[LayerProfile, ...]
    link_latency_s: float = 0.0
    link_bytes_per_s: float = math.inf
    processes: int = 1
    repetitions: int = 1

    def problem(self, stages: int, schedule: Schedule) -> Problem:
        """What ``optimal`` and the prediction of any partition need."""
        first = self.key
        values = first.micro_batch_size * 3 * first.image_size**2
        return Problem(
            layers=tuple(
                LayerCost(
                    forward_s=layer.forward_s,
                    backward_s=layer.backward_s,
                    update_s=layer.update_s,
                    boundary_bytes=layer.output_bytes,
                    activation_bytes=layer.saved_bytes,
                    saved_input_bytes=layer.saved_input_bytes,
                    state_bytes=layer.state_bytes,
                )
                for layer in self.layers
            ),
            stages=stages,
            schedule=schedule,
            link=Link(bandwidth_bytes_per_s=self.link_bytes_per_s, latency_s=self.link_latency_s),
            input_bytes=values * ITEM_BYTES[first.precision],
        )

    def costs(self, kind: str) -> list[float]:
        """Each layer's cost: ``flops`` or ``time`` (seconds), forward and backward of one micro-batch."""
        if kind == "flops":
            return [float(layer.forward_flops + layer.backward_flops) for layer in self.layers]
        return [layer.forward_s + layer.backward_s for layer in self.layers]


def profile_key(factors: Factors, source: str, hardware: str, torch_version: str) -> ProfileKey:
    """The key of a normalised cell's profile; ``source`` is the hash of the model's source."""
    options = ",".join(f"{key}={value}" for key, value in factors.model.options)
    return ProfileKey(
        model=f"{factors.model.target}({options})",
        source=source,
        granularity=factors.granularity,
        num_classes=factors.num_classes,
        micro_batch_size=factors.batch_size // factors.micro_batches,
        image_size=factors.image_size,
        precision=factors.precision,
        device=factors.device,
        hardware=hardware,
        torch=torch_version,
    )


def profile_path(key: ProfileKey, results_dir: Path) -> Path:
    """Where a results folder keeps the profile."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(key), sort_keys=True).encode()).hexdigest()[:8]
    name = key.model.partition("(")[0].rpartition(".")[2]
    readable = f"{name}-{key.granularity}-{key.micro_batch_size}x{key.image_size}-{key.precision}-{key.hardware}"
    return results_dir / "profiles" / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', readable)}-{digest}.csv"


def write_profile(profile: Profile, path: Path) -> None:
    """Write atomically: lines of ``# name: value`` with all but the layers, then a CSV of a row a layer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {
        **dataclasses.asdict(profile.key),
        **{f.name: getattr(profile, f.name) for f in fields(Profile) if f.name not in ("key", "layers")},
    }
    with replacing(path) as temporary, open(temporary, "w", newline="") as out:
        out.writelines(f"# {name}: {value}\n" for name, value in head.items())
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([f.name for f in fields(LayerProfile)])
        writer.writerows(dataclasses.astuple(layer) for layer in profile.layers)


def _typed(kind: type, row: dict[str, str]) -> dict[str, object]:
    converters = {"int": int, "float": float, "str": str}
    return {f.name: converters[str(f.type)](row[f.name]) for f in fields(kind) if f.name in row}


def read_profile(path: Path) -> Profile:
    """Read a profile back; raises ValueError where the file is none."""
    text = path.read_text().splitlines()
    head = dict(_head(line) for line in text if line.startswith("#"))
    rows: Sequence[dict[str, str]] = list(csv.DictReader(line for line in text if not line.startswith("#")))
    try:
        return Profile(
            key=ProfileKey(**_typed(ProfileKey, head)),  # type: ignore[arg-type]
            layers=tuple(LayerProfile(**_typed(LayerProfile, row)) for row in rows),  # type: ignore[arg-type]
            **_typed(Profile, head),  # type: ignore[arg-type]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name}: no profile ({type(error).__name__}: {error})") from error


def _head(line: str) -> tuple[str, str]:
    name, _, value = line.removeprefix("# ").partition(": ")
    return name, value
