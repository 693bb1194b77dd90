"""One run of one cell: claim, launch, record."""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench import claim, record
from bench.account import account, ideal_bubble
from bench.environment import describe
from bench.factors import Factors, Settings
from bench.gpu_watch import GpuWatch
from bench.hardware import Gpu, device_locks, visible_gpus
from bench.jobs import Job, Message, RankResult, StageResult, Status, to_json
from bench.launch import Interrupted, Outcome, launch
from bench.nodes import Node, free_port, own_facts
from bench.partition.rules import schedule_of
from bench.plan import Cell, gpus_needed, versions_of
from bench.record import Record, Step
from bench.registry import capabilities
from bench.traces import write_spans
from bench.warm import Start, fresh

__all__ = [
    "Busy",
    "Stopped",
    "bury_dead",
    "make_job",
    "run_cell",
    "unmeasured",
    "unsupported",
    "worker_environment",
]

_counter = itertools.count()


class Stopped(Interrupted):
    """An interrupted run whose ``record`` is written."""

    def __init__(self, stop: Interrupted, record: Record) -> None:
        super().__init__(stop.number, stop.outcome)
        self.record = record


# Spans of several hosts would be laid side by side by clocks that nobody has compared.
NO_TIMELINE = "no timeline and no account of lost time: the cell runs on several nodes, whose clocks differ"


class Busy(Exception):
    """Another process is running the cell right now."""


def _run_id(cell: Cell, trial: int) -> str:
    f = cell.factors
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
    parts = f"{f.library.name}-{f.model.name}-p{f.stages}-m{f.micro_batches}-{cell.id}-t{trial}"
    return re.sub(r"[^A-Za-z0-9_.-]", "_", f"{parts}-{now}-{os.getpid()}.{next(_counter)}")


def _gpus(cell: Cell, settings: Settings) -> tuple[Gpu, ...]:
    """The GPU of each stage on its node, in order, as this node has them; the first one for all where they share."""
    f = cell.factors
    if f.device != "cuda":
        return ()
    visible = visible_gpus()
    chosen = [visible[i] for i in settings.devices] if settings.devices is not None else list(visible)
    chosen = chosen[: gpus_needed(f)]
    return tuple(chosen[i % len(chosen)] for i in range(f.stages))


def _blank(cell: Cell, settings: Settings, trial: int, nodes: Sequence[Node] = ()) -> Record:
    can = capabilities(cell.factors.library)
    gpus = _gpus(cell, settings) if cell.problem is None else ()
    run_id = _run_id(cell, trial)
    overlap = cell.factors.device != "cpu" or can.overlap_on_cpu
    return Record(
        run_id=run_id,
        cell_id=cell.id,
        trial=trial,
        hardware=cell.hardware,
        status="interrupted",
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        factors=cell.factors,
        baseline=cell.baseline,
        partition=cell.partition,
        prediction=cell.prediction,
        settings={
            "warmup_steps": settings.warmup_steps,
            "steps": settings.steps,
            "timeout_s": settings.timeout_s,
            "wall_limit_s": settings.wall_limit_s,
            "preload": settings.preload,
            "devices": list(settings.devices) if settings.devices is not None else None,
        },
        overlap=overlap,
        notes=(*can.notes, *((NO_TIMELINE,) if cell.factors.nodes > 1 and settings.trace else ())),
        environment=_environment(cell.factors, gpus, nodes),
        log=f"logs/{run_id}.log",
    )


def _environment(factors: Factors, gpus: tuple[Gpu, ...], nodes: Sequence[Node]) -> dict[str, Any]:
    """As ``describe``; with what the other nodes say of themselves, and each stage's GPU on its own node."""
    found = describe(factors.library, gpus[: factors.stages // factors.nodes])
    if factors.nodes == 1 or not nodes:
        return found
    # In gpus' order on every node; a link to the next node is the network.
    own = found["gpus"]
    places = [g.index for g in gpus[: len(own)]]
    others = [[{k: node.facts.gpus[i][k] for k in own[0]} for i in places] for node in nodes]
    return {
        **found,
        "gpus": list(itertools.chain(own, *others)),
        "links": list(itertools.chain(found["links"], *(["network", *found["links"]] for _ in others))) if own else [],
        "nodes": [to_json(node.facts) for node in nodes],
    }


def unsupported(cell: Cell, settings: Settings, trial: int) -> Record:
    """Record a cell that cannot run, with its reason."""
    blank = _blank(cell, settings, trial)
    made = replace(blank, status="unsupported", fail_phase="plan", fail_reason=cell.reason, log="")
    record.write(made, settings.results_dir)
    return made


def unmeasured(cell: Cell, settings: Settings, trial: int, outcome: Outcome, what: str, log: Path) -> Record:
    """Record a cell whose partition could not be had since a process that was to measure for it failed."""
    made = replace(
        _blank(cell, settings, trial),
        status=outcome.status,
        fail_phase="plan",
        fail_reason=f"{what}: {outcome.fail_reason}",
        log=str(log.relative_to(settings.results_dir)),
    )
    record.write(made, settings.results_dir)
    return made


def bury_dead(results_dir: Path) -> list[Record]:
    """Turn the claims of processes that are gone into ``interrupted`` records."""
    with claim.lock(results_dir):
        return _bury_locked(results_dir)


def _bury_locked(results_dir: Path) -> list[Record]:
    buried = []
    for name, found in claim.dead(results_dir):
        if not (record.records_dir(results_dir) / f"{found.run_id}.json").exists():
            made = record.from_json(found.record)
            reason = f"its process {found.pid} on {found.host} is gone without a record"
            made = replace(made, status="interrupted", fail_reason=reason)
            record.write(made, results_dir)
            buried.append(made)
        claim.release(results_dir, name)
        shutil.rmtree(_folder(found.run_id), ignore_errors=True)
    return buried


def _folder(run_id: str) -> Path:
    """Where the run's ranks meet; named by the run, so that it goes with the claim of a process that was killed."""
    return Path(tempfile.gettempdir()) / f"bench-{run_id}"


def _double_key(cell: Cell) -> str:
    """What the float64 parity run depends on: everything but the clock, the data and the precision."""
    f = cell.factors
    parts = [
        asdict(f.library),
        asdict(f.model),
        [f.granularity, f.image_size, f.num_classes, f.stages, f.virtual_stages, f.seed],
        [f.micro_batches, min(2, f.batch_size // f.micro_batches), f.schedule, f.checkpoint],
        [f.device, f.share_devices, cell.hardware],
        list(cell.partition),
        versions_of(f.library),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _double_record(results_dir: Path, run_id: str) -> Record | None:
    try:
        return record.load(record.records_dir(results_dir) / f"{run_id}.json")
    except record.RecordError:
        return None


def run_cell(
    cell: Cell,
    settings: Settings,
    trial: int,
    on_message: Callable[[Message], None] | None = None,
    start: Start | None = None,
    nodes: Sequence[Node] = (),
) -> Record:
    """Run a valid cell and write its record, whatever happens; ``start`` starts its ranks, else ``warm.fresh``.

    ``nodes``: the others, at least as many as the cell asks for.  Raises Busy where another process
    holds the cell.  Stopped, where SIGINT or SIGTERM came, and an error of the harness itself, or of
    ``on_message``, pass through after the record is written.
    """
    nodes = nodes[: cell.factors.nodes - 1]
    blank = _blank(cell, settings, trial, nodes)
    name = f"{cell.id}-t{trial}-{cell.hardware}"
    with claim.lock(settings.results_dir):
        _bury_locked(settings.results_dir)  # another's process may have died since the sweep began
        holder = claim.take(settings.results_dir, name, claim.Claim.own(blank.run_id, to_json(blank)))
    if holder is not None:
        where = claim.claims_dir(settings.results_dir) / f"{name}.json"
        raise Busy(f"{name} is being run by process {holder.pid} on {holder.host}; if it is gone, remove {where}")
    try:
        made, stop = _run_claimed(cell, settings, blank, on_message, start or fresh, nodes)
    except BaseException as error:
        status: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
        reason = " ".join(f"the harness itself failed: {type(error).__name__}: {error}".split())
        _leave(replace(blank, status=status, fail_phase="plan", fail_reason=reason), settings.results_dir, name)
        raise
    made = _leave(made, settings.results_dir, name)
    if stop is not None:
        raise Stopped(stop, made) from None
    return made


def _leave(made: Record, results_dir: Path, name: str) -> Record:
    """Write the record and let its claim go; where the disk is full, the record is one without figures that says so,
    in the room that the claim had."""
    try:
        record.write(made, results_dir)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        blank = replace(made, steps=(), stages=(), parity=None, parity_double=None, account=None, trace="", resolved={})
        was = f"{made.status}{f' in {made.fail_phase}' if made.fail_phase else ''}: {made.fail_reason}".rstrip(": ")
        reason = f"the record could not be written: {error.strerror}; it was {was}"
        made = replace(blank, status="error", fail_phase=made.fail_phase or "plan", fail_reason=reason[:1000])
        claim.turn_into(
            results_dir, name, record.records_dir(results_dir) / f"{made.run_id}.json", json.dumps(to_json(made))
        )
        return made
    claim.release(results_dir, name)
    return made


@contextlib.contextmanager
def _meeting_place(run_id: str) -> Iterator[str]:
    folder = _folder(run_id)
    folder.mkdir(mode=0o700)
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_claimed(
    cell: Cell,
    settings: Settings,
    blank: Record,
    on_message: Callable[[Message], None] | None,
    start: Start,
    nodes: Sequence[Node],
) -> tuple[Record, Interrupted | None]:
    started = time.monotonic()
    stop = None
    double_run = f"parity-{_double_key(cell)}"
    known = _double_record(settings.results_dir, double_run)
    watch = GpuWatch(_gpus(cell, settings))
    log = settings.results_dir / blank.log
    modules = capabilities(cell.factors.library).modules

    def hear(message: Message) -> None:
        watch.hear(message)
        if on_message is not None:
            on_message(message)

    with _meeting_place(blank.run_id) as folder, watch:
        try:
            outcome = launch(
                _on_nodes(make_job(cell, settings, blank.run_id, folder, double=known is None), nodes),
                log,
                wall_limit_s=settings.wall_limit_s,
                environment=worker_environment(cell.factors),
                on_message=hear,
                start=start,
                others=[node.starter(modules, log, preload=settings.preload) for node in nodes],
            )
        except Interrupted as interrupted:
            outcome, stop = interrupted.outcome, interrupted
    made = _with_clocks(_finish(blank, outcome, time.monotonic() - started), watch)
    spans = [span for result in outcome.results for span in result.spans]
    if made.account is not None:
        made = replace(made, trace=f"traces/{made.run_id}.csv")
        write_spans(spans, settings.results_dir / made.trace)
    return _with_double(made, known, double_run, settings.results_dir), stop


def _on_nodes(job: Job, nodes: Sequence[Node]) -> Job:
    """The job as its ranks run on this node and these."""
    if not nodes:
        return job
    address = nodes[0].own_address
    return replace(
        job,
        nodes=len(nodes) + 1,
        store=f"{address}:{free_port()}",
        interface=own_facts(address).interface,
        trace=False,
    )


def worker_environment(factors: Factors) -> dict[str, str]:
    """The variables that the library needs in each process of the cell."""
    can = capabilities(factors.library)
    asked = {key: value.format(device=factors.device) for key, value in can.environment.items()}
    checkout = Path(__file__).resolve().parent.parent
    # An installed package leaves torch's own default, which is the user's cache folder.
    if "TORCH_EXTENSIONS_DIR" not in os.environ and (checkout / "pyproject.toml").exists():
        asked["TORCH_EXTENSIONS_DIR"] = str(checkout / ".cache" / "torch_extensions")
    return asked


def make_job(cell: Cell, settings: Settings, run_id: str, folder: str, *, double: bool) -> Job:
    """The job of a valid cell; ``folder`` is empty and holds the rendezvous, ``double`` asks for the
    float64 parity run."""
    gpus = _gpus(cell, settings)
    return Job(
        run_id=run_id,
        cell_id=cell.id,
        factors=cell.factors,
        partition=cell.partition,
        world_size=cell.world_size,
        warmup_steps=settings.warmup_steps,
        steps=0 if settings.steps == "auto" else settings.steps,
        target_ci=settings.target_ci,
        max_steps=settings.max_steps,
        device_indices=tuple(g.index for g in gpus),
        rendezvous=str(Path(folder) / "rendezvous"),
        cache_dir=str(settings.results_dir.resolve() / ".cache"),
        lock_paths=device_locks(cell.factors.device, gpus),
        double_parity=double,
        timeout_s=settings.timeout_s,
        parent_pid=os.getpid(),
        memory=settings.memory,
        trace=settings.trace,
    )


def _finish(blank: Record, outcome: Outcome, wall_s: float) -> Record:
    """The record of a run that ended as ``outcome``."""
    results = sorted(outcome.results, key=lambda r: r.rank)
    made = replace(
        blank,
        status=outcome.status,
        fail_phase=outcome.fail_phase,
        fail_reason=outcome.fail_reason,
        wall_s=wall_s - outcome.waited_s,
        waited_s=outcome.waited_s,
    )
    if not results or outcome.status != "ok":
        return made
    steps = _steps(results)
    first = results[0]
    made = replace(
        made,
        steps=steps,
        stages=_with_gpus(blank, sorted((s for r in results for s in r.stages), key=lambda s: s.stage)),
        phases={k: max(r.phases.get(k, 0.0) for r in results) for r in results for k in r.phases},
        resolved=_merged([r.read_back for r in results]),
        parity=first.parity,
        parity_double=first.parity_double,
        parity_unchecked=first.parity_unchecked,
        foreign_load=max((r.foreign_load for r in results if r.foreign_load is not None), default=None),
        fixed_cost_s=wall_s - outcome.waited_s - first.stepping_s,
    )
    return _judged(_traced(made, results))


def _traced(made: Record, results: list[RankResult]) -> Record:
    """The record with the account of its traced steps."""
    spans = [span for r in results for span in r.spans]
    traces = [r.trace for r in results if r.trace is not None]
    if not spans or not traces:
        return made
    f, serial = made.factors, not made.overlap and made.factors.stages > 1
    pipelined = capabilities(f.library).stages_are == "devices"
    found = account(
        spans,
        [max(times) for times in zip(*(t.step_times_s for t in traces), strict=True)],
        stages=f.stages,
        schedule=schedule_of(f) if pipelined else None,
        ideal=ideal_bubble(f.schedule, f.stages, f.virtual_stages, f.micro_batches, overlap=not serial)
        if pipelined
        else None,
        serial=serial,
    )
    return replace(made, account=found, stamp_cost_s=max(t.stamp_cost_s for t in traces))


def _judged(made: Record) -> Record:
    """A cell whose work was not equal is no result."""
    for part, result in (("a", made.parity), ("b", made.parity_double)):
        if result is not None and not result.passed:
            reason = (
                f"parity ({part}) in {result.precision}: gradient of layer {result.gradient_layer} differs by "
                f"{result.gradient_error:.2g} (allowed {result.gradient_tolerance:.2g}), update of layer "
                f"{result.update_layer} by {result.update_error:.2g} (allowed {result.update_tolerance:.2g})"
            )
            return replace(made, status="parity_failed", fail_phase="parity", fail_reason=reason, steps=())
    return made


def _with_double(made: Record, known: Record | None, run_id: str, results_dir: Path) -> Record:
    """Write the float64 parity as a record of its own, or take over the one that stands there."""
    if known is not None:
        if made.status == "ok":
            made = _judged(replace(made, parity_double=known.parity_double))
    elif made.parity_double is not None:
        own = replace(
            made,
            kind="parity",
            run_id=run_id,
            status="ok",
            fail_phase="",
            fail_reason="",
            parity=None,
            steps=(),
            stages=(),
            wall_s=None,
            fixed_cost_s=None,
            phases={},
        )
        record.write(_judged(own), results_dir)
    return replace(made, parity_double_run=run_id if made.parity_double is not None else "")


def _steps(results: list[RankResult]) -> tuple[Step, ...]:
    rows = []
    for same in zip(*(r.steps for r in results), strict=True):
        times = tuple(s.time_s for s in same)
        losses = [s.loss for s in same if s.loss is not None]
        rows.append(
            Step(
                index=same[0].index,
                warmup=same[0].warmup,
                time_s=max(times),
                rank_times_s=times,
                loss=sum(losses) / len(losses) if losses else None,
            )
        )
    return tuple(rows)


def _with_gpus(blank: Record, stages: list[StageResult]) -> tuple[StageResult, ...]:
    gpus = blank.environment["gpus"]
    if not gpus:
        return tuple(stages)
    return tuple(
        replace(s, device_uuid=gpus[s.stage]["uuid"], pci_address=gpus[s.stage]["pci_address"]) for s in stages
    )


def _with_clocks(made: Record, watch: GpuWatch) -> Record:
    seen = watch.seen()
    return replace(
        made,
        stages=tuple(
            replace(
                s,
                clock_low_mhz=seen[s.device_uuid].low_mhz,
                clock_high_mhz=seen[s.device_uuid].high_mhz,
                throttle_reasons=tuple(sorted(seen[s.device_uuid].throttled)),
            )
            if s.device_uuid in seen
            else s
            for s in made.stages
        ),
    )


def _merged(read_backs: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for found in read_backs:
        for key, value in found.items():
            merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return merged
