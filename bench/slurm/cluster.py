"""What is asked of SLURM, through its own commands, and how their answers read."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.errors import UserError

__all__ = ["ENDED", "JobState", "cancel", "job_states", "need", "requeue", "submit"]

TIMEOUT_S = 60.0
# States after which SLURM does nothing more for a job.
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT", "UNKNOWN"),
)


@dataclass(frozen=True, kw_only=True)
class JobState:
    """What SLURM says of one array task; ``UNKNOWN`` where it has forgotten the job."""

    state: str = "UNKNOWN"
    reason: str = ""

    @property
    def ended(self) -> bool:
        """Whether it will not run again by itself."""
        return self.state in ENDED

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else self.state


def need(command: str, remedy: str = "run this on the cluster's login node") -> None:
    """Raise UserError where a command of SLURM is missing."""
    if shutil.which(command) is None:
        raise UserError(command, "missing", "it is not on the PATH", remedy)


def _environment() -> Mapping[str, str]:
    """This environment; inside a job without what SLURM says of that one, which would count as options."""
    if "SLURM_JOB_ID" not in os.environ:
        return os.environ
    return {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}


def _ask(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, input=text, env=_environment(), capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "it says nothing")


def submit(script: str) -> str:
    """Submit a batch script; its job id.  Raises UserError with what sbatch says."""
    need("sbatch", "run this on the cluster's login node, or look at the scripts with submit --print")
    done = _ask(["sbatch", "--parsable"], script)
    if done.returncode != 0:
        lines = " ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines())
        raise UserError("sbatch", "refused", _first_line(lines), "mend slurm.*; submit --print shows the script")
    return done.stdout.strip().partition(";")[0]


def cancel(jobs: Sequence[str]) -> None:
    """Take back jobs."""
    if jobs:
        _ask(["scancel", *jobs])


def requeue(job: str) -> str:
    """Have SLURM run a job again; why it does not, empty where it does."""
    try:
        done = _ask(["scontrol", "requeue", job])
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else _first_line(done.stderr)


def job_states(jobs: Sequence[str]) -> dict[str, JobState]:
    """The state of every task of these arrays that SLURM knows, by ``array_task``.

    From the queue, which keeps ended jobs for a while, and from the accounting of those that it has
    forgotten, where the cluster keeps any.  Raises UserError where the queue cannot be asked.
    """
    if not jobs:
        return {}
    need("squeue")
    user = getpass.getuser()
    done = _ask(["squeue", "--noheader", "--array", "--states=all", f"--user={user}", "--format=%F|%K|%T|%r"])
    if done.returncode != 0:
        raise UserError("squeue", "failed", _first_line(done.stderr), "try again when the cluster answers")
    found = _accounted(jobs)
    for line in done.stdout.splitlines():
        job, task, state, reason = line.strip().split("|", 3)
        if job in jobs:
            found[f"{job}_{task}"] = JobState(state=state, reason="" if reason == "None" else reason)
    return found


def _accounted(jobs: Sequence[str]) -> dict[str, JobState]:
    """What sacct knows; nothing where there is no accounting."""
    if shutil.which("sacct") is None:
        return {}
    fields = "JobID,State,Reason,ExitCode"
    done = _ask(["sacct", "-n", "-P", "-X", "--array", f"--jobs={','.join(jobs)}", f"--format={fields}"])
    found = {}
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        name, state, reason, code = line.split("|", 3)
        # "CANCELLED by 1000" tells the user as well.
        if re.fullmatch(r"\d+_\d+", name):
            said = ", ".join(s for s in ("" if reason == "None" else reason, f"exit code {code}") if s)
            found[name] = JobState(state=state.partition(" ")[0], reason=said)
    return found


def exit_code(job: str) -> str:
    """``exit code CODE:SIGNAL`` of an ended job, empty where SLURM has forgotten it."""
    try:
        done = _ask(["scontrol", "--oneliner", "show", "job", job])
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"\bExitCode=(\d+:\d+)", done.stdout)
    return f"exit code {match[1]}" if match else ""
