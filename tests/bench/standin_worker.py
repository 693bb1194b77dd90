"""A rank that does what it is told: ``STANDIN`` holds, for each rank, a list of actions as JSON (or
that for each library's name).

It talks to the launcher through the worker's own channel, without torch, so that a fault takes
milliseconds.  Each process it stands for leaves its id as a file in ``STANDIN_PIDS``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.jobs import Job, RankResult, StepResult, to_json
from bench.lifeline import die_with_parent
from bench.worker.channel import Channel


def _result(rank: int) -> RankResult:
    steps = (StepResult(index=0, warmup=False, time_s=0.5 + rank),)
    return RankResult(rank=rank, phases={"measure": 1.0}, steps=steps, stages=(), read_back={})


def _leave_id(pid: int) -> None:
    (Path(os.environ["STANDIN_PIDS"]) / str(pid)).touch()


def _do(job: Job, channel: Channel, fd: int, action: str, value: str) -> None:
    if action == "job":
        Path(value).write_text(job.dumps())
    elif action == "phase":
        channel.phase(value)
    elif action == "step":
        channel.step(int(value))
    elif action in ("alive", "waiting"):
        end = time.monotonic() + float(value)
        while time.monotonic() < end:
            channel.alive(action, waiting=action == "waiting")
            time.sleep(0.05)
    elif action == "large":
        channel.alive("x" * int(value))
    elif action == "sleep":
        time.sleep(float(value))
    elif action in ("error", "oom"):
        channel.error(action, value)
    elif action == "signal":
        os.kill(os.getpid(), signal.Signals[value])
    elif action == "exit":
        os._exit(int(value))
    elif action == "result":
        channel.result({**to_json(_result(channel.rank)), **json.loads(value or "{}")})
    elif action == "print":
        print(value, flush=True)
    elif action == "raw":
        os.write(fd, value.encode())
    elif action == "child":
        _leave_id(subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({value})"]).pid)
    elif action == "environment":
        kept = {**os.environ, "cores": ",".join(map(str, sorted(os.sched_getaffinity(0))))}
        Path(value).with_suffix(f".{channel.rank}").write_text(json.dumps(kept))
    else:
        raise ValueError(action)


def main(job_file: str, rank: int, fd: int) -> None:
    """Do the rank's actions, each ``name value``, one after the other."""
    job = Job.loads(Path(job_file).read_text())
    die_with_parent(job.parent_pid)
    _leave_id(os.getpid())
    channel = Channel(rank, fd)
    scripts = json.loads(os.environ["STANDIN"])
    if isinstance(scripts, dict):
        scripts = scripts[job.factors.library.name]
    for line in scripts[rank]:
        action, _, value = line.partition(" ")
        _do(job, channel, fd, action, value)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
