"""Headless Chromium over its debugging pipe (the Chrome DevTools Protocol), with nothing but the standard library."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page.  ``events`` are all that the page sent since it was opened."""

    def __init__(self, home: Path) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
        command = [str(CHROMIUM), *flags, f"--user-data-dir={home}", "--window-size=1200,900", "about:blank"]
        # Chromium reads from descriptor 3 and writes to 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(shell, pass_fds=(theirs_in, theirs_out), stdout=quiet, stderr=quiet)
        os.close(theirs_in)
        os.close(theirs_out)
        self.out, self.into, self.rest = ours_out, ours_in, b""
        self.ids = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        self.session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.close(self.out)
        os.close(self.into)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.rest:
            if not select.select([self.into], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            data = os.read(self.into, 1 << 20)
            if not data:
                raise EOFError("Chromium is gone")
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def call(self, method: str, timeout: float = 60, **parameters: object) -> dict[str, Any]:
        """The answer to one command; events that come first are kept."""
        wanted, deadline = next(self.ids), time.monotonic() + timeout
        message = {"id": wanted, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.out, data) :]
        while True:
            found = self._read(deadline)
            if found.get("id") == wanted:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result
            self.events.append(found)

    def open(self, path: Path, *, dark: bool = False) -> None:
        """Load a file and wait until it is there."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + 60
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._read(deadline))

    def run(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def key(self, key: str, text: str = "", code: int = 0) -> None:
        """A key pressed and let go, as a user would; ``code`` is Windows' of it, where it edits text."""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, windowsVirtualKeyCode=code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def mouse(self, kind: str, x: float, y: float, **more: object) -> None:
        """A mouse event: mousePressed, mouseMoved, mouseReleased, mouseWheel."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def complaints(self) -> list[str]:
        """Whatever the page logged or threw."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(e["params"]) for e in self.events if e.get("method") in kinds]

    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
