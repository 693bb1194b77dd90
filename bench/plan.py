"""From factors to cells: normalised, identified, checked, cut.

``python -m bench.plan OVERRIDES`` shows what a sweep would run, without running it.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib.metadata
import json
import sys
import typing
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path

from adapters.protocol import Capabilities, ScheduleRule
from bench.errors import UserError
from bench.expand import Sweep, expand
from bench.factors import Balance, Data, Factors, Library, Optimizer, Settings
from bench.hardware import fingerprint, visible_gpus
from bench.partition.prediction import Prediction
from bench.partition.profile import Profile, profile_key, profile_path, read_profile
from bench.partition.rules import NATIVE, PROFILED, check, partition, schedule_of
from bench.partition.simulate import Schedule
from bench.place import place
from bench.registry import capabilities, libraries
from models.table import layer_table, source_hash

__all__ = [
    "Cell",
    "cell_id",
    "cut",
    "gpus_needed",
    "known_profile",
    "make_cell",
    "native_path",
    "normalise",
    "plan",
    "profile_file",
]

# What a factor without meaning for a library is set to, so that such a cell appears once.
_NO_PIPELINE = {
    "virtual_stages": 1,
    "balance": Balance(name="uniform"),
    "schedule": "none",
    "checkpoint": "never",
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of the factors, normalised.

    ``partition``: p·v numbers of layers (the whole model in one for libraries without a pipeline);
    empty for a valid cell whose balance must be measured first.  ``prediction``: what a profile says
    of the partition; ``resolve.resolve`` adds both.  ``problem``: why it cannot run, None for a
    valid cell.
    """

    factors: Factors
    id: str
    partition: tuple[int, ...]
    world_size: int
    baseline: bool
    hardware: str
    prediction: Prediction | None = None
    problem: UserError | None = None

    @property
    def reason(self) -> str:
        """Why it cannot run, in one line; empty for a valid cell."""
        return str(self.problem) if self.problem else ""


@functools.cache
def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def normalise(factors: Factors) -> Factors:
    """Resolve device and schedule and fix the factors that mean nothing for the library."""
    can = capabilities(factors.library)
    changes: dict[str, object] = {}
    if factors.device == "auto":
        changes["device"] = "cuda" if visible_gpus() else "cpu"
    if can.stages_are == "devices":
        if factors.schedule == "native":
            changes["schedule"] = can.schedules[0].name
    else:
        changes |= _NO_PIPELINE
        if can.stages_are == "none":
            changes["stages"] = 1
            changes["nodes"] = 1
    if all(getattr(factors, key) == value for key, value in changes.items()):
        return factors
    return factors.replace(**changes)


def cell_id(factors: Factors, versions: dict[str, str | None]) -> str:
    """12 hex digits of the hash of the normalised factors and the versions; the same on every host."""
    values = vars(factors)
    texts = [f'"{name}":{_section(values[name]) if nested else _scalar(values[name])}' for name, nested in _FIELDS]
    return hashlib.sha256(f"[{{{','.join(texts)}}},{_versions(tuple(versions.items()))}]".encode()).hexdigest()[:12]


# Every field in the order of its name, and whether it is a section.
_FIELDS = sorted((name, is_dataclass(kind)) for name, kind in typing.get_type_hints(Factors).items())
# By identity, since 1, 1.0 and True are equal and their texts are not; the sections of a sweep are shared
# by its cells.  The object is kept beside its text, so that no other can get its number.
_sections: dict[int, tuple[object, str]] = {}


def _section(value: object) -> str:
    known = _sections.get(id(value))
    if known is None:
        known = _sections[id(value)] = value, _compact(asdict(value))  # type: ignore[call-overload]
    return known[1]


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


@functools.cache
def _versions(items: tuple[tuple[str, str | None], ...]) -> str:
    return _compact(dict(items))


_scalar = functools.lru_cache(maxsize=4096, typed=True)(_compact)


@functools.lru_cache
def versions_of(library: Library) -> dict[str, str | None]:
    """The versions that enter a cell's id: torch's and the library's."""
    can = capabilities(library)
    names = ["torch", *([can.distribution] if can.distribution else [])]
    return {name: _version(name) for name in names}


@functools.lru_cache
def _cache_dir(results_dir: Path) -> Path:
    return results_dir / ".cache"


@functools.lru_cache(maxsize=4096)
def _parameters(model_key: tuple[object, str, int], cache_dir: Path) -> tuple[int, ...]:
    model, granularity, num_classes = model_key
    table = layer_table(model, granularity=granularity, num_classes=num_classes, cache_dir=cache_dir)  # type: ignore[arg-type]
    return tuple(layer.parameters for layer in table)


@functools.lru_cache(maxsize=4096)
def _cut(model_key: tuple[object, str, int], balance: Balance, model_stages: int, cache_dir: Path) -> tuple[int, ...]:
    return partition(balance, _parameters(model_key, cache_dir), model_stages)


def profile_file(factors: Factors, results_dir: Path) -> Path:
    """Where the profile of a normalised cell lies or will lie."""
    key = profile_key(
        factors, source_hash(factors.model.target), _fingerprint(factors.device), _version("torch") or "none"
    )
    return profile_path(key, results_dir)


def known_profile(factors: Factors, results_dir: Path) -> Profile | None:
    """The profile of a normalised cell, where it has been measured."""
    path = profile_file(factors, results_dir)
    return _read(path, path.stat().st_mtime_ns) if path.exists() else None


@functools.lru_cache(maxsize=256)
def _read(path: Path, written_ns: int) -> Profile:
    try:
        return read_profile(path)
    except ValueError as error:
        raise UserError("profile", path, f"is none ({error})", "remove the file; it is measured again") from None


def native_path(factors: Factors, results_dir: Path) -> Path:
    """Where the partition of a library's own routine is kept, so that all trials run the same one."""
    same = factors.replace(seed=0, optimizer=Optimizer(), data=Data(), schedule="", checkpoint="never")
    parts = [
        cell_id(same, versions_of(factors.library)),
        source_hash(factors.model.target),
        _fingerprint(factors.device),
    ]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
    return results_dir / ".cache" / "native" / f"{digest}.json"


def cut(factors: Factors, results_dir: Path) -> tuple[int, ...]:
    """The partition of a normalised cell of a pipeline library.

    Empty where its profile, or the library's own partition, must be measured first.
    """
    check(factors)
    balance, stages = factors.balance, factors.stages * factors.virtual_stages
    model_key = (factors.model, factors.granularity, factors.num_classes)
    if balance.name.startswith(NATIVE):
        path = native_path(factors, results_dir)
        picked = tuple(json.loads(path.read_text())) if path.exists() else ()
        if picked and (len(picked) != stages or min(picked) < 1):
            shown = "-".join(map(str, picked))
            raise UserError(
                "balance",
                balance.name,
                f"the library's own routine picked {shown} for {stages} stages: one is empty",
                "choose fewer stages or another balance",
            )
        return picked
    if balance.name not in PROFILED:
        return _cut(model_key, balance, stages, _cache_dir(results_dir))
    profile = known_profile(factors, results_dir)
    return _cut_profiled(profile, balance, schedule_of(factors), stages) if profile is not None else ()


@functools.lru_cache(maxsize=4096)
def _cut_profiled(profile: Profile, balance: Balance, schedule: Schedule | None, model_stages: int) -> tuple[int, ...]:
    counts = tuple(layer.parameters for layer in profile.layers)
    return partition(balance, counts, model_stages, profile=profile, schedule=schedule)


def _problem(factors: Factors, can: Capabilities, settings: Settings) -> tuple[str, str, str] | None:
    """(key, reason, remedy) of what keeps the normalised cell from running."""
    p, m = factors.stages, factors.micro_batches
    if can.distribution and _version(can.distribution) is None:
        return (
            "library",
            f"{can.distribution} is not installed",
            f"pip install 'pipeline-bench[{can.extra}]'",
        )
    if factors.batch_size % m:
        return "micro_batches", f"must divide batch_size={factors.batch_size}", "choose a divisor"
    if can.stages_are == "replicas" and m % p:
        return "micro_batches", f"must be a multiple of the {p} replicas", f"choose a multiple of {p}"
    if factors.nodes > 1 and not can.several_nodes:
        return "nodes", "the library runs in one process, on one node", "choose nodes=1"
    if p % factors.nodes:
        return "nodes", f"must divide stages={p}", "choose a divisor"
    if factors.precision not in can.precisions:
        return "precision", f"allowed are {', '.join(can.precisions)}", "choose one of them"
    if factors.precision == "tf32" and factors.device == "cpu":
        return "precision", "there is no TF32 on a CPU", "choose fp32"
    if can.stages_are == "devices" and (found := _schedule_problem(factors, can) or _native_problem(factors, can)):
        return found
    if factors.data.path is not None and not Path(factors.data.path).is_dir():
        return "data.path", f"there is no folder {factors.data.path}", "give the folder of the data set"
    return None


def _schedule_problem(factors: Factors, can: Capabilities) -> tuple[str, str, str] | None:
    p, v, m = factors.stages, factors.virtual_stages, factors.micro_batches
    names = [rule.name for rule in can.schedules]
    rule: ScheduleRule | None = next((r for r in can.schedules if r.name == factors.schedule), None)
    if rule is None:
        return "schedule", f"the library offers {', '.join(names)}", "choose one of them"
    if rule.virtual_stages is None:
        if v < 2:
            return "virtual_stages", f"schedule={rule.name} needs at least 2", "choose virtual_stages=2"
    elif v not in rule.virtual_stages:
        allowed = " or ".join(map(str, rule.virtual_stages))
        return "virtual_stages", f"schedule={rule.name} allows {allowed}", f"choose {allowed}"
    if p < rule.min_stages:
        return "stages", f"schedule={rule.name} needs at least {rule.min_stages}", "choose more stages"
    least = {"one": 1, "stages": p, "model_stages": p * v}[rule.min_micro_batches]
    if m < least:
        return "micro_batches", f"schedule={rule.name} needs at least {least} here", f"choose {least} or more"
    if rule.whole_rounds and m % max(1, m // p):
        return (
            "micro_batches",
            f"schedule={rule.name} needs a multiple of its {max(1, m // p)} rounds",
            f"choose a multiple of stages={p}",
        )
    if factors.checkpoint not in can.checkpoints or factors.checkpoint not in rule.checkpoints:
        why = can.reasons.get(f"checkpoint={factors.checkpoint}") or can.reasons.get("checkpoint", "")
        allowed = ", ".join(c for c in can.checkpoints if c in rule.checkpoints)
        return "checkpoint", f"the library allows {allowed}" + (f" ({why})" if why else ""), "choose one of them"
    return None


def _native_problem(factors: Factors, can: Capabilities) -> tuple[str, str, str] | None:
    name = factors.balance.name
    if not name.startswith(NATIVE):
        return None
    own = [f"{NATIVE}{rule}" for rule, devices in can.native_balances.items() if factors.device in devices]
    if name in own:
        return None
    offers = f"the library's own on {factors.device} are {', '.join(own)}" if own else "the library has no routine"
    why = can.reasons.get(f"balance={name}", "")
    return "balance", offers + (f" ({why})" if why else ""), f"choose {' or '.join([*own, 'time', 'optimal'])}"


def _problem_here(factors: Factors, settings: Settings) -> tuple[str, str, str] | None:
    """(key, reason, remedy) of what this command's own node or nodes lack."""
    count, nodes = len(visible_gpus()), place().count
    if factors.nodes > nodes:
        return (
            "nodes",
            f"this command runs on {nodes}",
            "start it by srun --ntasks-per-node=1 or torchrun --nproc-per-node=1, or submit it with bench.slurm",
        )
    if factors.device != "cuda":
        return None
    stages = factors.stages // factors.nodes
    on_each = " on each node" if factors.nodes > 1 else ""
    if settings.devices is not None:
        bad = [d for d in settings.devices if not 0 <= d < count]
        if bad:
            return "devices", f"there is no GPU {bad[0]}; {count} are visible", "choose among them"
        if len(settings.devices) < stages and not factors.share_devices:
            return "devices", f"{stages} stages{on_each} need as many GPUs", "name more GPUs"
        if len(set(settings.devices)) < len(settings.devices) and not factors.share_devices:
            return "devices", "a GPU is named twice", "set share_devices=true if that is meant"
    elif count == 0:
        return "device", "no GPU is visible", "choose device=cpu"
    elif count < stages and not factors.share_devices:
        return "stages", f"needs {stages} GPUs{on_each}, {count} are visible", "choose fewer, or share_devices=true"
    return None


def _shown(factors: Factors, settings: Settings, key: str) -> object:
    """The value that stands at a dotted key."""
    value: object = settings if hasattr(settings, key) else factors
    for part in key.split("."):
        value = getattr(value, part)
    return getattr(value, "name", value)


def _check(factors: Factors, can: Capabilities, settings: Settings, *, here: bool) -> tuple[int, ...]:
    """The partition of a cell that can run, as in ``cut``; raises UserError for one that cannot."""
    model_key = (factors.model, factors.granularity, factors.num_classes)
    cache = _cache_dir(settings.results_dir)
    layers = len(_parameters(model_key, cache))
    if can.stages_are == "devices" and factors.stages * factors.virtual_stages > layers:
        raise UserError(
            "stages",
            factors.stages,
            f"{factors.model.name} at granularity={factors.granularity} has {layers} layers for "
            f"{factors.stages * factors.virtual_stages} stages",
            "choose fewer stages or granularity=op",
        )
    problem = _problem(factors, can, settings) or (_problem_here(factors, settings) if here else None)
    if problem is not None:
        raise UserError(problem[0], _shown(factors, settings, problem[0]), *problem[1:])
    return cut(factors, settings.results_dir) if can.stages_are == "devices" else (layers,)


def make_cell(factors: Factors, settings: Settings, *, here: bool = True) -> Cell:
    """The cell of normalised factors, whether it can run or not: ``here``, or on nodes that have the devices."""
    can = capabilities(factors.library)
    picked: tuple[int, ...] = ()
    problem = None
    try:
        picked = _check(factors, can, settings, here=here)
    except UserError as error:
        problem = error
    return Cell(
        factors=factors,
        id=cell_id(factors, versions_of(factors.library)),
        partition=picked,
        world_size=factors.stages if can.ranks == "per_stage" else 1,
        baseline=can.stages_are == "none" and factors.micro_batches == 1,
        hardware=_fingerprint(factors.device),
        problem=problem,
    )


@functools.cache
def _fingerprint(device: str) -> str:
    return fingerprint(device, visible_gpus() if device == "cuda" else ())


def _baseline_of(factors: Factors) -> Factors | None:
    plain = next((lib for lib in libraries().values() if capabilities(lib).stages_are == "none"), None)
    if plain is None:
        return None
    return normalise(factors.replace(library=plain, micro_batches=1, share_devices=False))


def plan(sweep: Sweep, *, here: bool = True) -> list[Cell]:
    """The cells of a sweep, each once, the missing baselines first; ``here`` as for ``make_cell``.

    A single cell that cannot run raises its reason as UserError; in a sweep it stays as a cell with
    its reason, unless no cell at all can run.
    """
    settings = sweep.settings
    if not sweep.several:
        _refuse_meaningless(sweep)
    wanted = dict.fromkeys(normalise(f) for f in sweep.factors)
    cells = [make_cell(f, settings, here=here) for f in wanted]
    if sweep.several and settings.baseline:
        cells = [*_missing_baselines(cells, settings, here=here), *cells]
    if all(cell.problem for cell in cells) and cells:
        raise next(cell.problem for cell in cells if cell.problem)
    return cells


def _missing_baselines(cells: Sequence[Cell], settings: Settings, *, here: bool) -> list[Cell]:
    have = {cell.factors for cell in cells}
    needed = dict.fromkeys(b for cell in cells if not cell.problem and (b := _baseline_of(cell.factors)))
    return [cell for f in needed if f not in have and not (cell := make_cell(f, settings, here=here)).problem]


def _refuse_meaningless(sweep: Sweep) -> None:
    """A factor typed for a library that knows no such thing is a mistake, when it is the only cell."""
    factors = sweep.factors[0]
    fixed = normalise(factors)
    for key in ("stages", "virtual_stages", "schedule", "checkpoint", "nodes"):
        asked = getattr(factors, key)
        if key in sweep.typed and asked != getattr(fixed, key) and asked != "native":
            raise UserError(
                key,
                asked,
                f"has no meaning for library={factors.library.name}",
                f"leave it out, or choose another library ({', '.join(sorted(libraries()))})",
            )


def gpus_needed(factors: Factors) -> int:
    """GPUs that a normalised cell takes on each node."""
    if factors.device != "cuda":
        return 0
    return 1 if factors.share_devices else factors.stages // factors.nodes


def _rows(cells: Iterable[Cell], settings: Settings) -> Iterable[dict[str, object]]:
    from bench.history import History

    history = History.read(settings.results_dir)
    for cell in cells:
        f = cell.factors
        keys = [(cell.id, trial, cell.hardware) for trial in settings.trials]
        todo = 0 if cell.problem else sum(not history.skips(key, settings.on_existing) for key in keys)
        seconds = history.estimate_s(cell.id, f, cell.hardware) if todo else 0.0
        yield {
            "id": cell.id,
            "library": f.library.name,
            "model": f.model.name,
            "stages": f.stages,
            "virtual_stages": f.virtual_stages,
            "micro_batches": f.micro_batches,
            "balance": f.balance.name,
            "partition": "-".join(map(str, cell.partition)) or ("" if cell.problem else "to be measured"),
            "schedule": f.schedule,
            "checkpoint": f.checkpoint,
            "precision": f.precision,
            "device": f.device,
            "gpus": gpus_needed(f),
            "trials": len(settings.trials),
            "done": len(keys) - todo if not cell.problem else 0,
            "estimated_s": None if seconds is None else round(seconds * todo),
            "reason": cell.reason,
        }


def main(arguments: Sequence[str]) -> int:
    """Print the plan as a table, or with ``--json`` as JSON lines."""
    if any(a in ("-h", "--help") for a in arguments):
        print((__doc__ or "").strip())
        return 0
    as_json = "--json" in arguments
    gc.disable()  # a large plan makes a million objects, none of which goes before the end: a third of its time
    try:
        sweep = expand([a for a in arguments if a not in ("--json", "-m")])
        cells = plan(replace(sweep, several=True))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    rows = list(_rows(cells, sweep.settings))
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return 0
    from rich.console import Console
    from rich.table import Table

    # What is the same in all rows goes to the title.
    fixed = ("id", "library", "model", "stages", "micro_batches", "partition", "done", "reason")
    same = [k for k in rows[0] if k not in fixed and len({row[k] for row in rows}) == 1]
    table = Table(
        *(k for k in rows[0] if k not in same), title=" ".join(f"{k}={rows[0][k]}" for k in same), title_justify="left"
    )
    for row in rows:
        row = {key: "?" if value is None else value for key, value in row.items()}
        table.add_row(*(str(value) for key, value in row.items() if key not in same))
    Console(width=None if sys.stdout.isatty() else 190).print(table)
    print(_totals(cells, rows, sweep))
    return 0


def _totals(cells: Sequence[Cell], rows: Sequence[dict[str, object]], sweep: Sweep) -> str:
    valid = sum(not cell.problem for cell in cells)
    runs = valid * len(sweep.settings.trials)
    known = [float(str(r["estimated_s"])) for r in rows if r["estimated_s"] is not None]
    unknown = len(rows) - len(known)
    time = f"about {sum(known) / 60:.0f} min" if sum(known) > 120 else f"about {sum(known):.0f} s"
    if unknown:
        time = f"time not known for {unknown} cells, of whose workload nothing has been run yet" + (
            f", {time} for the others" if sum(known) else ""
        )
    gpus = max(int(str(r["gpus"])) for r in rows)
    excluded = f", {sweep.excluded} excluded" if sweep.excluded else ""
    done = sum(int(str(r["done"])) for r in rows)
    return (
        f"{len(cells)} cells{excluded}, {valid} valid, {runs} runs, {done} done"
        + (f", at most {gpus} GPUs at once" if gpus else "")
        + f"; {time}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
