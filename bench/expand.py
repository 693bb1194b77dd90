"""The one expansion of a sweep: Hydra composes once for each choice of config groups, and the product
of the plain values is formed here."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence

from bench.config import (
    GROUPS,
    Change,
    apply,
    compose_groups,
    exclusions,
    factor_value,
    from_tree,
    is_factor,
    parse,
    sweeper_params,
)
from bench.errors import UserError
from bench.factors import Factors, Settings

__all__ = ["Sweep", "expand"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """All points of a sweep in Hydra's order, its settings, and the keys that the user typed.

    ``several``: some key has several values, so it is no single cell.  ``excluded``: how many points the
    study's ``exclude`` has left out."""

    factors: list[Factors]
    settings: Settings
    typed: frozenset[str]
    several: bool
    excluded: int = 0


def expand(overrides: Sequence[str]) -> Sweep:
    """Expand the command line and the experiment's own axes (the command line's win)."""
    typed = parse(overrides)
    fixed = {c.key: str(c.values[0]) for c in typed if c.key in ("experiment", "local")}
    own = parse(sweeper_params(compose_groups(fixed)))
    keys = {c.key for c in typed}
    changes = [c for c in own if c.key not in keys] + [c for c in typed if c.key not in fixed]
    groups = [c for c in changes if c.key in GROUPS]
    plain = [c for c in changes if c.key not in GROUPS]
    _refuse_swept_settings(plain)
    trials = next((c.values for c in plain if c.key == "trial"), None)
    # Plain factors are replaced in the dataclass; what lies in a section goes through the tree.
    swept = [c for c in plain if len(c.values) > 1 and c.key != "trial"]
    direct = [c for c in swept if is_factor(c.key)]
    nested = [c for c in swept if not is_factor(c.key)]
    columns = [[factor_value(c.key, v) for v in c.values] for c in direct]
    names = [c.key for c in direct]
    result: list[Factors] = []
    settings = Settings()
    common = compose_groups(fixed)
    # A group's choice fills a section of its own, so one composition a choice serves all combinations.
    sections = {(c.key, str(v)): compose_groups({**fixed, c.key: str(v)})[c.key] for c in groups for v in c.values}
    for chosen in itertools.product(*(c.values for c in groups)):
        base = copy.deepcopy(common)
        for group, choice in zip(groups, chosen, strict=True):
            base[group.key] = copy.deepcopy(sections[group.key, str(choice)])
        for change in plain:
            if change not in nested:
                apply(base, change, change.values[0])
        for values in itertools.product(*(c.values for c in nested)):
            tree = copy.deepcopy(base)
            for change, value in zip(nested, values, strict=True):
                apply(tree, change, value)
            factors, settings = from_tree(tree)
            result += [factors.replace(**dict(zip(names, row, strict=True))) for row in itertools.product(*columns)]
    if trials is not None:
        for trial in trials:
            if type(trial) is not int or trial < 0:
                raise UserError("trial", trial, "must be a whole number from 0 on", "write trial=0,1,2")
        settings = dataclasses.replace(settings, trials=tuple(trials))
    several = any(len(c.values) > 1 for c in changes)
    excludes = exclusions(next((c.values[0] for c in plain if c.key == "exclude"), common["exclude"]))
    kept = [f for f in result if not any(excludes_it(f) for excludes_it in excludes)] if excludes else result
    if not kept:
        raise UserError("exclude", len(result), "leaves nothing of the study", "exclude less")
    return Sweep(
        factors=kept, settings=settings, typed=frozenset(keys), several=several, excluded=len(result) - len(kept)
    )


def _refuse_swept_settings(plain: Sequence[Change]) -> None:
    known = {f.name for f in dataclasses.fields(Settings)}
    for change in plain:
        if change.key in known and len(change.values) > 1:
            shown = ",".join(map(str, change.values))
            raise UserError(change.key, shown, "is a setting of the run and no factor", "give one value")
