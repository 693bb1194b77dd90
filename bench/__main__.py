"""``python -m bench``: run one cell, or with ``-m`` a sweep."""

from __future__ import annotations

import errno
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.errors import UserError
from bench.place import Place, place

if TYPE_CHECKING:
    from bench.nodes import Node


def check_siblings() -> None:
    """Raise UserError where another folder shadows one of the project's packages.

    ``python -m bench`` puts the working directory first on the path.
    """
    home = Path(__file__).resolve().parent.parent
    for name in ("adapters", "models", "conf"):
        spec = importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or []) if spec is not None else []
        found = Path(places[0]).resolve() if places else Path(spec.origin) if spec and spec.origin else None
        if found != home / name:
            raise UserError(
                name,
                found,
                f"shadows the project's own {home / name}",
                "run from another folder, or with PYTHONSAFEPATH=1",
            )


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 when every cell is ok or unsupported, 1 when one failed, 2 for a user's mistake."""
    try:
        check_siblings()
        if any(a in ("-h", "--help") for a in arguments):
            from bench.help import print_help

            print_help()
            return 0
        here = place()
        if here.index > 0:
            from bench.agent import serve

            return serve(here)
        return _run(arguments, here)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def _run(arguments: Sequence[str], here: Place) -> int:
    from bench.nodes import gather

    with gather(here) as nodes:
        return _run_with(arguments, nodes)


def _run_with(arguments: Sequence[str], nodes: Sequence[Node]) -> int:
    from bench.expand import expand
    from bench.launch import Interrupted
    from bench.plan import plan
    from bench.sweep import check_writable, sweep

    multirun = any(a in ("-m", "--multirun") for a in arguments)
    overrides = [a for a in arguments if a not in ("-m", "--multirun")]
    bad = next((a for a in overrides if a.startswith("-")), None)
    if bad is not None:
        raise UserError(bad, "", "there is no such option", "see python -m bench --help")
    expanded = expand(overrides)
    if expanded.several and not multirun:
        raise UserError("-m", "missing", "several values make a sweep", "write python -m bench -m …")
    check_writable(expanded.settings.results_dir)
    try:
        made = sweep(plan(expanded), expanded.settings, alone=not multirun, nodes=nodes)
    except Interrupted as stop:
        print(f"interrupted by {stop}", file=sys.stderr)
        return 128 + stop.number
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        folder = expanded.settings.results_dir
        print(
            f"{folder}: {error.strerror}; what is recorded there stays: make room, then give the same command again",
            file=sys.stderr,
        )
        return 1
    return 1 if made.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
