"""Build a model from its factor: seeded, on the CPU, in any dtype."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import nn

from bench.errors import UserError
from bench.factors import Model

__all__ = ["build_model"]

_REMEDY = "give model.target=package.module.function, a function that returns a flat nn.Sequential"


def build_model(model: Model, *, granularity: str, num_classes: int, seed: int, dtype: torch.dtype) -> nn.Sequential:
    """The model with the weights that ``seed`` gives it in float32, cast to ``dtype``.

    A user's own function gets ``granularity`` and ``num_classes`` where its signature takes them,
    and the model's options.  Raises UserError where it cannot be imported or called, or returns
    anything but a non-empty ``nn.Sequential`` without in-place layers.
    """
    module_name, _, function_name = model.target.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError("model.target", model.target, f"cannot be imported ({error})", _REMEDY) from error
    options: dict[str, Any] = dict(model.options)
    takes = inspect.signature(function).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    for key, value in {"granularity": granularity, "num_classes": num_classes}.items():
        if key in takes or anything:
            options[key] = value
    unknown = [] if anything else sorted(set(options) - set(takes))
    if unknown:
        raise UserError(
            f"model.{unknown[0]}",
            options[unknown[0]],
            f"{model.target} takes only {', '.join(takes) or 'nothing'}",
            f"remove model.{unknown[0]}",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = function(**options)
    return _check(model, built).to(dtype)


def _check(model: Model, built: object) -> nn.Sequential:
    if not isinstance(built, nn.Sequential) or len(built) == 0:
        raise UserError(
            "model.target", model.target, f"returned {type(built).__name__}, not a non-empty nn.Sequential", _REMEDY
        )
    for index, layer in enumerate(built):
        # A stage may start with any layer, and its input must not be overwritten.
        if getattr(layer, "inplace", False):
            raise UserError(
                "model.target",
                model.target,
                f"layer {index} ({type(layer).__name__}) works in place, which no pipeline stage may start with",
                "build it with inplace=False",
            )
    return built
