"""A study as SLURM job arrays.

python -m bench.slurm submit [--print] OVERRIDES   plan the study and submit it; --print only shows the scripts
python -m bench.slurm status STUDY                 how many runs are done, running, pending, failed, lost
python -m bench.slurm collect STUDY                make records of what is lost, then the CSVs
python -m bench.slurm task PLAN INDEX              what an array task runs

OVERRIDES are those of python -m bench -m, and slurm.KEY=VALUE (see conf/slurm/default.yaml).  STUDY is the
folder that submit prints, or its name where results_dir=… (default: results) holds it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.__main__ import check_siblings
from bench.errors import UserError
from bench.place import place

COMMANDS = ("submit", "status", "collect", "task")


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0, 1 where runs failed or are lost, 2 for a user's mistake, 128 + N for a task ended by signal N."""
    if not arguments or any(a in ("-h", "--help") for a in arguments):
        print((__doc__ or "").strip())
        return 0
    try:
        check_siblings()
        command, *rest = arguments
        if command not in COMMANDS:
            raise UserError(command, "", f"allowed are {', '.join(COMMANDS)}", "see python -m bench.slurm --help")
        if command == "submit":
            from bench.slurm.array import submit_study

            _refuse_options(a for a in rest if a not in ("--print", "-m"))
            return submit_study([a for a in rest if a not in ("--print", "-m")], only_print="--print" in rest)
        if command == "task":
            return _task(rest)
        return _look(command, rest)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def _refuse_options(arguments: Iterable[str]) -> None:
    bad = next((a for a in arguments if a.startswith("-")), None)
    if bad is not None:
        raise UserError(bad, "", "there is no such option", "see python -m bench.slurm --help")


def _task(arguments: Sequence[str]) -> int:
    from bench.slurm.task import run_task

    if len(arguments) != 2 or not arguments[1].isdigit():
        raise UserError("task", " ".join(arguments), "takes a plan and a number", "it is called by an array's script")
    if not Path(arguments[0]).is_file():
        raise UserError("task", arguments[0], "there is no such plan", "it is called by an array's script")
    here = place()
    if here.index > 0:
        from bench.agent import serve

        return serve(here)
    return run_task(Path(arguments[0]), int(arguments[1]), here)


def _look(command: str, arguments: Sequence[str]) -> int:
    from bench.slurm.cluster import job_states
    from bench.slurm.lost import collect_study
    from bench.slurm.status import fates, summary
    from bench.slurm.study import find, load

    _refuse_options(arguments)
    places = [a.removeprefix("results_dir=") for a in arguments if a.startswith("results_dir=")]
    names = [a for a in arguments if not a.startswith("results_dir=")]
    if len(names) != 1:
        raise UserError(command, " ".join(names), "takes one study", f"write python -m bench.slurm {command} STUDY")
    study = load(find(names[0], Path(places[-1] if places else "results")))
    states = job_states([array.job for array in study.arrays])
    found = list(fates(study, states))
    if command == "status":
        print("\n".join(summary(study, found)))
    else:
        made, lines = collect_study(study, found)
        for record in made:
            print(f"{record.run_id}: {record.status}: {record.fail_reason}")
        for line in lines:
            print(line, file=sys.stderr)
        print(f"{len(made)} records made of lost runs; CSVs: {study.results_dir}/{{runs,stages,steps}}.csv")
    return 1 if any(fate.kind in ("failed", "lost") for fate in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
