"""Whether data read from a file has the types that a dataclass declares.

A dataclass takes whatever it is given; a record that someone has edited, or another program has written, would
else fail far from its file, or be reported as a number.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = ["misfit"]

# Where (empty for the value itself) and what; None where it fits.
Check = Callable[[Any], tuple[str, str] | None]


def misfit(value: Any) -> str:
    """Where a dataclass, or one nested in it, holds a value of another type than declared: ``steps.time_s: 'a'
    is no float``; empty where all fit.

    An int passes for a float, a bool only for a bool.
    """
    kind: Any = type(value)
    found = _check_of(kind)(value)
    return ": ".join(found) if found else ""


@functools.cache
def _check_of(hint: Any) -> Check:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: None
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        parts = [(f.name, _check_of(hints[f.name])) for f in dataclasses.fields(hint)]
        return functools.partial(_fields, hint, parts)
    if origin in (Union, types.UnionType):
        return functools.partial(_any_of, [_check_of(a) for a in arguments])
    if origin is Literal:
        said = f"is not one of {', '.join(map(str, arguments))}"
        return lambda value: None if value in arguments else ("", f"{value!r} {said}")
    if origin is tuple and arguments[-1:] == (Ellipsis,):
        return functools.partial(_each, _check_of(arguments[0]))
    if origin is dict:
        return functools.partial(_values, _check_of(arguments[1]))
    return functools.partial(_plain, origin or hint)


def _plain(kind: type, value: Any) -> tuple[str, str] | None:
    fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    return None if fits else ("", f"{value!r:.60} is no {kind.__name__}")


def _fields(kind: Any, parts: list[tuple[str, Check]], value: Any) -> tuple[str, str] | None:
    if not isinstance(value, kind):
        return "", f"{value!r:.60} is no {kind.__name__}"
    for name, check in parts:
        if found := check(getattr(value, name)):
            return ".".join(filter(None, (name, found[0]))), found[1]
    return None


def _any_of(checks: list[Check], value: Any) -> tuple[str, str] | None:
    found = [check(value) for check in checks]
    return None if None in found else found[0]


def _values(check: Check, value: Any) -> tuple[str, str] | None:
    return _plain(dict, value) or next((found for item in value.values() if (found := check(item))), None)


def _each(check: Check, value: Any) -> tuple[str, str] | None:
    if not isinstance(value, tuple):
        return "", f"{value!r:.60} is no list"
    return next((found for item in value if (found := check(item))), None)
