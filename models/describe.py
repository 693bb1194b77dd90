"""Write layer tables: ``python -m models.describe --all`` for the shipped models.

With a JSON request instead it describes one model, for ``models.table``.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from dataclasses import astuple, fields
from pathlib import Path

import torch
from torch import nn

from bench.errors import UserError
from bench.factors import Model
from models.build import build_model
from models.table import TABLES, Layer, shipped_name

__all__ = ["describe", "main", "shipped", "write_table"]

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
VGGS = tuple(f"vgg{depth}{bn}" for depth in (11, 13, 16, 19) for bn in ("", "_bn"))


def describe(model: nn.Sequential) -> tuple[Layer, ...]:
    """A layer's kind is its class, or that of its first operation where it is a group."""

    def kind(layer: nn.Module) -> str:
        inner = layer[0] if isinstance(layer, nn.Sequential) and len(layer) else layer
        inner = getattr(inner, "op", inner)
        return type(inner).__name__

    return tuple(
        Layer(index=i, kind=kind(layer), parameters=sum(p.numel() for p in layer.parameters()))
        for i, layer in enumerate(model)
    )


def write_table(layers: tuple[Layer, ...], path: Path) -> None:
    """Write atomically."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with open(temporary, "w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([f.name for f in fields(Layer)])
        writer.writerows(astuple(layer) for layer in layers)
    os.replace(temporary, path)


def shipped() -> list[tuple[Model, str]]:
    """The (model, granularity) pairs whose tables are shipped, at 1000 classes."""
    models = [Model(name=name, target=f"models.resnet.{name}") for name in RESNETS]
    models += [
        Model(name=name, target=f"models.vgg.{name}", options=(("hidden", hidden),))
        for name in VGGS
        for hidden in (4096, 256)
    ]
    return [(model, granularity) for model in models for granularity in ("block", "op")]


def _build(model: Model, granularity: str, num_classes: int) -> nn.Sequential:
    return build_model(model, granularity=granularity, num_classes=num_classes, seed=0, dtype=torch.float32)


def main(arguments: list[str]) -> int:
    """``--all``, or one request as JSON; a user's mistake leaves as JSON on the last line of stderr."""
    if arguments == ["--all"]:
        TABLES.mkdir(exist_ok=True)
        for model, granularity in shipped():
            write_table(describe(_build(model, granularity, 1000)), TABLES / shipped_name(model, granularity, 1000))
        return 0
    request = json.loads(arguments[0])
    options = tuple(tuple(pair) for pair in request["model"].pop("options"))
    try:
        built = _build(Model(**request["model"], options=options), request["granularity"], request["num_classes"])
    except UserError as error:
        print(
            json.dumps(
                {
                    "key": error.key,
                    "value": str(error.value),
                    "problem": error.problem,
                    "remedy": error.remedy,
                }
            ),
            file=sys.stderr,
        )
        return 2
    write_table(describe(built), Path(request["path"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
