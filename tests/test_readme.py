"""What README shows is what the named commands print."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
README = (PROJECT / "README.md").read_text()


def block(command: str) -> str:
    """The fenced text that follows the mention of a command."""
    return re.search(re.escape(f"<!-- {command} -->") + r"\n+```text\n(.*?)```", README, re.DOTALL)[1]  # type: ignore[index]


def test_the_table_is_printed_by_its_command() -> None:
    command = "python -m bench.table results/measured/demo"
    done = subprocess.run(
        [sys.executable, *command.split()[1:]], cwd=PROJECT, capture_output=True, text=True, timeout=60, check=True
    )
    assert [line.rstrip() for line in done.stdout.splitlines()] == [
        line.rstrip() for line in block(command).splitlines()
    ]


def test_the_figure_is_drawn_by_its_command(tmp_path: Path) -> None:
    (shown,) = re.findall(r"!\[[^]]*\]\((results/measured/grid/figures/[^)]*)\)", README)
    study = tmp_path / "grid"
    study.mkdir()
    for name in ("runs", "stages", "steps"):
        shutil.copy(PROJECT / "results" / "measured" / "grid" / f"{name}.csv", study)
    subprocess.run([sys.executable, "-m", "bench.report", str(study)], cwd=PROJECT, timeout=100, check=True)
    assert (study / "figures" / Path(shown).name).read_bytes() == (PROJECT / shown).read_bytes()


def markdown_table(command: str) -> list[str]:
    """The lines of the table that follows the mention of a command."""
    after = README.partition(f"<!-- {command} -->\n")[2]
    lines = after.splitlines()
    return lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]


@pytest.mark.parametrize(
    "command",
    ["python scripts/balancers.py", "python scripts/balance_effect.py results/measured/balance --table"],
)
def test_the_tables_of_balances_are_printed_by_their_commands(command: str) -> None:
    done = subprocess.run(
        [sys.executable, *command.split()[1:]], cwd=PROJECT, capture_output=True, text=True, timeout=110, check=True
    )
    shown = markdown_table(command)
    assert len(shown) > 2
    assert [line for line in done.stdout.splitlines() if line.startswith("|")] == shown


@pytest.mark.parametrize("line", re.findall(r"python -m bench(?:\.plan|\.partition)? [^\n`#|]+", README))
def test_every_command_in_it_is_understood(line: str, tmp_path: Path) -> None:
    """Each is planned, not run: what is wrong on this machine (GPUs, data, a module of the user's) may be said."""
    words = [w.replace("\\|", "|") for w in line.split()[3:] if w not in ("-m", "--help")]
    if "…" in line or "KEY" in line:
        pytest.skip("shows the form of a command")
    done = subprocess.run(
        [sys.executable, "-m", "bench.plan", *words, f"results_dir={tmp_path}"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    here_only = ("data.path", "device", "model.target", "no GPU")
    assert done.returncode == 0 or any(w in done.stderr for w in here_only), done.stderr
