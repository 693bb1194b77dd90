"""A process that has imported a library and forks ranks on request: ``python -m bench.worker.warm FD PARENT MODULES``.

It never runs a cell itself, has one thread and never touches a GPU, so that each fork is as good as a
fresh interpreter that has just finished its imports.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from bench.lifeline import die_with_parent

__all__ = ["main"]

# What every rank imports, whatever its library.
COMMON = ("torch", "torch._dynamo", "torchvision", "torch.distributed.pipelining", "torch.utils.flop_counter")
HARNESS = tuple(f"bench.worker.{name}" for name in ("__main__", "cell", "profile", "native", "errors", "channel"))


def main(arguments: list[str]) -> None:
    """Import, say so, and fork until the parent closes its end."""
    fd, parent, modules = int(arguments[0]), int(arguments[1]), arguments[2:]
    die_with_parent(parent)
    line = socket.socket(fileno=fd)
    for name in (*COMMON, *HARNESS, *modules):
        # What cannot be imported fails in the rank, which says why.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()  # what is imported is never garbage, and a fork's collector need not copy its pages
    _send(line, {"ready": True})
    while True:
        ready, _, _ = select.select([line.fileno(), reading], [], [])
        if reading in ready:
            os.read(reading, 4096)
            _reap(line)
        if line.fileno() in ready:
            message, fds, _, _ = socket.recv_fds(line, 1 << 20, 2)
            if not message:
                os._exit(0)
            _fork(line, json.loads(message), fds, (reading, writing))


def _send(line: socket.socket, message: dict[str, Any]) -> None:
    line.send(json.dumps(message).encode())


def _reap(line: socket.socket) -> None:
    """Report every child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            _send(line, {"pid": found[0], "code": os.waitstatus_to_exitcode(found[1])})


def unfit() -> str:
    """Why this process must not be forked; empty where it may."""
    import torch

    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"the warm process has {threads} threads"
    return "the warm process has touched CUDA" if torch.cuda.is_initialized() else ""


def _fork(line: socket.socket, request: dict[str, Any], fds: list[int], own: tuple[int, int]) -> None:
    output, messages = fds
    reason = unfit()
    if reason:
        _send(line, {"refused": reason})
    else:
        pid = os.fork()
        if pid == 0:
            _become_rank(line, request, output, messages, own)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # here as well as in the child: whoever comes first
        _send(line, {"started": pid})
    for fd in fds:
        os.close(fd)


def _become_rank(
    line: socket.socket, request: dict[str, Any], output: int, messages: int, own: tuple[int, int]
) -> None:
    """The child: all that a fresh interpreter would have been given, then the rank's own main."""
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(output, 1)
        os.dup2(output, 2)
        line.close()
        for fd in (output, *own):
            os.close(fd)
        os.environ.clear()
        os.environ.update(request["environment"])
        from bench.worker.__main__ import main as run

        run([*request["arguments"], str(messages)], parent_pid=os.getppid())
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
