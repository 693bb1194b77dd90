"""A SLURM cluster of its own for tests: munged, slurmctld and a slurmd a node, all in one folder.

Needs root and Debian's packages (``scripts/install_slurm.sh``), no systemd, and nothing outside its folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.hardware import LOCK_FOLDER

__all__ = ["Cluster", "missing"]

CPUS = 8
MEMORY_MB = 16000
START_S = 60.0
_COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "ip", "nsenter", "unshare")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def missing() -> str:
    """Why there can be no cluster here; empty where there can."""
    lacking = [name for name in _COMMANDS if shutil.which(name, path=_PATH) is None]
    if lacking:
        return f"SLURM is not installed ({', '.join(lacking)}); bash scripts/install_slurm.sh does it"
    return "" if os.geteuid() == 0 else "starting SLURM's daemons takes root"


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens at, all different since all are held until the last is known."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


class Cluster:
    """Nodes ``n0``, … that claim more CPUs than the host may have, in partitions ``low`` (the default)
    and ``high``, whose jobs preempt those of ``low``; a context manager.

    Several nodes have a network, a host name and device locks each of their own, as on real machines:
    what only works on one host fails there too.
    """

    def __init__(self, nodes: int = 1) -> None:
        self.nodes = [f"n{i}" for i in range(nodes)]
        self._networks = _Networks(self.nodes) if nodes > 1 else None
        # Below /tmp whatever TMPDIR says: the path of a UNIX socket is short.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.conf = self.folder / "slurm.conf"
        self._socket = self.folder / "munge.sock"
        self._daemons: list[tuple[str, subprocess.Popen[bytes]]] = []

    def environment(self) -> dict[str, str]:
        """Variables with which SLURM's commands find this cluster, and no other that the tests may run in."""
        foreign = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        return {**kept, "PATH": _PATH, "SLURM_CONF": str(self.conf)}

    def ask(self, *command: str) -> str:
        """What a command of SLURM prints; raises where it fails."""
        done = subprocess.run(
            command, env=self.environment(), cwd=self.folder, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_unused: object) -> None:
        try:
            if self._daemons:
                self._end_jobs()
        finally:
            for _name, process in reversed(self._daemons):  # the key's keeper last: the others ask it as they end
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            self._kill_left()
            if self._networks is not None:
                self._networks.remove()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        self.folder.chmod(0o755)  # munged refuses a socket that others cannot reach
        for name in ("state", "log", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(256))
        key.chmod(0o400)
        addresses = ["127.0.0.1"] * (1 + len(self.nodes))
        if self._networks is not None:
            addresses = self._networks.make()
            hosts = [f"{a} {name}" for a, name in zip(addresses, [_host(), *self.nodes], strict=True)]
            (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts]) + "\n")
        self.conf.write_text(_conf(self.folder, self._socket, dict(zip(["", *self.nodes], addresses, strict=True))))
        # No cgroups are used, but slurmd looks for their kind unless it is told.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        files = {"key-file": key, **{f"{n}-file": self.folder / f"munged.{n}" for n in ("log", "pid", "seed")}}
        options = [f"--{option}={path}" for option, path in files.items()]
        self._daemon("munged", "--foreground", f"--socket={self._socket}", *options)
        self._until(self._socket.exists)
        self._daemon("slurmctld", "-D", "-f", str(self.conf))
        # slurmd registers at once if the controller listens, else only when it tries again.
        self._until(lambda: self._says("scontrol", "ping") is not None)
        for node in self.nodes:
            own = self._networks.within(node, self.folder / "hosts") if self._networks is not None else []
            self._daemon(*own, "slurmd", "-D", "-f", str(self.conf), "-N", node)
        self._until(
            lambda: (
                (self._says("sinfo", "--noheader", "-N", "--format=%T") or "").split() == 2 * len(self.nodes) * ["idle"]
            )
        )

    def _daemon(self, name: str, *arguments: str) -> None:
        with open(self.folder / "log" / f"{len(self._daemons)}-{name}.out", "wb") as out:
            process = subprocess.Popen(
                [name, *arguments], env=self.environment(), cwd=self.folder, stdout=out, stderr=out,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._daemons.append((name, process))

    def _says(self, *command: str) -> str | None:
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=60, check=False)
        return done.stdout if done.returncode == 0 else None

    def _until(self, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + START_S
        while not ready():
            dead = [name for name, process in self._daemons if process.poll() is not None]
            if dead or time.monotonic() > end:
                tails = [f"{p.name}: {p.read_text(errors='replace')[-1500:]}" for p in self._logs()]
                raise RuntimeError(f"SLURM did not start; ended: {dead}\n" + "\n".join(tails))
            time.sleep(0.05)

    def _logs(self) -> Sequence[Path]:
        return sorted((self.folder / "log").iterdir())

    def _end_jobs(self) -> None:
        """Cancel all jobs, with a signal that they cannot ignore, and wait until they are gone."""
        states = "--states=RUNNING,COMPLETING,PENDING,SUSPENDED"
        jobs = (self._says("squeue", "--noheader", states, "--format=%A") or "").split()
        if not jobs:
            return
        self._says("scancel", "--full", "--signal=KILL", *jobs)
        self._says("scancel", *jobs)
        end = time.monotonic() + 10
        while time.monotonic() < end and self._says("squeue", "--noheader", states):
            time.sleep(0.1)

    def _kill_left(self) -> None:
        """Kill what jobs and slurmstepd have left: only processes with this cluster's configuration."""
        mark = f"SLURM_CONF={self.conf}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:
                continue


def _host() -> str:
    return socket.gethostname().split(".")[0]


class _Networks:
    """A network namespace a node, joined by a bridge; all names carry this process's number."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes, self._id = nodes, f"{os.getpid() % 100000}"
        self._bridge = f"br{self._id}"
        self._third = 1 + os.getpid() % 250

    def _name(self, node: str) -> str:
        return f"{node}-{self._id}"

    def make(self) -> list[str]:
        """Their addresses: the host's own, then each node's."""
        addresses = [f"10.77.{self._third}.{i + 1}" for i in range(1 + len(self._nodes))]
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{addresses[0]}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for node, address in zip(self._nodes, addresses[1:], strict=True):
            name = self._name(node)
            _ip("netns", "add", name)
            _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", name, "master", self._bridge)
            _ip("link", "set", name, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        return addresses

    def within(self, node: str, hosts: Path) -> list[str]:
        """The beginning of a command line that runs as on this node; each word of it execs the next."""
        # Not ip netns exec, which mounts a /sys without cgroups, for which slurmd looks.
        own = f"hostname {node} && mount --bind {hosts} /etc/hosts && mount -t tmpfs tmpfs {LOCK_FOLDER}"
        LOCK_FOLDER.mkdir(exist_ok=True)
        return [
            *("nsenter", f"--net=/run/netns/{self._name(node)}", "unshare", "--uts", "--mount"),
            *("sh", "-c", own + ' && exec "$@"', "sh"),
        ]

    def remove(self) -> None:
        """Take all of it back, as far as it was made."""
        for node in self._nodes:
            _ip("netns", "del", self._name(node), check=False)
            _ip("link", "del", self._name(node), check=False)
        _ip("link", "del", self._bridge, check=False)


def _ip(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _conf(folder: Path, munge: Path, addresses: Mapping[str, str]) -> str:
    """``addresses``: the nodes' by name, and the controller's by the empty name."""
    ports = dict(zip(addresses, _free_ports(len(addresses)), strict=True))
    several = len(addresses) > 2
    host = _host()
    values = {
        "ClusterName": "tests",
        "SlurmctldHost": f"{host}({addresses['']})",
        "SlurmctldPort": ports[""],
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        # A requeued job waits until its credential has run out: 5 s is the least, 120 s the default.
        "AuthInfo": f"socket={munge},cred_expire=5",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool-%n",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd-%n.pid",
        "SlurmctldLogFile": folder / "log" / "slurmctld.log",
        "SlurmdLogFile": folder / "log" / "slurmd-%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "SlurmdParameters": "config_overrides",
        "SchedulerParameters": "bf_interval=1,sched_interval=2,sched_min_interval=0,batch_sched_delay=0",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "DefMemPerCPU": 100,
        "MaxArraySize": 101,
        "MinJobAge": 3600,
        "KillWait": 10,
        "ReturnToService": 2,
        "PropagateResourceLimits": "NONE",
        "MailProg": "/bin/true",
        "MpiDefault": "none",
    }
    lines = [f"{key}={value}" for key, value in values.items()]
    lines += [
        f"NodeName={node} NodeHostname={node if several else host} NodeAddr={address} Port={ports[node]} CPUs={CPUS} "
        f"Boards=1 SocketsPerBoard=1 CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory={MEMORY_MB} State=UNKNOWN"
        for node, address in addresses.items()
        if node
    ]
    lines.append("PartitionName=low Nodes=ALL Default=YES PriorityTier=1 MaxTime=60 State=UP")
    lines.append("PartitionName=high Nodes=ALL PriorityTier=10 MaxTime=60 State=UP")
    return "\n".join(lines) + "\n"
