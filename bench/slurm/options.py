"""What ``slurm=`` and ``slurm.*`` say: how a study's arrays ask for nodes."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import conf
from bench.errors import UserError

__all__ = ["FOLDER", "Options", "read_options"]

FOLDER = Path(conf.__file__).parent / "slurm"
_PREFIX = "slurm."


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keys of ``conf/slurm/default.yaml``, which says what each means; None is the cluster's default."""

    partition: str | None
    account: str | None
    qos: str | None
    time: str
    constraint: str | None
    gres: str | None
    gpus_per_node: int | None
    cpus_per_task: int | None
    memory: str | None
    exclusive: bool
    setup: tuple[str, ...]
    extra: tuple[str, ...]
    cells_per_task: int | None
    target_minutes: float
    seconds_per_cell: float
    max_array_size: int
    max_running: int | None
    warn_s: int
    max_requeues: int


def read_options(overrides: Sequence[str]) -> tuple[Options, list[str]]:
    """The options of a command line, and its other overrides, which are the study's.

    Raises UserError for an unknown key, a value of another type or out of range.
    """
    rest: list[str] = []
    choice, typed = "default", dict[str, str]()
    for text in overrides:
        key, equals, value = text.partition("=")
        if key == "slurm":
            choice = value
        elif key.startswith(_PREFIX):
            if not equals:
                raise UserError(key, "", "has no value", "write slurm.key=value")
            typed[key.removeprefix(_PREFIX)] = value
        else:
            rest.append(text)
    known = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    if choice not in known:
        raise UserError("slurm", choice, f"allowed are {', '.join(known)}", "choose one of them")
    values: dict[str, Any] = _file("default") | (_file(choice) if choice != "default" else {})
    for key, value in typed.items():
        values[key] = _list(key, value) if value.startswith("[") else value
    return _checked(values), rest


def _file(name: str) -> dict[str, Any]:
    # Every scalar as its text: YAML takes a time such as 1:30:00 for a number.
    loaded = yaml.load((FOLDER / f"{name}.yaml").read_text(), Loader=yaml.BaseLoader)
    if not isinstance(loaded, dict):
        raise UserError("slurm", name, "is no mapping of keys to values", f"mend {FOLDER / f'{name}.yaml'}")
    return loaded


def _list(key: str, text: str) -> object:
    try:
        return yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError:
        raise UserError(_PREFIX + key, text, "cannot be read", 'write a list as ["one","two"]') from None


def _checked(values: Mapping[str, Any]) -> Options:
    hints = typing.get_type_hints(Options)
    for key, value in values.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            remedy = f"did you mean {_PREFIX}{near[0]}?" if near else f"allowed are {', '.join(hints)}"
            raise UserError(_PREFIX + key, value, "there is no such key", remedy)
    options = Options(**{key: _typed(key, values[key], hint) for key, hint in hints.items()})
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            least = 0 if field.name == "max_requeues" else 1e-9
            if value < least:
                raise UserError(_PREFIX + field.name, value, "is too small", "give a positive number")
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and "\n" in text:
                raise UserError(_PREFIX + field.name, text, "must be one line", "leave out the line break")
    _check_gres(options.gres)
    return options


def _check_gres(gres: str | None) -> None:
    try:
        if gres is not None:
            gres.format(gpus=1)
    except (KeyError, IndexError, ValueError):
        raise UserError("slurm.gres", gres, "may hold {gpus} and no other braces", "write gpu:{gpus}") from None


def _typed(key: str, value: Any, hint: Any) -> Any:
    """The text as the field's type."""
    if typing.get_origin(hint) is types.UnionType:
        if value in ("null", "None", ""):
            return None
        hint = next(a for a in typing.get_args(hint) if a is not types.NoneType)
    if hint is str and isinstance(value, str) and value not in ("null", ""):
        return value
    if hint == tuple[str, ...]:
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return tuple(value)
    if hint is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if hint in (int, float):
        try:
            return hint(value)
        except (TypeError, ValueError):
            pass
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise UserError(_PREFIX + key, value, f"must be {names.get(hint, 'a list of texts')}", "mend the value")
