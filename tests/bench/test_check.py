"""Whether a machine is fit: each check against a machine that is not, made for real where it can be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from filelock import FileLock

from bench import check
from bench.check import Finding, main
from bench.hardware import Gpu
from bench.registry import libraries

ROOT = Path(__file__).parents[2]


def test_every_part_is_looked_at_one_line_each_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"results_dir={tmp_path / 'none yet'}", "--json"]) == 0
    found = [Finding(**json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    by_name = {f.name: f for f in found}
    assert len(by_name) == len(found)
    parts = {"other load", "device lock", "cores", "clock", "memory", "shared memory", "disk", "compiler"}
    assert parts | {f"library {name}" for name in libraries()} | {"communication gloo"} <= set(by_name)
    # What the tests need, so what is not ok here would make them fail too.
    for name in [*(f"library {name}" for name in libraries()), "communication gloo", "compiler", "disk"]:
        assert by_name[name].level == "ok", by_name[name]
    # What is to be done stands where something is wrong, and only there.
    assert all(bool(f.remedy) == (f.level != "ok") for f in found)
    assert list(tmp_path.iterdir()) == []


def test_the_parent_stays_without_torch() -> None:
    code = "import sys, bench.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--jsn"], "--jsn=: there is no such option; allowed are results_dir=… and --json\n"),
        (["stages=2"], "stages=2=: there is no such option; allowed are results_dir=… and --json\n"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr() == ("", said)


def test_a_check_that_breaks_is_a_finding_and_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Finding:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(check, "_clock", broken)
    monkeypatch.setattr(check, "libraries", dict)
    found = {f.name: f for f in check.findings(tmp_path)}
    assert found["clock"].level == "warn"
    assert found["clock"].text == "could not be looked at: RuntimeError: two lines"
    assert found["disk"].level == "ok"


def test_what_failed_is_in_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Finding(name="disk", level="fail", text="is full", remedy="free some")
    monkeypatch.setattr(check, "findings", lambda _folder: iter([bad]))
    assert main([f"results_dir={tmp_path}"]) == 1
    assert capsys.readouterr().out == "fail disk: is full -> free some\n"


def test_a_busy_machine_is_said_with_who_is_busy() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        found = check._load()
    finally:
        busy.kill()
        busy.wait()
    # Another test's process may be busier still, so not this one's number.
    assert found.level == "warn"
    assert "cores busy, most by " in found.text
    assert "noisy" in found.remedy


def test_another_measuring_run_is_said(tmp_path: Path) -> None:
    assert check._locks(tmp_path).level == "ok"
    code = "import sys, filelock\nwith filelock.FileLock(sys.argv[1]):\n print('held', flush=True); sys.stdin.read()"
    path = tmp_path / "cpu.lock"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        found = check._locks(tmp_path)
        assert (found.level, found.text) == ("warn", "another run is measuring (cpu)")
        holder.communicate("")
    assert check._locks(tmp_path).level == "ok"
    # It holds nothing itself afterwards.
    FileLock(path).acquire(timeout=0).lock.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root")
def test_a_full_disk_and_little_shared_memory_are_said(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
    try:
        disk, shared = check._disk(folder / "results"), check._shared_memory(folder)
        left = list(folder.iterdir())
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert (disk.level, disk.text) == ("fail", f"{folder} cannot be written (No space left on device)")
    assert (shared.level, shared.text) == ("warn", f"0 MiB free in {folder}")
    assert left == []
    assert check._shared_memory(tmp_path / "none").level == "fail"


def test_a_quota_below_two_cores_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert check._quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert check._quota(tmp_path) is None
    monkeypatch.setattr(check, "_quota", lambda: 1.5)
    found = check._cores()
    assert (found.level, "1.5 by quota" in found.text) == ("warn", True)


@pytest.mark.parametrize(("governor", "level"), [("powersave", "warn"), ("performance", "ok")])
def test_the_cpus_governor(governor: str, level: str, tmp_path: Path) -> None:
    (tmp_path / "scaling_governor").write_text(f"{governor}\n")
    assert (check._clocks(tmp_path).level, check._clocks(tmp_path).text) == (level, f"governor {governor}")


def test_a_library_that_is_missing_broken_or_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(name for name, lib in libraries().items() if check.capabilities(lib).distribution)
    distribution = check.capabilities(libraries()[name]).distribution
    version = check.importlib.metadata.version(distribution)
    monkeypatch.setattr(check, "_pinned", lambda: {distribution: "0.0.1"})
    found = check._library(name)
    assert (found.level, found.text) == ("warn", f"{distribution} {version}; 0.0.1 is what was tried")
    assert found.remedy == f"pip install {distribution}==0.0.1"
    monkeypatch.setattr(check, "PROJECT", Path("/nowhere"))
    monkeypatch.setenv("PYTHONHOME", "/nowhere")  # no interpreter starts with that
    assert check._library(name).level == "fail"

    def absent(_name: str) -> str:
        raise check.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(check.importlib.metadata, "version", absent)
    assert (check._library(name).level, check._library(name).text) == ("warn", "is not installed")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.shutil, "which", lambda tool, path: None if tool == "g++" else tool)
    assert (check._compiler().level, check._compiler().text) == ("warn", "no g++")


def test_a_collective_that_hangs_or_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ALL_REDUCE", "raise SystemExit('refused by a policy')")
    assert (check._collective("gloo").level, check._collective("gloo").text) == ("fail", "refused by a policy")
    monkeypatch.setattr(check, "ALL_REDUCE", "import time; time.sleep(60)")
    monkeypatch.setattr(check, "LIMIT_S", 0.5)
    assert check._collective("gloo").text == "no answer within 0 s"


class Nvml(types.ModuleType):
    """A made-up NVML with its calls' names and meanings: a GPU at 900 of 1980 MHz whose state a test sets."""

    NVML_CLOCK_SM = 1

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.throttled, self.persistent, self.users = 0, 1, [7]

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetClockInfo(self, _handle: str, _kind: int) -> int:
        return 900

    def nvmlDeviceGetMaxClockInfo(self, _handle: str, _kind: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _handle: str) -> int:
        return self.throttled

    def nvmlDeviceGetPersistenceMode(self, _handle: str) -> int:
        return self.persistent

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: str) -> list[types.SimpleNamespace]:
        return [types.SimpleNamespace(pid=pid) for pid in self.users]


def test_gpus_against_a_made_up_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(
        Gpu(index=i, uuid=f"GPU-{i}", name="made up", pci_address=str(i), memory_bytes=1, driver="1") for i in (0, 1)
    )
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(check, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(check, "link", lambda _a, _b: "NVLink")
    monkeypatch.setattr(check, "_python", lambda *_a, **_k: "2.27.3")
    said = "made up, driver 1, SM clock 900 of 1980 MHz"

    def first() -> tuple[str, str]:
        found = next(iter(check._gpus()))
        assert found.name == "gpu 0"
        return found.level, found.text

    assert first() == ("warn", f"{said}; used by process 7")
    nvml.users = []
    nvml.throttled = 0x40
    assert first()[0] == "warn"
    assert "thermal" in first()[1]
    nvml.throttled, nvml.persistent = 0x01, 0  # idle is no fault
    assert first() == ("warn", f"{said}; persistence mode is off")
    nvml.persistent = 1
    assert [(f.name, f.level) for f in check._gpus()] == [
        ("gpu 0", "ok"),
        ("gpu 1", "ok"),
        ("link 0-1", "ok"),
        ("nccl", "ok"),
        ("communication nccl", "ok"),
    ]
