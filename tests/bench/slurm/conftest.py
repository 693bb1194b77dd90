"""A cluster for each module, and a user's folder with the command that works with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.record import Record, load_all
from bench.slurm.study import load
from tests.bench.slurm.cluster import Cluster, missing

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
WAIT_S = 150.0


@pytest.fixture(scope="module")
def slurm(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A running cluster of as many nodes as the module's ``NODES``; its absence is a failure in CI, and a
    reason to skip elsewhere."""
    why = missing()
    if why:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    with Cluster(getattr(request.module, "NODES", 1)) as cluster:
        yield cluster


@dataclass(frozen=True)
class User:
    """Someone with a model of his own in ``folder``, at a cluster."""

    folder: Path
    cluster: Cluster

    @property
    def results(self) -> Path:
        """The results folder."""
        return self.folder / "results"

    def run(self, *arguments: str, code: int = 0) -> str:
        """What ``python -m bench.slurm`` prints; it must end with this code."""
        environment = {**self.cluster.environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "bench.slurm", *arguments], cwd=self.folder, env=environment,
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert done.returncode == code, said + self.logs()
        return said

    def submit(self, *behaviours: str, overrides: tuple[str, ...] = (), library: str = "single") -> str:
        """Submit a study of one cell for each behaviour; its folder."""
        cell = (
            *(f"library={library}", "model=custom", "model.target=gated.build", "device=cpu", "image_size=8"),
            *("num_classes=4", "batch_size=4", "micro_batches=2", "warmup_steps=1", "steps=2", "memory=false"),
            *("trace=false", "baseline=false", "slurm.exclusive=false", "slurm.time=10"),
        )
        return self.submit_cells(*cell, f"+model.behaviour={','.join(behaviours)}", *overrides)

    def submit_cells(self, *overrides: str) -> str:
        """Submit a study; its folder."""
        said = self.run("submit", *overrides)
        return next(line for line in said.splitlines() if line.startswith("study: ")).removeprefix("study: ")

    def job(self, study: str) -> str:
        """The job of the study's only task."""
        (array,) = load(Path(study)).arrays
        return array.key(0)

    def wait(self, what: Callable[[], object]) -> None:
        """Until it is so."""
        end = time.monotonic() + WAIT_S
        while not what():
            assert time.monotonic() < end, self.cluster.ask("squeue", "--states=all", "--array") + self.logs()
            time.sleep(0.2)

    def wait_until_over(self) -> None:
        """Until no job is left in the queue."""
        self.wait(lambda: not self.cluster.ask("squeue", "--noheader", "--states=PD,R,CG,S,RQ"))

    def records(self) -> dict[str, list[Record]]:
        """All records of cells by behaviour, in the order of their start."""
        found: dict[str, list[Record]] = {}
        records, errors = load_all(self.results)
        assert errors == []
        for r in sorted(records, key=lambda r: r.started_at):
            if r.kind == "cell":
                found.setdefault(str(dict(r.factors.model.options)["behaviour"]), []).append(r)
        return found

    def logs(self) -> str:
        """All that the tasks have printed."""
        return "\n".join(path.read_text() for path in self.results.glob("slurm/*/logs/*.out"))


@pytest.fixture
def user(slurm: Cluster, tmp_path: Path) -> User:
    """A user of the cluster, in a new folder whose name takes quoting."""
    folder = tmp_path / "it's 100% mine"
    folder.mkdir()
    (folder / "gated.py").write_text((HERE / "gated.py").read_text())
    return User(folder, slurm)
