"""One rank of one job: ``python -m bench.worker JOB_FILE RANK MESSAGE_FD``, started by the launcher.

Whatever goes wrong is reported once, with the phase, and ends the process at once: a rank that
lingers would leave its peers hanging.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from pathlib import Path


def main(arguments: list[str], parent_pid: int | None = None) -> None:
    """Run the rank and leave the process without waiting for any library's threads.

    ``parent_pid``: whose death ends it, the job's parent unless given.
    """
    from bench.jobs import Job
    from bench.lifeline import die_with_parent

    job_file, rank, fd = arguments[0], int(arguments[1]), int(arguments[2])
    job = Job.loads(Path(job_file).read_text())
    die_with_parent(job.parent_pid if parent_pid is None else parent_pid)

    from bench.worker.channel import Channel

    channel = Channel(rank, fd)
    try:
        channel.phase("build")
        from bench.jobs import to_json

        run_rank = importlib.import_module(job.task).run_rank
        channel.result(to_json(run_rank(job, rank, channel)))
        code = 0
    except BaseException as error:
        from bench.worker.errors import describe

        # Before the traceback: where the log cannot be written, on a full disk, the reason is told all the same.
        channel.error(*describe(error))
        code = 1
        with contextlib.suppress(OSError):
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
