"""From the command line and ``conf/`` to frozen dataclasses; no config object passes this border.

Config groups are composed by Hydra; plain values are set here, by the same grammar, so that a sweep
need not compose each of its cells and every mistake is answered in one line.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import conf
from bench.errors import UserError
from bench.factors import Balance, Data, Factors, Library, Model, Optimizer, Settings

__all__ = [
    "GROUPS",
    "Change",
    "apply",
    "choices",
    "compose_groups",
    "exclusions",
    "from_tree",
    "parse",
    "sweeper_params",
]

CONF = Path(conf.__file__).parent
GROUPS = ("library", "model", "balance", "data", "experiment", "local")
_SECTIONS = {"library": Library, "model": Model, "balance": Balance, "data": Data, "optimizer": Optimizer}
_POSITIVE = (
    "image_size",
    "num_classes",
    "batch_size",
    "micro_batches",
    "stages",
    "virtual_stages",
    "nodes",
    "steps",
    "target_ci",
    "max_steps",
    "timeout_s",
    "wall_limit_s",
)
_NOT_NEGATIVE = ("warmup_steps", "trial", "seed")

_STEPS = typing.get_type_hints(Settings)["steps"]

Tree = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """One override: the key and the values it takes (several in a sweep); ``add`` for ``+key``."""

    key: str
    values: tuple[Any, ...]
    add: bool = False


def choices(group: str) -> list[str]:
    """The choices of a config group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _suggestion(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]}?" if near else "see python -m bench --help"


def parse(overrides: Sequence[str]) -> list[Change]:
    """Parse overrides by Hydra's grammar; the last of several for one key counts."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    found: dict[str, Change] = {}
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            first = str(error).splitlines()[0]
            raise UserError(
                text.partition("=")[0], text.partition("=")[2], f"cannot be read ({first})", "write key=value"
            ) from None
        if override.is_delete() or override.package is not None:
            raise UserError(text, "", "keys cannot be removed or moved", "give key=value")
        key = override.key_or_group
        change = Change(key, _values(override, text), add=override.is_add())
        if override.is_force_add() or (change.add and not key.startswith("model.")):
            raise UserError(key, text, "only options of a model can be added", "leave out the +")
        _check_key(change)
        found.pop(key, None)
        found[key] = change
    return list(found.values())


def _values(override: Any, text: str) -> tuple[Any, ...]:
    from hydra.core.override_parser.types import Glob

    if not override.is_sweep_override():
        return (_plain(override.value()),)
    values = list(override.sweep_iterator()) if not isinstance(override.value(), Glob) else []
    if not values:
        raise UserError(text.partition("=")[0], text.partition("=")[2], "gives no values", "list them: a,b,c")
    # The iterator gives text in Hydra's own grammar; parsed again it has its type.
    return tuple(_plain(_parse_value(value)) for value in values)


def _parse_value(value: Any) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(f"x={value}").value() if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    from hydra.core.override_parser.types import QuotedString

    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    return value


def _check_key(change: Change) -> None:
    key = change.key
    if key in GROUPS:
        known = choices(key)
        for value in change.values:
            if str(value) not in known:
                raise UserError(key, value, f"allowed are {', '.join(known)}", _suggestion(str(value), known))
        if key in ("experiment", "local") and len(change.values) > 1:
            raise UserError(key, ",".join(map(str, change.values)), "cannot be swept", "choose one")
        return
    head = key.partition(".")[0]
    known = [*GROUPS, *_config_keys()]
    if head not in known:
        raise UserError(key, change.values[0], "there is no such key", _suggestion(key, known))


@functools.cache
def _config_keys() -> tuple[str, ...]:
    import yaml

    return tuple(k for k in yaml.safe_load((CONF / "config.yaml").read_text()) if k != "defaults")


def compose_groups(groups: Mapping[str, str]) -> Tree:
    """Hydra's composition for a choice of config groups, as a plain tree; Hydra leaves nothing behind."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("conf", version_base="1.3"):
            config = compose("config", [f"{k}={v}" for k, v in groups.items()], return_hydra_config=True)
            sweep = OmegaConf.to_container(config.hydra.sweeper)
            OmegaConf.set_struct(config, False)
            config.pop("hydra")
            tree = OmegaConf.to_container(config)
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        raise UserError(
            "conf", ",".join(f"{k}={v}" for k, v in groups.items()), str(cause).splitlines()[0], "mend the YAML"
        ) from None
    assert isinstance(tree, dict)
    assert isinstance(sweep, dict)
    return {**{str(k): v for k, v in tree.items()}, "_sweep": sweep.get("params") or {}}


def sweeper_params(tree: Tree) -> list[str]:
    """The experiment's own sweep axes as overrides."""
    return [f"{key}={value}" for key, value in tree["_sweep"].items()]


def apply(tree: Tree, change: Change, value: Any) -> None:
    """Set one plain value in a tree; the key must exist, unless the change adds a model's option."""
    *path, last = change.key.split(".")
    node: Any = tree
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    if not isinstance(node, dict) or (last not in node and not change.add):
        siblings = [".".join([*path, k]) for k in node] if isinstance(node, dict) else []
        raise UserError(change.key, value, "there is no such key", _suggestion(change.key, siblings))
    if isinstance(node.get(last, None), dict):
        raise UserError(change.key, value, f"is a group of {', '.join(node[last])}", f"set one, {change.key}.…=…")
    node[last] = value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _typed(key: str, value: Any, hint: Any) -> Any:
    """The value as the field's type; raises UserError in the user's words."""
    origin = typing.get_origin(hint)
    if hint == _STEPS:
        return value if value == "auto" else _typed(key, value, int)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        return _typed(key, value, next(a for a in typing.get_args(hint) if a is not type(None)))
    if origin is typing.Literal:
        allowed = typing.get_args(hint)
        if value not in allowed:
            words = [str(a) for a in allowed]
            raise UserError(key, value, f"allowed are {', '.join(words)}", _suggestion(str(value), words))
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple) or not all(type(v) is int for v in value):
            raise UserError(key, value, "must be a list of whole numbers", "write it as [1,2]")
        return tuple(value)
    if hint is float and type(value) is int:
        return float(value)
    if hint is Path or hint is str:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return hint(str(value))
        raise UserError(key, value, "must be text", "give a word or a path")
    if type(value) is not hint:
        names = {int: "a whole number", float: "a number", bool: "true or false"}
        raise UserError(key, value, f"must be {names.get(hint, hint.__name__)}", "mend the value")
    return value


def _section(name: str, data: Tree) -> Any:
    kind = _SECTIONS[name]
    hints = _hints(kind)
    fields: Tree = {}
    options = dict(data.get("options") or {}) if name == "library" else {}
    for key, value in data.items():
        full = f"{name}.{key}"
        if value == "???":
            raise UserError(full, "", f"{name}={data['name']} needs it", f"give {full}=…")
        if key == "options":
            continue
        if key in hints:
            fields[key] = _typed(full, value, hints[key])
        elif "options" in hints:
            if not isinstance(value, str | int | float | bool | None):
                raise UserError(full, value, "must be a plain value", "give a word or a number")
            options[key] = value
        else:
            raise UserError(full, value, "there is no such key", "remove it")
    if "options" in hints:
        fields["options"] = tuple(sorted(options.items()))
    return kind(**fields)


def from_tree(tree: Tree) -> tuple[Factors, Settings]:
    """A whole tree as dataclasses, every value checked for its type and its range."""
    factors: Tree = {}
    settings: Tree = {}
    for key, value in tree.items():
        if key in ("_sweep", "exclude"):
            continue
        if key in _SECTIONS:
            factors[key] = _section(key, value)
        elif key == "trial":
            settings["trials"] = (check_range("trial", _typed("trial", value, int)),)
        elif key in _hints(Settings):
            settings[key] = check_range(key, _typed(key, value, _hints(Settings)[key]))
        elif key in _hints(Factors):
            factors[key] = check_range(key, _typed(key, value, _hints(Factors)[key]))
        else:
            raise UserError(key, value, "there is no such key", _suggestion(key, _config_keys()))
    optimizer: Optimizer = factors["optimizer"]
    if optimizer.name != "sgd":
        raise UserError("optimizer.name", optimizer.name, "allowed is sgd", "leave it out")
    if not optimizer.lr > 0 or not 0 <= optimizer.momentum < 1:
        raise UserError("optimizer.lr", optimizer.lr, "needs lr > 0 and 0 ≤ momentum < 1", "mend the values")
    return Factors(**factors), Settings(**settings)


def check_range(key: str, value: Any) -> Any:
    """The value, if it lies in the key's range."""
    if key in _POSITIVE and value != "auto" and not value > 0:
        raise UserError(key, value, "must be above 0", "give a positive number")
    if key in _NOT_NEGATIVE and value < 0:
        raise UserError(key, value, "must not be negative", "give 0 or more")
    return value


def factor_value(key: str, value: Any) -> Any:
    """One plain factor's value, checked as ``from_tree`` does."""
    return check_range(key, _typed(key, value, _hints(Factors)[key]))


def exclusions(rules: Any) -> list[Callable[[Factors], bool]]:
    """A study's ``exclude`` as predicates: a rule is a mapping of factors to a value or a list of them, and leaves
    out what has one of the values in each; a section (library, model, …) goes by its name or by a dotted key."""
    if not isinstance(rules, list) or not all(isinstance(rule, dict) and rule for rule in rules):
        raise UserError("exclude", rules, "must be a list of mappings", "write - {library: torch, stages: [2, 4]}")
    return [_exclusion(rule) for rule in rules]


def _exclusion(rule: Tree) -> Callable[[Factors], bool]:
    wanted = {key: tuple(v) if isinstance(v, list) else (v,) for key, v in rule.items()}
    known = [*_hints(Factors), *(f"{s}.{f.name}" for s, kind in _SECTIONS.items() for f in dataclasses.fields(kind))]
    for key, values in wanted.items():
        if key not in known:
            raise UserError(f"exclude.{key}", values[0], "there is no such factor", _suggestion(key, known))
        for value in values:
            if key in _SECTIONS and key in GROUPS and value not in choices(key):
                raise UserError(
                    f"exclude.{key}",
                    value,
                    f"allowed are {', '.join(choices(key))}",
                    _suggestion(str(value), choices(key)),
                )
            if is_factor(key):
                _typed(f"exclude.{key}", value, _hints(Factors)[key])

    def value_of(factors: Factors, key: str) -> Any:
        value: Any = factors
        for part in key.split("."):
            value = getattr(value, part)
        return getattr(value, "name", value)

    return lambda factors: all(value_of(factors, key) in values for key, values in wanted.items())


def is_factor(key: str) -> bool:
    """Whether the key is a plain factor (a field of ``Factors`` that is no section)."""
    return key in {f.name for f in dataclasses.fields(Factors)} and key not in _SECTIONS
