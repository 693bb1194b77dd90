"""Submit a study: plan it, freeze it, one array for each number of nodes and GPUs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace

from bench.errors import UserError
from bench.expand import expand
from bench.run import unsupported
from bench.slurm import cluster
from bench.slurm.options import Options, read_options
from bench.slurm.planning import cells_of, split
from bench.slurm.script import render
from bench.slurm.study import Array, Needs, Run, Study, create, plan_name, words
from bench.sweep import check_writable

__all__ = ["arrays_of", "submit_study"]


def arrays_of(plans: dict[Needs, list[Run]], max_array_size: int) -> list[Array]:
    """The arrays that make the plans' tasks, none larger than the limit."""
    made = []
    for needs, runs in plans.items():
        tasks = runs[-1].task + 1
        for first in range(0, tasks, max_array_size):
            count = min(max_array_size, tasks - first)
            made.append(Array(plan=plan_name(needs), nodes=needs[0], gpus=needs[1], first=first, count=count))
    return made


def submit_study(overrides: Sequence[str], *, only_print: bool) -> int:
    """Submit, or print the scripts.  Raises UserError; then nothing is left in the queue or on disk."""
    options, rest = read_options(overrides)
    sweep = expand(rest)
    settings = sweep.settings
    if not only_print:
        cluster.need("sbatch", "run this on the cluster's login node, or add --print to see the scripts")
        check_writable(settings.results_dir)
    plans, impossible = split(cells_of(sweep, options), settings, options)
    if only_print:
        settings = replace(settings, results_dir=settings.results_dir.resolve())
        folder = settings.results_dir / "slurm" / "STUDY"
        shown = Study(folder=folder, submitted_at="", settings=settings, max_requeues=options.max_requeues, arrays=())
        for array in arrays_of(plans, options.max_array_size):
            print(render(shown, array, options), end="")
        return 0
    for cell, trial in impossible:
        unsupported(cell, settings, trial)
    if not plans:
        print("nothing to submit: every run has a record; on_existing=retry_failed runs the failed ones again")
        return 0
    study = create(settings, options.max_requeues, plans, len(impossible))
    study = _submit(study, arrays_of(plans, options.max_array_size), options)
    for array in study.arrays:
        runs = sum(array.first <= run.task < array.first + array.count for run in plans[array.nodes, array.gpus])
        print(f"job {array.job}: {runs} runs on {words(array)} in {array.count} tasks")
    if impossible:
        print(f"{len(impossible)} runs cannot be made and have their record already")
    print(f"study: {study.folder}")
    print(f"python -m bench.slurm status {study.folder}")
    return 0


def _submit(study: Study, arrays: Sequence[Array], options: Options) -> Study:
    study.save()  # a task may start before the last array is submitted
    submitted: list[Array] = []
    try:
        for number, array in enumerate(arrays):
            script = render(study, array, options)
            (study.folder / f"array-{number}.sh").write_text(script)
            submitted.append(replace(array, job=cluster.submit(script)))
            study = replace(study, arrays=tuple(submitted))
            study.save()
    except UserError:
        cluster.cancel([array.job for array in submitted])
        if submitted:
            print(f"cancelled what was submitted: {', '.join(a.job for a in submitted)}", file=sys.stderr)
        else:
            shutil.rmtree(study.folder)
        raise
    return study
