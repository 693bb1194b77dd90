"""A made-up study with every way to end, several trials, several hardware, and hostile names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.account import Account, Lane
from bench.collect import collect
from bench.factors import Balance, Data, Factors, Model, Optimizer
from bench.jobs import ParityResult, SpanResult, StageResult, Status
from bench.partition.prediction import Prediction
from bench.record import Record, Step, write
from bench.registry import libraries
from bench.report.__main__ import report
from bench.traces import traces_dir, write_spans

MIB = 2**20
HOSTILE = '<script>alert("x")</script> & $x^2$ 50% a_b #1 {~} \\end{table} | `c`, "q" \'s\' é ß 日本 → [1] *\nnext line'
Build = Callable[..., Record]


def _parity() -> ParityResult:
    return ParityResult(
        precision="fp32",
        batch_size=8,
        steps=1,
        gradient_error=1e-7,
        gradient_layer=0,
        gradient_tolerance=1e-6,
        update_error=1e-6,
        update_layer=0,
        update_tolerance=2e-5,
        buffer_error=0.0,
        dropout_off=True,
        reference_device="cpu",
        passed=True,
    )


def _account(step_s: float, stages: int, known: bool) -> Account:
    ideal, bubble, imbalance, recompute, unexplained = (
        *(0.5 * step_s, 0.2 * step_s, 0.125 * step_s, 0.05 * step_s, 0.025 * step_s),
    )
    planned = bubble + imbalance + recompute
    return Account(
        step_time_s=step_s,
        bubble=1 - 1 / stages + 0.1 * (stages - 1),
        ideal_bubble=(stages - 1) / (stages + 3) if known else None,
        overlap=True,
        ideal_s=ideal,
        bubble_s=bubble if known else None,
        imbalance_s=imbalance if known else None,
        recompute_s=recompute if known else None,
        communication_s=step_s - ideal - unexplained - (planned if known else 0),
        unexplained_s=unexplained,
        lanes=tuple(Lane(stage=i, busy_s=ideal, idle_s=0.25 * step_s, waiting_s=0.0) for i in range(stages)),
    )


def build(
    library: str = "torch",
    *,
    times: Sequence[float] = (0.5, 0.4, 0.6),
    p: int = 2,
    m: int = 4,
    trial: int = 0,
    status: Status = "ok",
    traced: bool = True,
    balance: str = "uniform",
    partition: tuple[int, ...] | None = None,
    run_id: str = "",
    factors: dict[str, Any] | None = None,
    **more: Any,
) -> Record:
    """A made-up run whose measured steps took ``times`` seconds, after a warm-up of 9 s."""
    pipeline = library not in ("single", "ddp")
    known = libraries().get(library, libraries()["torch"])
    made = Factors(
        library=known,
        model=Model(name="resnet18", target="models.resnet.resnet18"),
        batch_size=8,
        micro_batches=m,
        stages=p,
        balance=Balance(name=balance),
        schedule="1f1b" if pipeline else "none",
        device="cpu",
    ).replace(**(factors or {}))
    cut = partition or ((2,) * p if pipeline else (2 * p,))
    failed = status != "ok"
    name = f"{made.library.name}-{made.model.name}-{made.device}-p{p}-m{m}-{balance}-{'.'.join(map(str, cut))}-t{trial}"
    stages = tuple(
        StageResult(
            stage=i,
            rank=i,
            device=made.device if made.device == "cpu" else f"cuda:{i}",
            layers=(i,),
            parameters=1000 + i,
            parameter_bytes=4000,
            dtype="float32",
            peak_allocated_bytes=(100 * (p - i) + 3 * trial + 7 * m) * MIB,
            peak_parameters_bytes=10 * MIB,
            peak_gradients_bytes=11 * MIB,
            peak_optimizer_state_bytes=12 * MIB,
            peak_placed_bytes=1 * MIB,
            peak_activations_bytes=(100 * (p - i) + 3 * trial + 7 * m - 34) * MIB,
        )
        for i in range(p)
    )
    prediction = Prediction(
        imbalance=1.0 + 0.1 * max(cut) / min(cut),
        stage_times_s=(0.1,) * p,
        stage_flops=(10**9,) * p,
        stage_forward_flops=(3 * 10**8,) * p,
        stage_parameters=(1000,) * p,
        boundary_bytes=(1,) * (p - 1),
        step_time_s=0.3,
    )
    fields: dict[str, Any] = {
        "run_id": run_id or f"{name}-{status}",
        "cell_id": f"cell-{name[: -len(f'-t{trial}')]}",
        "trial": trial,
        "synthetic": True,
        "hardware": "cpu-made-up",
        "status": status,
        "fail_phase": "measure" if failed else "",
        "fail_reason": f"made-up {status}" if failed else "",
        "started_at": f"2026-01-01T00:00:{trial:02d}+00:00",
        "factors": made,
        "partition": cut,
        "prediction": prediction if pipeline and p > 1 else None,
        "steps": tuple(
            Step(index=i, warmup=i == 0, time_s=t, rank_times_s=(t, t / 2), loss=1.0)
            for i, t in enumerate((9.0, *times))
        )
        if not failed
        else (),
        "stages": stages if not failed else (),
        "parity": _parity() if not failed else None,
        "parity_double": _parity() if not failed else None,
        "account": _account(1.01 * times[0], p, True) if traced and pipeline and not failed else None,
        "environment": {"versions": {"torch": "2.0"}, "host": "made-up", "git_commit": "abc", "git_dirty": False},
    }
    return Record(**{**fields, **more})


def _trials(n: int, seconds: float, library: str = "torch", **more: Any) -> list[Record]:
    """Repetitions that differ by a hundredth."""
    return [
        build(library, trial=i, times=[(seconds + 0.01 * i) * f for f in (1.0, 0.97, 1.04)], **more) for i in range(n)
    ]


def study() -> list[Record]:
    """See the module."""
    cuda = {"hardware": "cuda-made-up", "factors": {"device": "cuda"}}
    zbv = {"schedule": "zbv_zero_bubble", "virtual_stages": 2}
    records = [
        *_trials(5, 1.0, "single", p=1, m=1, baseline=True),
        *_trials(3, 1.1, "single", p=1),
        # Five trials each, clearly apart at p=4; with a second and a third micro-batch count.
        *_trials(5, 0.9, p=1),
        *_trials(7, 0.6, p=2),
        *_trials(5, 0.3, p=4),
        *_trials(2, 0.7, p=2, m=2),
        *_trials(1, 0.55, p=2, m=8, traced=False),
        # Balances, and a cell whose trials were cut in two ways.
        *_trials(3, 0.5, balance="parameters", partition=(3, 1)),
        *_trials(2, 0.45, balance="time", partition=(1, 3)),
        build(balance="time", partition=(2, 2), trial=2, times=(0.6, 0.6, 0.6)),
        # A line that must not cross the failed cell in its middle.
        *_trials(5, 0.95, "deepspeed", p=1),
        build("deepspeed", p=2, status="oom"),
        *_trials(5, 0.5, "deepspeed", p=4),
        # No overlap, one trial of enough steps for an interval.
        build("torchgpipe", times=[0.8 + 0.001 * i for i in range(9)], overlap=False),
        # Parity: one failed (though a careless program left steps), one not checked.
        build("fairscale", status="parity_failed", steps=build().steps, stages=build().stages),
        build("fairscale", p=4, parity=None, parity_double=None, parity_unchecked="the reference fits nowhere"),
        # One failed among others, one made good by a later run of the same trial, one never.
        *_trials(2, 0.8, "ddp", p=2),
        build("ddp", p=2, trial=2, status="error", partition=()),
        build("ddp", p=4, status="timeout", run_id="ddp-first", started_at="2025-01-01T00:00:00+00:00"),
        build("ddp", p=4),
        build("ddp", p=2, m=1, status="unsupported", fail_reason="m=1: must be a multiple of the 2 replicas"),
        build("ddp", p=8, status="interrupted"),
        # Its schedule is not simulated.
        build(p=2, account=_account(0.5, 2, False), run_id="zbv", factors=zbv),
        # Another hardware, without a baseline; another mini-batch.
        *[build(trial=i, times=(0.1 + 0.01 * i,), **cuda) for i in range(2)],
        build(times=(0.2, 0.3), factors={"batch_size": 16}, run_id="large-batch"),
    ]
    assert len({r.run_id for r in records}) == len(records)
    return records


def hostile() -> list[Record]:
    """Names that HTML, LaTeX, Markdown, CSV and a path could take for their own."""
    known = libraries()["torch"]
    odd = type(known)(name=HOSTILE, adapter="antigravity", options=(("key", HOSTILE),))
    factors = {
        "library": odd,
        "model": Model(name=f"_{HOSTILE}", target="../x"),
        "data": Data(name="imagefolder", path="/a b/$HOME"),
        "optimizer": Optimizer(lr=1e-3),
    }
    return [
        build(run_id='..%2f "<b>', factors=factors, hardware=f"cpu-{HOSTILE}"),
        build(run_id="nan", factors=factors, hardware=f"cpu-{HOSTILE}", m=8, status="error", fail_reason=HOSTILE),
        build(run_id="None", factors=factors, hardware=f"cpu-{HOSTILE}", m=2, traced=False),
    ]


def _spans(start_s: float) -> list[SpanResult]:
    """Two stages, four micro-batches, in three steps of which the second is as long as the account says."""
    spans = []
    for step, factor in enumerate((0.9, 1.0, 1.2)):
        for stage in range(2):
            for k in range(4):
                begin = start_s + (k + stage) * 0.05 * factor
                for kind, offset, length in (("forward", 0.0, 0.04), ("backward", 0.25, 0.04)):
                    at = begin + offset * factor
                    spans.append(
                        SpanResult(
                            step=step,
                            stage=stage,
                            model_stage=stage,
                            kind=kind,
                            micro_batch=k,
                            start_s=at,
                            end_s=at + length * factor,
                        )
                    )
    return spans


def write_study(folder: Path, records: Sequence[Record]) -> Path:
    """Records, their CSVs, and a trace for each run with an account and two stages."""
    for record in records:
        write(record, folder)
        if record.account is not None and record.factors.stages == 2 and "/" not in record.run_id:
            write_spans(_spans(0.01), traces_dir(folder) / f"{record.run_id}.csv")
    _, lines = collect(folder)
    assert lines == []
    return folder


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study's folder, with its report."""
    folder = write_study(tmp_path_factory.mktemp("study"), study())
    _, bad = report(folder)
    assert bad == []
    return folder


@pytest.fixture(scope="session")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hostile study's folder, with its report."""
    folder = write_study(tmp_path_factory.mktemp("odd"), hostile())
    report(folder)
    return folder
