"""The balance rules: from a model's layers to the partition that every library then gets."""

from __future__ import annotations

from collections.abc import Sequence

from bench.errors import UserError
from bench.factors import Balance
from bench.partition.solver import min_max

__all__ = ["RULES", "partition"]

RULES = ("uniform", "parameters", "manual")


def partition(balance: Balance, parameters: Sequence[int], model_stages: int) -> tuple[int, ...]:
    """``model_stages`` numbers of layers; ``parameters`` counts each layer's numbers.

    ``uniform``: equal numbers of layers; where they do not divide, each of the earlier stages has
    one more than the later ones.  ``parameters``: the smallest possible largest stage by parameters,
    ties as in ``solver.min_max``.  ``manual``: ``balance.layers``, as given.  Raises UserError with
    the key ``stages`` (more stages than layers), ``balance.layers`` or ``balance`` (no such rule).
    """
    layers = len(parameters)
    if model_stages > layers:
        raise UserError("stages", model_stages, f"the model has {layers} layers", f"choose at most {layers}")
    if balance.name == "uniform":
        size, more = divmod(layers, model_stages)
        return tuple(size + (i < more) for i in range(model_stages))
    if balance.name == "parameters":
        return min_max(parameters, model_stages)
    if balance.name == "manual":
        return _manual(balance.layers, layers, model_stages)
    raise UserError("balance", balance.name, f"allowed are {', '.join(RULES)}", "choose one of them")


def _manual(asked: tuple[int, ...] | None, layers: int, model_stages: int) -> tuple[int, ...]:
    shown = "none" if asked is None else "[" + ",".join(map(str, asked)) + "]"
    remedy = f"give {model_stages} positive numbers that add up to {layers}"
    if asked is None:
        raise UserError("balance.layers", shown, "balance=manual needs its numbers of layers", remedy)
    if len(asked) != model_stages:
        raise UserError("balance.layers", shown, f"{len(asked)} numbers for {model_stages} stages", remedy)
    if min(asked) < 1:
        raise UserError("balance.layers", shown, "every stage needs at least one layer", remedy)
    if sum(asked) != layers:
        raise UserError("balance.layers", shown, f"adds up to {sum(asked)}, the model has {layers} layers", remedy)
    return asked
