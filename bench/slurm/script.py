"""The batch script of one array, made from ``conf/slurm/array.sh.j2``."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench.slurm.options import FOLDER, Options
from bench.slurm.study import Array, Study

__all__ = ["render"]


def render(study: Study, array: Array, options: Options) -> str:
    """The script; it runs this interpreter from the folder that the user stands in."""
    values = {
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "gres": options.gres.format(gpus=array.gpus) if options.gres and array.gpus else None,
        "cpus-per-task": options.cpus_per_task,
        "mem": options.memory,
    }
    asked = [f"--{key}={_word(str(value))}" for key, value in values.items() if value is not None]
    if options.exclusive:
        asked.append("--exclusive")
    # A module of the user's own, or this package where it is not installed, is found as it is here.
    kept = [key for key in ("PYTHONPATH", "PYTHONSAFEPATH") if os.environ.get(key)]
    environment = Environment(
        loader=FileSystemLoader(FOLDER), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    return environment.get_template("array.sh.j2").render(
        study=study.folder.name,
        nodes=array.nodes,
        gpus=array.gpus,
        name=f"bench-{study.folder.name}",
        count=array.count,
        first=array.first,
        max_running=options.max_running,
        # %% is a per cent sign in a path, %A and %a are the array's and the task's numbers.
        output=_word(str(study.folder / "logs").replace("%", "%%") + "/%A_%a.out"),
        folder=_word(str(Path.cwd())),
        time=_word(options.time),
        warn_s=options.warn_s,
        options=[*asked, *options.extra],
        exports=[f"export {key}={shlex.quote(os.environ[key])}" for key in kept],
        setup=options.setup,
        python=shlex.quote(sys.executable),
        plan=shlex.quote(str(study.folder / array.plan)),
    )


def _word(text: str) -> str:
    """A value as one word of an ``#SBATCH`` line."""
    return shlex.quote(text)
