"""The pictures of a traced step, and the mistakes of who asks for one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from bench.account import account
from bench.jobs import SpanResult
from bench.partition.simulate import Schedule
from bench.record import Record, write
from bench.traces import write_spans

PROJECT = Path(__file__).resolve().parents[2]
# Two stages, three micro-batches: forwards of 10 ms, backwards of 20 ms, an update of 5 ms.
SPANS = [
    SpanResult(step=step, stage=p, model_stage=p, kind=kind, micro_batch=k, start_s=start, end_s=start + length)
    for step in (0, 1)
    for p in (0, 1)
    for kind, k, start, length in [
        *(("forward", k, 0.01 * (k + p), 0.01) for k in range(3)),
        *(("backward", k, 0.04 + 0.02 * (k + 1 - p), 0.02) for k in range(3)),
    ]
]


def timeline(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.timeline", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(PROJECT), "PATH": "", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def results(tmp_path: Path, made_record: Callable[..., Record]) -> Path:
    found = account(
        SPANS, [0.12, 0.13], stages=2, schedule=Schedule(name="gpipe", micro_batches=3), ideal=0.25, serial=False
    )
    traced = made_record("traced-1", account=found, stamp_cost_s=1e-6, trace="traces/traced-1.csv")
    for record in (traced, made_record("traced-2", trace="traces/gone.csv"), made_record("untraced")):
        write(record, tmp_path / "results")
    write_spans(SPANS, tmp_path / "results" / "traces" / "traced-1.csv")
    return tmp_path / "results"


def test_it_draws_and_writes_a_trace_that_viewers_open(results: Path) -> None:
    done = timeline(results.parent, "traced-1")
    assert done.returncode == 0, done.stderr
    base = results / "traces" / "traced-1"
    with Image.open(base.with_suffix(".png")) as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24) or []}
    assert {(0x00, 0x72, 0xB2), (0x00, 0x9E, 0x73)} <= colours
    assert base.with_suffix(".svg").read_text().lstrip().startswith("<?xml")
    events = json.loads(base.with_suffix(".trace.json").read_text())["traceEvents"]
    bars = [e for e in events if e["ph"] == "X"]
    assert len(bars) == len(SPANS)
    assert {(e["tid"], e["name"]) for e in bars if e["pid"] == 0} == {
        (p, f"{kind} {k}") for p in (0, 1) for kind in ("forward", "backward") for k in range(3)
    }
    first = next(e for e in bars if e["name"] == "backward 0" and e["tid"] == 0)
    assert (first["ts"], first["dur"]) == (pytest.approx(60_000), pytest.approx(20_000))
    # What adds up to the step is printed with its share.
    assert "SYNTHETIC" in done.stdout
    shares = [float(line.split()[-2]) for line in done.stdout.splitlines() if line.endswith("%")]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert "bubble 0.250 (ideal 0.250)" in done.stdout


def test_a_record_may_be_named_by_its_file(results: Path) -> None:
    done = timeline(results.parent, str(results / "records" / "traced-1.json"), "step=1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["RUN", "python -m bench.timeline"]),
        (["traced"], ["RUN=traced", "2 runs", "run_id"]),
        (["nothing"], ["RUN=nothing", "no run"]),
        (["untraced"], ["untraced", "no trace", "trace=true"]),
        (["traced-2"], ["traced-2", "no trace"]),
        (["traced-1", "step=7"], ["step=7", "0 to 1"]),
    ],
)
def test_a_mistake_gets_one_line(results: Path, arguments: list[str], parts: list[str]) -> None:
    done = timeline(results.parent, *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    for part in parts:
        assert part in done.stderr
