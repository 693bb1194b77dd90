"""Node 0 and its agents, both on this host; tests/bench/slurm has nodes with networks of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from bench import nodes
from bench.errors import UserError
from bench.jobs import Message
from bench.nodes import Node, free_port, gather, own_facts
from bench.place import Place
from bench.record import Record, load_all

ROOT = Path(__file__).parents[2]
CELL = (
    *("device=cpu", "model=resnet18", "image_size=32", "num_classes=10", "batch_size=8", "micro_batches=2"),
    *("warmup_steps=1", "steps=2", "baseline=false", "library=torch", "stages=2", "nodes=2"),
)


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Callable[..., list[subprocess.Popen[str]]]]:
    """Starts the same command as two nodes under torchrun; node 0's process first."""
    started: list[subprocess.Popen[str]] = []
    port = free_port()

    def start(*overrides: str, folders: tuple[str, str] = ("results", "results")) -> list[subprocess.Popen[str]]:
        for node, folder in enumerate(folders):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
            where = ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
            command = [*launcher, *where, "-m", "bench", *CELL, *overrides, f"results_dir={tmp_path / folder}"]
            with open(tmp_path / f"said{node}", "w") as out:
                started.append(subprocess.Popen(command, cwd=ROOT, text=True, stdout=out, stderr=subprocess.STDOUT))
        return started

    yield start
    for process in started:
        process.terminate()
        process.wait(40)


def _record(tmp_path: Path) -> Record:
    records, errors = load_all(tmp_path / "results")
    assert errors == []
    (found,) = [r for r in records if r.kind == "cell"]
    return found


def test_a_cell_runs_under_torchrun(torchrun: Callable[..., list[subprocess.Popen[str]]], tmp_path: Path) -> None:
    first, second = torchrun()
    assert first.wait(110) == 0, (tmp_path / "said0").read_text()
    assert second.wait(30) == 0, (tmp_path / "said1").read_text()
    r = _record(tmp_path)
    assert (r.status, r.factors.nodes, len(r.stages), len(r.steps)) == ("ok", 2, 2, 3)
    assert r.parity is not None
    assert r.parity.passed
    # Only rank 1's output is of the other node.
    log = tmp_path / "results" / r.log
    assert log.with_name(f"{log.stem}.node1.log").exists()
    # Two nodes on one host share its lock, which only one rank may ask for: they would wait for each other.
    assert r.waited_s == 0


def test_the_command_on_one_node_alone_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", *CELL, f"results_dir={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith("nodes=2: this command runs on 1; start it by srun --ntasks-per-node=1 or torchrun")


@pytest.fixture
def pair() -> Iterator[tuple[Node, socket.socket]]:
    """Node 0's view of another node, and that node's end of the connection, driven by hand."""
    here = Place(index=0, count=2, port=free_port())
    with ExitStack() as stack:
        agent: list[socket.socket] = []

        def connect() -> None:
            end = time.monotonic() + 10
            while time.monotonic() < end:
                try:
                    agent.append(socket.create_connection(("127.0.0.1", here.port)))
                    break
                except OSError:
                    time.sleep(0.02)
            facts = dataclasses.asdict(own_facts("127.0.0.1"))
            agent[0].sendall(json.dumps({"hello": {"node": 1, "facts": facts}}).encode() + b"\n")

        thread = threading.Thread(target=connect)
        thread.start()
        (node,) = stack.enter_context(gather(here))
        thread.join()
        stack.callback(_hang_up, agent[0])  # before node 0 closes, which waits for it
        yield node, agent[0]


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _started(node: Node, tmp_path: Path) -> tuple[nodes.Process, int]:
    """A rank that node 0 has asked the other for, and the pipe that it reads."""
    (tmp_path / "job.json").write_text("{}")
    reading, writing = os.pipe()
    with open(os.devnull, "wb") as output:
        start = node.starter((), tmp_path / "log", preload=False)
        process = start([str(tmp_path / "job.json"), "3"], {"RANK": "3"}, output, writing)
    os.close(writing)
    return process, reading


def _all_of(pipe: int) -> bytes:
    with open(pipe, "rb") as reading:
        return reading.read()


def test_what_a_rank_reports_and_how_it_ends_comes_through_whole(
    pair: tuple[Node, socket.socket], tmp_path: Path
) -> None:
    node, agent = pair
    process, pipe = _started(node, tmp_path)
    said = json.loads(agent.makefile().readline())
    assert (said["do"], said["number"], said["environment"]) == ("start", 3, {"RANK": "3"})
    assert process.poll() is None
    # More than a pipe holds, in pieces that end within a line.
    text = "".join(f"line {i}\n" for i in range(30000))
    lines = [json.dumps({"key": 0, "data": text[i : i + 7000]}) + "\n" for i in range(0, len(text), 7000)]
    whole = ("".join(lines) + json.dumps({"key": 0, "code": 5}) + "\n").encode()
    threading.Thread(target=agent.sendall, args=(whole,)).start()
    assert _all_of(pipe).decode() == text
    assert process.wait(5) == 5


@pytest.mark.parametrize("before", [True, False])
def test_a_lost_connection_fails_the_ranks_there_in_its_name(
    pair: tuple[Node, socket.socket], tmp_path: Path, before: bool
) -> None:
    node, agent = pair
    if before:
        agent.shutdown(socket.SHUT_RDWR)
        time.sleep(0.2)
    process, pipe = _started(node, tmp_path)
    if not before:
        agent.shutdown(socket.SHUT_RDWR)
    message = Message.loads(_all_of(pipe).decode())
    assert (message.kind, message.rank, message.status) == ("error", 3, "error")
    assert message.reason == f"node 1 ({socket.gethostname()}): it is gone: the connection to its agent has ended"
    assert process.wait(5) == -9


def test_strangers_at_the_port_are_no_agents_and_one_that_does_not_come_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "CONNECT_S", 2.0)
    here = Place(index=0, count=2, port=free_port())

    def intrude() -> None:
        for text in (b"GET / HTTP/1.1\n\n", b"{}\n", b'{"hello": {"node": 7, "facts": {}}}\n', b"\xff\xfe\n", b""):
            time.sleep(0.1)
            with socket.create_connection(("127.0.0.1", here.port)) as stranger:
                stranger.sendall(text)

    thread = threading.Thread(target=intrude)
    thread.start()
    with pytest.raises(UserError, match="nodes=2: no word from node 1 in 2 s"), gather(here):
        pass
    thread.join()


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        said = f"port={port}: node 0 cannot listen there"
        with pytest.raises(UserError, match=said), gather(Place(index=0, count=2, port=port)):
            pass


def test_an_agent_whose_node_0_is_gone_ends_its_ranks(
    torchrun: Callable[..., list[subprocess.Popen[str]]], tmp_path: Path
) -> None:
    first, _ = torchrun("steps=100000", "preload=false")

    def ranks() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if "bench.worker" in process.cmdline() and process.environ().get("MASTER_ADDR") == "127.0.0.1":
                    found.append(process)
            except psutil.Error:
                continue
        return found

    end = time.monotonic() + 60
    while len(found := ranks()) < 2:
        assert time.monotonic() < end, (tmp_path / "said0").read_text() + (tmp_path / "said1").read_text()
        time.sleep(0.1)
    for child in psutil.Process(first.pid).children():
        child.kill()
    assert psutil.wait_procs(found, timeout=30)[1] == []
