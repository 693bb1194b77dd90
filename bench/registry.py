"""The libraries under test: a library's YAML names its adapter and is its registration."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import yaml

import conf
from adapters.protocol import Capabilities
from bench.factors import Library

__all__ = ["capabilities", "libraries"]


@functools.cache
def libraries() -> dict[str, Library]:
    """All registered libraries by name."""
    folder = Path(conf.__file__).parent / "library"
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        data = yaml.safe_load(path.read_text())
        found[data["name"]] = Library(
            name=data["name"], adapter=data["adapter"], options=tuple(sorted((data.get("options") or {}).items()))
        )
    return found


@functools.cache
def capabilities(library: Library) -> Capabilities:
    """What the library can do, read from its adapter without importing the library."""
    value: Capabilities = importlib.import_module(library.adapter).capabilities
    return value
