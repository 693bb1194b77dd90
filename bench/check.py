"""Is this machine fit to measure on?  ``python -m bench.check [results_dir=…] [--json]``: a line each, and what to do.

Nothing here imports torch: what needs it runs in processes of its own, each with a time limit.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from filelock import FileLock, Timeout

from bench.errors import UserError
from bench.gpu_watch import reasons
from bench.hardware import LOCK_FOLDER, link, visible_gpus
from bench.merit import OTHERS_CPU, SLOWED
from bench.registry import capabilities, libraries

__all__ = ["Finding", "findings", "main"]

Level = Literal["ok", "warn", "fail"]
LIMIT_S = 60.0
PROJECT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at: ``text`` with its figure, ``remedy`` what to do (empty where it is ``ok``)."""

    name: str
    level: Level
    text: str
    remedy: str = ""


def _python(code: str, *arguments: str, **variables: str) -> str:
    """The last line that a fresh interpreter prints; raises OSError with the last line of its error."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), **variables}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer within {LIMIT_S:.0f} s") from None
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return (done.stdout.strip().splitlines() or [""])[-1]


def _pinned() -> dict[str, str]:
    """The versions that were tried together, in a checkout."""
    path = PROJECT / "scripts" / "constraints.txt"
    lines = path.read_text().splitlines() if path.is_file() else []
    pairs = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.strip().lower(): version.strip() for name, _, version in pairs}


def _library(name: str) -> Finding:
    """Whether a library's modules can be imported as its workers will, and in which version."""
    library = libraries()[name]
    can = capabilities(library)
    distribution = can.distribution or "torch"
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        remedy = f"pip install 'pipeline-bench[{can.extra}]', or leave the library out"
        return Finding(name=f"library {name}", level="warn", text="is not installed", remedy=remedy)
    needed = {key: value.format(device="cpu") for key, value in can.environment.items()}
    try:
        _python(f"import torch; {'; '.join(f'import {m}' for m in can.modules)}", **needed)
    except OSError as error:
        remedy = "install the versions of scripts/constraints.txt"
        return Finding(name=f"library {name}", level="fail", text=f"cannot be imported: {error}", remedy=remedy)
    tried = _pinned().get(distribution)
    if tried not in (None, version):
        text = f"{distribution} {version}; {tried} is what was tried"
        return Finding(name=f"library {name}", level="warn", text=text, remedy=f"pip install {distribution}=={tried}")
    return Finding(name=f"library {name}", level="ok", text=f"{distribution} {version}")


def _compiler() -> Finding:
    """Some libraries compile an extension when they are first used."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool, path=path) is None]
    if missing:
        text = f"no {' and no '.join(missing)}"
        return Finding(name="compiler", level="warn", text=text, remedy="run bash scripts/setup.sh")
    said = subprocess.run(["g++", "--version"], capture_output=True, text=True, timeout=LIMIT_S).stdout
    return Finding(name="compiler", level="ok", text=(said.splitlines() or ["g++"])[0])


ALL_REDUCE = """
import datetime, sys, torch, torch.distributed as dist
rank, path, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if backend == "nccl":
    torch.cuda.set_device(rank)
limit = datetime.timedelta(seconds=30)
dist.init_process_group(backend, store=dist.FileStore(path, 2), rank=rank, world_size=2, timeout=limit)
value = torch.ones(1, device="cuda" if backend == "nccl" else "cpu")
dist.all_reduce(value)
assert value.item() == 2
dist.destroy_process_group()
print("ok")
"""


def _collective(backend: str) -> Finding:
    """Whether two processes can add up a number."""
    name = f"communication {backend}"
    with tempfile.TemporaryDirectory(prefix="bench-check-") as folder, ThreadPoolExecutor(2) as pool:
        variables = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        start = functools.partial(_python, ALL_REDUCE, **variables)
        both = [pool.submit(start, str(rank), f"{folder}/store", backend) for rank in (0, 1)]
        problems = [str(error) for error in (one.exception() for one in both) if error is not None]
    if problems:
        remedy = "see whether a firewall or a policy forbids it (GLOO_SOCKET_IFNAME, NCCL_DEBUG=INFO)"
        return Finding(name=name, level="fail", text=problems[0], remedy=remedy)
    return Finding(name=name, level="ok", text="two processes talk")


def _gpus() -> Iterator[Finding]:
    gpus = visible_gpus()
    if not gpus:
        yield Finding(name="gpus", level="ok", text="none is visible: cells run on the CPU")
        return
    import pynvml

    pynvml.nvmlInit()
    try:
        for gpu in gpus:
            yield _gpu(pynvml, gpu.uuid, f"gpu {gpu.index}", f"{gpu.name}, driver {gpu.driver}")
    finally:
        pynvml.nvmlShutdown()
    for a, b in itertools.pairwise(gpus):
        kind = link(a, b)
        level: Level = "warn" if kind.startswith("unknown") else "ok"
        remedy = "see nvidia-smi topo -m" if level == "warn" else ""
        yield Finding(name=f"link {a.index}-{b.index}", level=level, text=kind, remedy=remedy)
    version = _python("import torch; print('.'.join(map(str, torch.cuda.nccl.version())))")
    yield Finding(name="nccl", level="ok", text=version)
    if len(gpus) > 1:
        yield _collective("nccl")


def _gpu(nvml: Any, uuid: str, name: str, text: str) -> Finding:
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    most = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
    text += f", SM clock {clock} of {most} MHz"
    others = [p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    if others:
        pids = ", ".join(map(str, others))
        return Finding(name=name, level="warn", text=f"{text}; used by process {pids}", remedy="wait until it is free")
    slowed = [r for r in reasons(int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))) if r in SLOWED]
    if slowed:
        text = f"{text}; {', '.join(slowed)}"
        return Finding(name=name, level="warn", text=text, remedy="see to its cooling and power")
    if not nvml.nvmlDeviceGetPersistenceMode(handle):
        remedy = "nvidia-smi -pm 1, or the first step of a cell waits for the driver"
        return Finding(name=name, level="warn", text=f"{text}; persistence mode is off", remedy=remedy)
    return Finding(name=name, level="ok", text=text)


def _load(seconds: float = 1.0) -> Finding:
    """Cores that others keep busy, and who does most."""
    seen = [p for p in psutil.process_iter(["name", "pid"]) if p.pid != os.getpid()]
    before = {p.pid: _cpu_s(p) for p in seen}
    own = sum(psutil.Process().cpu_times()[:2])
    idle = psutil.cpu_times().idle
    start = time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - start
    idle = psutil.cpu_times().idle - idle
    busy = (os.cpu_count() or 1) - idle / took - (sum(psutil.Process().cpu_times()[:2]) - own) / took
    busy = max(0.0, busy)
    if busy <= OTHERS_CPU:
        return Finding(name="other load", level="ok", text=f"{busy:.2f} cores busy")
    top = max(seen, key=lambda p: _cpu_s(p) - before[p.pid], default=None)
    who = f", most by {top.info['name']} (process {top.pid})" if top is not None else ""
    remedy = "end it, or wait: figures measured now will be called noisy"
    return Finding(name="other load", level="warn", text=f"{busy:.2f} cores busy{who}", remedy=remedy)


def _cpu_s(process: psutil.Process) -> float:
    try:
        return float(sum(process.cpu_times()[:2]))
    except psutil.Error:
        return 0.0


def _cores() -> Finding:
    """Cores that this process may use: by affinity, and by the quota of its control group."""
    allowed = len(os.sched_getaffinity(0))
    quota = _quota()
    text = f"{allowed} of {os.cpu_count()} by affinity" + (f", {quota:g} by quota" if quota is not None else "")
    usable = allowed if quota is None else min(allowed, quota)
    if usable < 2:
        remedy = "a stage on CPU needs a core of its own: ask for more (--cpus-per-task)"
        return Finding(name="cores", level="warn", text=text, remedy=remedy)
    return Finding(name="cores", level="ok", text=text)


def _quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _clocks(folder: Path = Path("/sys/devices/system/cpu/cpu0/cpufreq")) -> Finding:
    try:
        governor = (folder / "scaling_governor").read_text().strip()
    except OSError:
        return Finding(name="cpu clock", level="ok", text="its governor cannot be seen (a virtual machine?)")
    if governor != "performance":
        remedy = "cpupower frequency-set -g performance"
        return Finding(name="cpu clock", level="warn", text=f"governor {governor}", remedy=remedy)
    return Finding(name="cpu clock", level="ok", text=f"governor {governor}")


def _memory() -> Finding:
    free = psutil.virtual_memory().available / 2**30
    if free < 4:
        return Finding(name="memory", level="warn", text=f"{free:.1f} GiB available", remedy="free some")
    return Finding(name="memory", level="ok", text=f"{free:.1f} GiB available")


def _shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """NCCL and data loaders pass their buffers there; containers often get 64 MiB."""
    if not folder.is_dir():
        return Finding(name="shared memory", level="fail", text=f"there is no {folder}", remedy="mount a tmpfs there")
    free = shutil.disk_usage(folder).free / 2**20
    if free < 256:
        remedy = "start the container with --shm-size=1g or more"
        return Finding(name="shared memory", level="warn", text=f"{free:.0f} MiB free in {folder}", remedy=remedy)
    return Finding(name="shared memory", level="ok", text=f"{free:.0f} MiB free in {folder}")


def _disk(results_dir: Path) -> Finding:
    """Room and the time of a durable write where records go."""
    folder = next(p for p in [results_dir.resolve(), *results_dir.resolve().parents] if p.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".check-") as file:
            start = time.monotonic()
            file.write(b"x" * 2**20)
            file.flush()
            os.fsync(file.fileno())
            took = time.monotonic() - start
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror})"
        return Finding(name="disk", level="fail", text=text, remedy="give another results_dir")
    free = shutil.disk_usage(folder).free / 2**30
    text = f"{free:.1f} GiB free in {folder}, 1 MiB written durably in {took * 1e3:.0f} ms"
    if free < 1 or took > 1:
        return Finding(name="disk", level="warn", text=text, remedy="free some, or give a local results_dir")
    return Finding(name="disk", level="ok", text=text)


def _locks(folder: Path = LOCK_FOLDER) -> Finding:
    """Whether another run measures on this host now."""
    held = []
    for path in sorted(folder.glob("*.lock")):
        try:
            FileLock(path, mode=0o666).acquire(timeout=0).lock.release()
        except Timeout:
            held.append(path.stem)
        except OSError:
            continue
    if held:
        text = f"another run is measuring ({', '.join(held)})"
        return Finding(name="device lock", level="warn", text=text, remedy="wait: a run of yours would wait for it too")
    return Finding(name="device lock", level="ok", text="free")


def _clock() -> Finding:
    resolution = time.get_clock_info("monotonic").resolution
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    name = source.read_text().strip() if source.is_file() else "unknown source"
    if name in ("acpi_pm", "jiffies", "hpet"):
        text = f"{name}: a reading takes microseconds"
        return Finding(name="clock", level="warn", text=text, remedy="boot with clocksource=tsc where the CPU can")
    return Finding(name="clock", level="ok", text=f"{name}, resolution {resolution * 1e9:.0f} ns")


def findings(results_dir: Path) -> Iterator[Finding]:
    """Every check; one that fails itself is a finding too.  The load is seen first, before checks make some."""
    checks: list[tuple[str, Callable[[], Finding | Iterator[Finding]]]] = [
        ("other load", _load),
        ("device lock", _locks),
        ("cores", _cores),
        ("cpu clock", _clocks),
        ("clock", _clock),
        ("memory", _memory),
        ("shared memory", _shared_memory),
        ("disk", lambda: _disk(results_dir)),
        ("compiler", _compiler),
        *((f"library {name}", functools.partial(_library, name)) for name in libraries()),
        ("communication gloo", lambda: _collective("gloo")),
        ("gpus", _gpus),
    ]
    for name, look in checks:
        try:
            found = look()
            yield from [found] if isinstance(found, Finding) else found
        except Exception as error:  # a check must not keep the others from being made
            text = " ".join(f"could not be looked at: {type(error).__name__}: {error}".split())
            yield Finding(name=name, level="warn", text=text, remedy="look for yourself")


def _results_dir(arguments: Sequence[str]) -> Path:
    results_dir = "results"
    for argument in arguments:
        match = re.fullmatch(r"results_dir=(.+)", argument)
        if match is None:
            raise UserError(argument, "", "there is no such option", "allowed are results_dir=… and --json")
        results_dir = match[1]
    return Path(results_dir)


def main(arguments: Sequence[str]) -> int:
    """Exit code 0 where nothing failed, 1 where something did, 2 for a user's mistake."""
    if any(a in ("-h", "--help") for a in arguments):
        print((__doc__ or "").strip())
        return 0
    try:
        results_dir = _results_dir([a for a in arguments if a != "--json"])
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    levels = []
    for found in findings(results_dir):
        levels.append(found.level)
        remedy = f" -> {found.remedy}" if found.remedy else ""
        plain = f"{found.level:4} {found.name}: {found.text}{remedy}"
        print(json.dumps(asdict(found)) if "--json" in arguments else plain, flush=True)
    return 1 if "fail" in levels else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
