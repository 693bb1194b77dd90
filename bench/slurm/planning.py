"""The cells of a study that will run elsewhere, on devices that this host need not have, cut into array tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from bench.errors import UserError
from bench.expand import Sweep
from bench.factors import Settings
from bench.history import History
from bench.plan import Cell, gpus_needed, plan
from bench.slurm.options import Options
from bench.slurm.study import Needs, Run

__all__ = ["Split", "cells_of", "split"]

Split = tuple[dict[Needs, list[Run]], list[tuple[Cell, int]]]


def cells_of(sweep: Sweep, options: Options) -> list[Cell]:
    """The cells of a sweep as ``plan`` gives them, but for what only a node can tell: whether it has the devices.

    Raises UserError where no cell can run, or the device is left to be found out.
    """
    if any(f.device == "auto" for f in sweep.factors):
        raise UserError("device", "auto", "this host's devices are not the nodes'", "write device=cuda or device=cpu")
    cells = plan(replace(sweep, several=True), here=False)
    cells = [_within_a_node(cell, options) for cell in cells]
    if all(cell.problem for cell in cells):
        raise next(cell.problem for cell in cells if cell.problem)
    return cells


def _within_a_node(cell: Cell, options: Options) -> Cell:
    needed, there = gpus_needed(cell.factors), options.gpus_per_node
    if cell.problem is not None or there is None or needed <= there:
        return cell
    problem = UserError(
        "stages", cell.factors.stages, f"needs {needed} GPUs, a node has slurm.gpus_per_node={there}", "choose fewer"
    )
    return replace(cell, problem=problem)


def split(cells: Sequence[Cell], settings: Settings, options: Options) -> Split:
    """Runs by their numbers of nodes and GPUs, trials outermost, each with its array task; and those that cannot run.

    What is done already, on hardware such as this host's, is left out; what was done on a node's is skipped there.
    """
    history = History.read(settings.results_dir)
    limit_s = options.target_minutes * 60
    plans: dict[Needs, list[Run]] = defaultdict(list)
    impossible: list[tuple[Cell, int]] = []
    filled: dict[Needs, float] = defaultdict(float)
    for trial in settings.trials:
        for cell in cells:
            if history.skips((cell.id, trial, cell.hardware), settings.on_existing):
                continue
            if cell.problem is not None:
                impossible.append((cell, trial))
                continue
            needs = cell.factors.nodes, gpus_needed(cell.factors)
            runs = plans[needs]
            seconds = history.estimate_s(cell.id, cell.factors, cell.hardware) or options.seconds_per_cell
            task = runs[-1].task if runs else 0
            if options.cells_per_task is not None:
                task = len(runs) // options.cells_per_task
            elif runs and filled[needs] + seconds > limit_s:
                task, filled[needs] = task + 1, 0.0
            filled[needs] += seconds
            runs.append(Run(task=task, cell_id=cell.id, trial=trial, factors=cell.factors))
    return dict(sorted(plans.items())), impossible
