"""Each balance's boundaries side by side, without training: ``python -m bench.partition model=resnet101 stages=4``.

Takes what one cell takes; ``balance`` may name one or several, all that can be had are shown by default.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.table import Table

from bench.errors import UserError
from bench.expand import expand
from bench.factors import Balance, Factors, Library, Settings
from bench.jobs import Message
from bench.launch import Interrupted
from bench.partition.rules import NATIVE, RULES
from bench.plan import Cell, make_cell, normalise
from bench.registry import capabilities, libraries
from bench.resolve import Unmeasured, resolve
from bench.sweep import check_writable
from bench.table import console
from bench.warm import Warm, fresh

# What is shown where the user names none: the rules without a choice to make.
SHOWN = tuple(rule for rule in RULES if rule != "manual")


def _wanted(overrides: Sequence[str]) -> list[tuple[str, Factors]]:
    """(label, factors) of each balance to show: the library's own rules, then every library's own routines."""
    sweep = expand([*overrides, "baseline=false"])
    if len({f.replace(balance=Balance(name="")) for f in sweep.factors}) > 1:
        raise UserError("-m", "several cells", "the comparison is of balances at one cell", "sweep nothing but balance")
    first = sweep.factors[0]
    if capabilities(first.library).stages_are != "devices":
        raise UserError("library", first.library.name, "has no pipeline", "choose a pipeline library")
    if "balance" in sweep.typed:
        return [(f.balance.name, f) for f in sweep.factors]
    rows = [(rule, first.replace(balance=_balance(rule))) for rule in SHOWN]
    for library in libraries().values():
        for rule in capabilities(library).native_balances:
            if rule != "regex":
                native = f"{NATIVE}{rule}"
                rows.append((f"{native} ({library.name})", _of(first, library, native)))
    return rows


def _balance(rule: str) -> Balance:
    return Balance(name=rule, options=(("max_memory", None),) if rule == "optimal" else ())


def _of(factors: Factors, library: Library, rule: str) -> Factors:
    """The same cell in another library, with the schedule and checkpointing that it has."""
    can = capabilities(library)
    names = {schedule.name for schedule in can.schedules}
    schedule = factors.schedule if factors.schedule in names else "native"
    checkpoint = factors.checkpoint if factors.checkpoint in can.checkpoints else "never"
    return factors.replace(library=library, schedule=schedule, checkpoint=checkpoint, balance=_balance(rule))


def _resolved(rows: Sequence[tuple[str, Factors]], settings: Settings) -> Iterator[tuple[str, Cell, str]]:
    """(label, cell, why it has no partition) of each row, said as it goes."""
    out = console()
    said = ""

    def say(message: Message) -> None:
        nonlocal said
        text = message.note
        if message.rank == 0 and text and (out.is_terminal or message.waiting) and text != said:
            said = text
            out.print(f"  {text}", highlight=False)

    with Warm() as warm:
        for label, factors in rows:
            out.print(f"{label} …", highlight=False)
            cell = make_cell(normalise(factors), settings)
            start = warm.starter(capabilities(factors.library).modules) if settings.preload else fresh
            try:
                if cell.problem is not None:
                    raise cell.problem
                yield label, resolve(cell, settings, say, start), ""
            except Unmeasured as failure:
                yield label, cell, f"{failure}; log: {failure.log}"
            except UserError as error:
                yield label, cell, str(error)


def _comparison(rows: Sequence[tuple[str, Cell, str]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    columns = ("balance", "layers", "M parameters", "GFLOPs", "ms", "MiB", "imbalance", "boundary MiB", "predicted s")
    for name in columns:
        table.add_column(name, overflow="fold", justify="left" if name == "balance" else "right")
    for label, cell, _ in rows:
        found = cell.prediction
        if found is None:
            continue
        table.add_row(
            label,
            "-".join(map(str, cell.partition)),
            " | ".join(f"{count / 1e6:.2f}" for count in found.stage_parameters),
            " | ".join(f"{flops / 1e9:.2f}" for flops in found.stage_flops),
            " | ".join(f"{seconds * 1e3:.1f}" for seconds in found.stage_times_s),
            " | ".join(f"{size / 2**20:.0f}" for size in (terms.total for terms in found.memory)),
            f"{found.imbalance:.3f}",
            " | ".join(f"{size / 2**20:.2f}" for size in found.boundary_bytes),
            "" if found.step_time_s is None else f"{found.step_time_s:.4g}",
        )
    return table


def main(arguments: Sequence[str]) -> int:
    """Print the comparison.  Exit code 2 for a user's mistake."""
    if any(a in ("-h", "--help") for a in arguments):
        print((__doc__ or "").strip())
        return 0
    try:
        overrides = [a for a in arguments if a != "-m"]
        rows = _wanted(overrides)
        settings = replace(expand(overrides).settings, profile=True)
        check_writable(settings.results_dir)
        # What is wrong with the cell itself, whatever its balance, is answered before anything is measured.
        uniform = make_cell(normalise(rows[0][1].replace(balance=_balance("uniform"))), settings)
        if uniform.problem is not None:
            raise uniform.problem
        made = list(_resolved(rows, settings))
        if all(why for _, _, why in made):
            print(made[0][2], file=sys.stderr)
            return 2
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except Interrupted as stop:
        print(f"interrupted by {stop}", file=sys.stderr)
        return 128 + stop.number
    f = made[0][1].factors
    out = console()
    out.print(
        _comparison(
            made,
            f"model={f.model.name} granularity={f.granularity} stages={f.stages} batch_size={f.batch_size} "
            f"micro_batches={f.micro_batches} image_size={f.image_size} schedule={f.schedule} "
            f"checkpoint={f.checkpoint} precision={f.precision} hardware={made[0][1].hardware}",
        )
    )
    out.print(
        "several figures: one a stage (boundary: one a boundary, one way, one micro-batch); ms: profiled forward and "
        "backward of one micro-batch; MiB: predicted peak; imbalance: longest stage's ms over the mean; "
        "predicted s: a step of the simulated schedule.",
        highlight=False,
    )
    for label, _, why in made:
        if why:
            out.print(f"{label}: {why}", highlight=False, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
