"""Studies are large: planning, collecting and resuming take seconds and never import torch.

CI runs a tenth of each, the whole size is ``slow``; the bars are the whole's.  What is counted is the process's
own CPU time, which is the wall time of a machine that does nothing else: each is one thread that waits for nobody.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.expand import expand
from bench.plan import plan
from bench.record import Record, records_dir, write

pytestmark = pytest.mark.alone

PROJECT = Path(__file__).resolve().parents[2]
TENTH_AND_WHOLE = [0.1, pytest.param(1.0, marks=pytest.mark.slow)]
# Runs a command's main in an interpreter of its own and tells what it took.
MEASURED = """
import json, resource, runpy, sys, time
code = 0
sys.argv = [sys.argv[1], *sys.argv[2:]]
try:
    runpy.run_module(sys.argv[0], run_name="__main__")
except SystemExit as end:
    code = end.code
took = time.process_time()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"code": code, "s": took, "bytes": peak, "torch": "torch" in sys.modules}), file=sys.stderr)
"""


def measured(module: str, *arguments: str) -> tuple[dict[str, float], str]:
    command = [sys.executable, "-c", MEASURED, module, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return json.loads(run.stderr.splitlines()[-1]), run.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("share", TENTH_AND_WHOLE)
def test_a_plan_of_100000_cells(share: float, tmp_path: Path) -> None:
    """Bar: 5 s, 1 GB."""
    seeds = ",".join(map(str, range(round(250 * share))))
    axes = ["library=torchgpipe,fairscale,deepspeed,torch", "stages=2,4", "micro_batches=1,2,4,8,16", "model=resnet18"]
    axes += ["checkpoint=never,always", "batch_size=16,32,64,128,256", f"seed={seeds}", "device=cpu", "baseline=false"]
    used, said = measured("bench.plan", "--json", *axes, f"results_dir={tmp_path}")
    assert used["code"] == 0
    assert len(said.splitlines()) == round(100_000 * share)
    assert not used["torch"]
    assert used["s"] < 5
    assert used["bytes"] < 1e9


def many(made_record: Callable[..., Record], results: Path, count: int) -> list[str]:
    """``count`` records of 30 steps and two stages, of the cells of the overrides that are returned."""
    axes = ["library=torchgpipe,fairscale,deepspeed,torch", "micro_batches=4,8", "device=cpu", "baseline=false"]
    axes += [f"seed={','.join(map(str, range(count // 8)))}", f"results_dir={results}"]
    first = made_record("first", times=tuple(0.5 + 0.001 * (7 * i % 10) for i in range(30)), partition=(2, 2))
    for number, cell in enumerate(plan(expand(axes))):
        made = {"run_id": f"run-{number:06}", "cell_id": cell.id, "hardware": cell.hardware, "factors": cell.factors}
        write(replace(first, **made), results)
    return axes


@pytest.mark.timeout(400)
@pytest.mark.parametrize("share", TENTH_AND_WHOLE)
def test_20000_records_become_csvs(share: float, made_record: Callable[..., Record], tmp_path: Path) -> None:
    """Bar: 20 s."""
    count = round(20_000 * share)
    many(made_record, tmp_path, count)
    used, said = measured("bench.collect", str(tmp_path))
    assert used["code"] == 0
    assert f"{tmp_path / 'runs.csv'}: {count} rows" in said
    assert not used["torch"]
    assert used["s"] < 20 * max(share, 0.2)  # a fifth: starting takes some of it


@pytest.mark.timeout(200)
def test_a_finished_sweep_of_1000_cells_is_resumed(made_record: Callable[..., Record], tmp_path: Path) -> None:
    """Bar: 3 s."""
    axes = many(made_record, tmp_path, 1000)
    assert measured("bench.collect", str(tmp_path))[0]["code"] == 0
    used, said = measured("bench.sweep", *axes)
    assert used["code"] == 0
    assert "1000 runs were done already: 1000 ok" in said
    assert not used["torch"]
    assert used["s"] < 3
    # What is missing or older than a record is made again.
    (tmp_path / "steps.csv").unlink()
    assert measured("bench.sweep", *axes)[0]["code"] == 0
    assert (tmp_path / "steps.csv").is_file()
    shutil.rmtree(records_dir(tmp_path))
