"""The balance rules: from a model's layers to the partition that every library then gets."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from bench.errors import UserError
from bench.factors import Balance, Factors
from bench.partition.optimal import optimal
from bench.partition.profile import Profile
from bench.partition.simulate import Schedule
from bench.partition.solver import min_max, min_max_of

__all__ = ["NATIVE", "PROFILED", "RULES", "check", "max_memory_bytes", "partition", "schedule_of"]

RULES = ("uniform", "parameters", "flops", "time", "size", "optimal", "manual")
# Rules that need a profile, and of those the ones that look at the schedule.
PROFILED = ("flops", "time", "size", "optimal")
SCHEDULED = ("size", "optimal")
# Rules of a library's own begin so.
NATIVE = "native_"

_UNITS: dict[str, int] = {"": 1, "B": 1, **{f"{letter}iB": 1024 ** (i + 1) for i, letter in enumerate("KMGT")}}
_UNITS |= {f"{letter}B": 1000 ** (i + 1) for i, letter in enumerate(("k", "M", "G", "T"))}


def schedule_of(factors: Factors) -> Schedule | None:
    """The cell's schedule as the simulation knows it; None where it knows no such schedule.

    A partition may depend on the schedule but not on the library, so that a comparison of libraries
    hides none of balances: transfers overlap here, and gpipe's backwards run from the last
    micro-batch on.
    """
    if factors.virtual_stages != 1 or factors.schedule not in ("gpipe", "1f1b"):
        return None
    return Schedule(
        name=factors.schedule,  # type: ignore[arg-type]
        micro_batches=factors.micro_batches,
        checkpoint=factors.checkpoint,
    )


def max_memory_bytes(balance: Balance) -> float | None:
    """``balance.max_memory`` in bytes (a number, or text like 6GiB); None where there is no limit."""
    asked = next((value for key, value in balance.options if key == "max_memory"), None)
    if asked is None:
        return None
    match = re.fullmatch(r"([0-9.]+) ?([A-Za-z]*)", str(asked))
    try:
        if match is None or match[2] not in _UNITS or isinstance(asked, bool):
            raise ValueError
        limit = float(match[1]) * _UNITS[match[2]]
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise UserError("balance.max_memory", asked, "is no amount of memory", f"write bytes, or a unit of {units}")
    return limit


def check(factors: Factors) -> None:
    """Raise UserError for what is wrong with a balance before anything is measured for it."""
    balance = factors.balance
    if balance.name in SCHEDULED and schedule_of(factors) is None:
        raise UserError(
            "balance",
            balance.name,
            f"is predicted for gpipe and 1f1b with one virtual stage, not for schedule={factors.schedule} "
            f"virtual_stages={factors.virtual_stages}",
            "choose time, flops, parameters, uniform or manual",
        )
    max_memory_bytes(balance)


def partition(
    balance: Balance,
    parameters: Sequence[int],
    model_stages: int,
    *,
    profile: Profile | None = None,
    schedule: Schedule | None = None,
) -> tuple[int, ...]:
    """``model_stages`` numbers of layers; ``parameters`` counts each layer's numbers.

    ``uniform``: equal numbers of layers; where they do not divide, each of the earlier stages has
    one more than the later ones.  ``parameters``, ``flops``, ``time``, ``size``: the smallest
    possible largest stage by that cost, ties as in ``solver.min_max``; ``size`` is what a stage
    holds at its peak under ``schedule``, see ``predict.Problem.memory``.  ``optimal``: the shortest
    simulated step under ``schedule`` among those within ``balance.max_memory``.  ``manual``:
    ``balance.layers``, as given.  The rules of ``PROFILED`` need ``profile``.  Raises UserError with
    the key ``stages`` (more stages than layers), ``balance.layers``, ``balance.max_memory`` or
    ``balance`` (no such rule).
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
    if balance.name not in PROFILED:
        raise UserError("balance", balance.name, f"allowed are {', '.join(RULES)}", "choose one of them")
    if profile is None:
        raise ValueError(f"balance={balance.name} needs a profile")
    if balance.name in ("flops", "time"):
        return min_max(profile.costs(balance.name), model_stages)
    if schedule is None:
        raise ValueError(f"balance={balance.name} needs a schedule")
    problem = profile.problem(model_stages, schedule)
    if balance.name == "size":
        start, end = np.meshgrid(np.arange(layers + 1), np.arange(layers + 1), indexing="ij")
        return min_max_of([problem.memory(stage, start, end) for stage in range(model_stages)])
    return optimal(problem, max_memory_bytes(balance)).partition


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
