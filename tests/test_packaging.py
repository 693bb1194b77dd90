"""The wheel holds all that a run needs, and a folder of the user's that shadows a package is named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from bench.registry import capabilities, libraries

ROOT = Path(__file__).parents[1]
PACKAGES = ("adapters", "bench", "conf", "models")
CELL = ["library=single", "device=cpu", "batch_size=4", "micro_batches=2", "image_size=32", "warmup_steps=1", "steps=2"]


def _run(command: list[str], where: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(
        command, cwd=where, env={**kept, **variables}, capture_output=True, text=True, check=False, timeout=110
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from a copy, so that no build folder is left in the checkout or taken from it."""
    source = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "out", "."]
    done = _run(build, source)
    assert done.returncode == 0, done.stderr
    (made,) = (source / "out").glob("*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel alone; what it needs is lent by the present one."""
    home = tmp_path_factory.mktemp("environment")
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    for command in (
        [sys.executable, "-m", "venv", "--without-pip", str(home)],
        [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)],
    ):
        done = _run(command, home)
        assert done.returncode == 0, done.stderr
    (site,) = home.glob("lib/python*/site-packages")
    # A path file adds the folder only: an editable install of the project in it stays without effect.
    (site / "lent.pth").write_text("\n".join(dict.fromkeys(sysconfig.get_path(k) for k in ("purelib", "platlib"))))
    return python


@pytest.fixture
def shadowing(tmp_path: Path) -> Path:
    """A user's folder with a ``models`` package of its own."""
    folder = tmp_path / "study"
    (folder / "models").mkdir(parents=True)
    (folder / "models" / "__init__.py").write_text("raise ImportError('the wrong models')\n")
    return folder


def test_the_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".yaml", ".csv")
    }
    assert len(expected) > 100
    assert expected <= inside
    assert {name.split("/")[0] for name in inside if ".dist-info" not in name} == set(PACKAGES)
    assert any(name.endswith("licenses/LICENSE") for name in inside)


@pytest.mark.timeout(240)
def test_the_installed_wheel_runs_a_cell(python: Path, tmp_path: Path) -> None:
    done = _run([str(python), "-m", "bench", *CELL, f"results_dir={tmp_path}/results"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    collected = _run([str(python), "-m", "bench.collect", f"{tmp_path}/results"], tmp_path)
    assert "runs.csv: 1 rows" in collected.stdout


@pytest.mark.timeout(240)
def test_a_folder_with_its_own_models_is_named_and_can_be_run_from(python: Path, shadowing: Path) -> None:
    command = [str(python), "-m", "bench", *CELL]
    done = _run(command, shadowing)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"models={shadowing / 'models'}: shadows the project's own {python.parents[1]}")
    assert sorted(path.name for path in shadowing.iterdir()) == ["models"]
    # What the message advises works, in the workers too.
    done = _run(command, shadowing, PYTHONSAFEPATH="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((shadowing / "results" / "records").glob("single-*.json"))) == 1


def test_every_library_has_an_extra_that_installs_it() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for library in libraries().values():
        can = capabilities(library)
        if can.distribution is not None:
            assert can.extra is not None
            assert can.distribution in extras[can.extra]
            assert can.extra in extras["all"][0]


def test_every_requirement_is_pinned_in_the_constraints() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for group in project["optional-dependencies"].values() for r in group)]
    names = {r.partition("[")[0].partition("=")[0].partition("<")[0].partition(">")[0].lower() for r in wanted}
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower() for line in lines if "==" in line}
    assert names - {"pipeline-bench"} <= pinned
