"""What the plan needs of a model, without torch: its layers, their kinds and parameters.

The tables of the shipped models lie in ``models/tables``; any other is written once by a describing
process and cached by the hash of the model's source.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.errors import UserError
from bench.factors import Model

__all__ = ["Layer", "layer_table", "read_table", "shipped_name", "source_hash"]

TABLES = Path(__file__).parent / "tables"
DESCRIBE_TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One child of the flat Sequential; ``parameters`` counts numbers, not bytes."""

    index: int
    kind: str
    parameters: int


def shipped_name(model: Model, granularity: str, num_classes: int) -> str:
    """The file name under which the table of a shipped model lies."""
    options = "".join(f"-{key}{value}" for key, value in sorted(model.options))
    return f"{model.target.rpartition('.')[2]}{options}-{granularity}-{num_classes}.csv"


def read_table(path: Path) -> tuple[Layer, ...]:
    """Read a table back."""
    with open(path, newline="") as lines:
        return tuple(
            Layer(index=int(row["index"]), kind=row["kind"], parameters=int(row["parameters"]))
            for row in csv.DictReader(lines)
        )


def layer_table(model: Model, *, granularity: str, num_classes: int, cache_dir: Path) -> tuple[Layer, ...]:
    """The model's layers; raises UserError (``model.target`` …) where the model cannot be built."""
    shipped = TABLES / shipped_name(model, granularity, num_classes)
    if model.target.startswith(("models.resnet.", "models.vgg.")) and shipped.exists():
        return read_table(shipped)
    path = cache_dir / "tables" / f"{_key(model, granularity, num_classes)}.csv"
    if not path.exists():
        _describe(model, granularity, num_classes, path)
    return read_table(path)


def _key(model: Model, granularity: str, num_classes: int) -> str:
    parts = [json.dumps(asdict(model), sort_keys=True), granularity, str(num_classes), source_hash(model.target)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def source_hash(target: str) -> str:
    """The hash of the file that a model's function stands in; empty where there is none to be found."""
    try:
        spec = importlib.util.find_spec(target.rpartition(".")[0])
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return ""
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


def _describe(model: Model, granularity: str, num_classes: int, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    request = {"model": asdict(model), "granularity": granularity, "num_classes": num_classes, "path": str(path)}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in [*sys.path, os.getcwd()] if p)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "models.describe", json.dumps(request)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DESCRIBE_TIMEOUT_S,
        )
        message = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
    except subprocess.TimeoutExpired:
        message = f"describing it took more than {DESCRIBE_TIMEOUT_S} s"
    if path.exists():
        return
    try:
        raise UserError(**json.loads(message))
    except (TypeError, json.JSONDecodeError):
        raise UserError(
            "model.target", model.target, message or "it could not be built", "try the function by itself"
        ) from None
