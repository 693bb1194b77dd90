"""``python -m bench --help``: every factor, its choices and its default, read from ``conf/``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

import conf

__all__ = ["print_help"]

_GROUPS = {
    "library": "what trains the model",
    "model": "the model; custom takes model.target=package.module.function",
    "balance": "the rule that picks the stage boundaries",
    "data": "where mini-batches come from",
    "experiment": "a whole study: its axes and fixed values",
}


def _defaults(text: str) -> dict[str, str]:
    lines = text.partition("defaults:")[2].splitlines()
    pairs = (line.strip().removeprefix("- ").split(": ") for line in lines if line.strip().startswith("- "))
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def _keys(text: str) -> Iterator[tuple[str, str, str]]:
    """(key, default, meaning) of each commented line."""
    section = ""
    for line in text.splitlines():
        if line.startswith("#") or ":" not in line or line.strip().startswith("-"):
            continue
        key, _, rest = line.partition(":")
        value, _, meaning = rest.partition("  # ")
        if not rest.strip():
            section = f"{key}."
        elif meaning:
            if not line.startswith(" "):
                section = ""
            yield section + key.strip(), value.strip(), meaning.strip()


def print_help() -> None:
    """Print usage, groups and keys."""
    console = Console() if sys.stdout.isatty() else Console(width=150)
    folder = Path(conf.__file__).parent
    text = (folder / "config.yaml").read_text()
    console.print("python -m bench KEY=VALUE …      run one cell")
    console.print("python -m bench -m KEY=A,B …     sweep; also experiment=NAME")
    console.print("python -m bench.plan …           show what would run")
    console.print("python -m bench.slurm submit …   run a study as job arrays; also status and collect")
    console.print("python -m bench.check            is this machine fit to measure on")
    console.print("python -m bench.partition …      compare the balances of one cell, without training")
    console.print("python -m bench.timeline RUN     draw a run's traced step and say where its time went")
    console.print("python -m bench.collect, bench.table RESULTS_DIR   CSVs and table from the records alone")
    console.print("python -m bench.report RESULTS_DIR   tables, figures and one HTML page of them")
    console.print("python -m bench.check_csv RESULTS_DIR   CSVs against the schema")
    console.print("python -m bench.compare OLD NEW  is anything faster or slower, and is that significant\n")
    defaults = _defaults(text)
    groups = Table("key", "default", "choices", "meaning", title="choices", title_justify="left")
    for name, meaning in _GROUPS.items():
        choices = ", ".join(sorted(path.stem for path in (folder / name).glob("*.yaml")))
        groups.add_row(name, defaults.get(name, ""), choices, meaning)
    console.print(groups)
    keys = Table("key", "default", "meaning", title="values", title_justify="left")
    for row in _keys(text):
        keys.add_row(*row)
    console.print(keys)
