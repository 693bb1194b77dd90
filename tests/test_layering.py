"""The parts keep apart: no library's name in the harness, no torch in the parent, data flow one way."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.registry import libraries

ROOT = Path(__file__).parents[1]
HARNESS = sorted([*(ROOT / "bench").rglob("*.py"), *(ROOT / "models").rglob("*.py")])
PARENT = [path for path in sorted((ROOT / "bench").rglob("*.py")) if "worker" not in path.relative_to(ROOT).parts]
# Whatever runs in the parent before a library is imported: adapters' capabilities and models' layer tables.
TORCH_FREE = [*PARENT, *sorted((ROOT / "adapters").glob("*.py")), ROOT / "models" / "table.py"]

# Also an English word, and the framework that everything runs on: only as a string of its own (single),
# or not to be told from the framework (torch).
WORDS = {"single", "torch"}

# config → plan → launch → record → collect → report: a module imports only what stands before it.
FLOW = [
    *("errors", "atomic", "factors", "jobs", "trials", "place"),
    *("partition.solver", "partition.simulate", "partition.predict", "partition.optimal"),
    *("partition.profile", "partition.memory", "partition.prediction", "partition.rules"),
    *("account", "traces", "conform", "record", "history"),
    *("registry", "hardware", "config", "expand", "plan"),
    *("lifeline", "warm", "launch", "nodes", "agent", "gpu_watch"),
    *("environment", "claim", "run", "resolve"),
    *("series", "merit", "schema", "collect", "table", "timeline", "compare", "check_csv", "check"),
    *("report.data", "report.layout", "report.tables", "report.published"),
    *("report.figures", "report.latex", "report.html", "report.__main__"),
    *("sweep", "partition.__main__", "help", "__main__"),
    *("slurm.cluster", "slurm.options", "slurm.study", "slurm.claims", "slurm.script", "slurm.status"),
    *("slurm.planning", "slurm.task", "slurm.array", "slurm.lost", "slurm.__main__"),
]
# (importer, imported) inside a function: python -m bench.sweep is python -m bench -m.
ALLOWED_BACKWARD = {("sweep", "__main__")}


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", HARNESS, ids=_name)
def test_no_library_is_named_in_the_harness(path: Path) -> None:
    text = path.read_text()
    names = libraries().keys()
    assert names >= WORDS
    found = re.findall(rf"(?i)\b(?:{'|'.join(map(re.escape, names - WORDS))})\b", text)
    strings = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    assert not found
    assert "single" not in strings
    assert not [value for value in strings if isinstance(value, str) and re.match(r"adapters\.(?!protocol)", value)]


def test_the_parent_never_imports_torch_or_a_library() -> None:
    modules = [_name(path) for path in TORCH_FREE if path.stem != "__main__"]
    assert "bench.sweep" in modules
    code = (
        "import importlib, sys\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    heavy = {"torch", "torchvision", "scipy", *libraries()}
    assert not heavy & set(done.stdout.split())


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module of bench without the package, whether inside a function) of each import."""
    tree = ast.parse(path.read_text())
    inside = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and (ROOT / node.module.replace(".", "/")).is_dir():
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "bench":
                yield name.removeprefix("bench").removeprefix("."), id(node) in inside


def test_every_module_of_the_parent_has_its_place_in_the_flow() -> None:
    names = {_name(path).removeprefix("bench").removeprefix(".") for path in PARENT if path.stem != "__init__"}
    assert names == set(FLOW)
    assert len(FLOW) == len(set(FLOW))


@pytest.mark.parametrize("path", [p for p in PARENT if p.stem != "__init__"], ids=_name)
def test_nothing_downstream_is_imported_upstream(path: Path) -> None:
    own = _name(path).removeprefix("bench.")
    before = set(FLOW[: FLOW.index(own)])
    backward = {
        (imported, inside)
        for imported, inside in _imports(path)
        if imported not in before and not (inside and (own, imported) in ALLOWED_BACKWARD)
    }
    assert not backward


@pytest.mark.parametrize("package", ["adapters", "models"])
def test_adapters_and_models_know_only_the_border(package: str) -> None:
    allowed = {"adapters": set[str](), "models": {"errors", "factors"}}[package]
    for path in sorted((ROOT / package).rglob("*.py")):
        assert {imported for imported, _ in _imports(path)} <= allowed, path
