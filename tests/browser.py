"""A headless Chromium driven over the pipes of its debugging protocol, by the standard library alone."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find() -> str | None:
    """Path of a Chromium, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of a Chromium. All events since the start are in `events`."""

    def __init__(self, program: str, profile: Path, patience: float = 60.0) -> None:
        self.patience = patience
        self.events: list[dict[str, Any]] = []
        self._number, self._rest = 0, b""
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        # Chromium reads from 3 and writes to 4: first out of the way of both, then into their places.
        high_in, high_out = (fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in (theirs_in, theirs_out))

        def place() -> None:
            os.dup2(high_in, 3)
            os.dup2(high_out, 4)

        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
        options += ["--disable-dev-shm-usage", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [program, *options, "about:blank"],
            preexec_fn=place,
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, high_in, high_out):
            os.close(fd)
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *rest: object) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol on the page."""
        return self._send(method, arguments, self._session)

    def open(self, path: Path) -> None:
        """Load a file and wait until all of it is there."""
        before = len(self.events)
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events[before:]):
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, a promise's when it is fulfilled."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def _send(self, method: str, arguments: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        """The next message; events are kept."""
        end = time.monotonic() + self.patience
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium has said nothing for {self.patience} s")
            received = os.read(self._in, 1 << 16)
            if not received:
                raise ConnectionError(f"Chromium has ended with code {self._process.poll()}")
            self._rest += received
        line, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message
