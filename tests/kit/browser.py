"""A page in Chromium, asked over a pipe what it shows: so a test waits until something is there, not for a while."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # it reaches nobody
    "--remote-debugging-pipe",
)
COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")


class Page:
    """One page; `complaints` is what its scripts said on the console, and what could not be loaded."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = os.fdopen(requests, "wb", buffering=0), os.fdopen(answers, "rb")
        self._rest, self._asked, self._session = b"", 0, ""
        self.complaints: list[Any] = []

    def open(self, address: str) -> None:
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._ask("Runtime.enable")
        self._ask("Log.enable")
        self._ask("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript is now."""
        return self._ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def close(self) -> None:
        self._requests.close()
        self._answers.close()

    def _ask(self, method: str, **parameters: object) -> dict[str, Any]:
        self._asked += 1
        request = {"id": self._asked, "method": method, "params": parameters}
        if self._session:
            request["sessionId"] = self._session
        self._requests.write(json.dumps(request).encode() + b"\0")
        while (message := self._next()).get("id") != self._asked:
            if message.get("method") in COMPLAINTS:
                self.complaints.append(message["params"])
        assert "result" in message, message
        return message["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._answers.read1()
            assert more, "the browser is gone"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)


@contextmanager
def shown(page: Path, folder: Path, *, size: str = "1400,6000") -> Iterator[Page]:
    """A page in a browser whose window is this large, with what the browser writes in `folder`."""
    (its_end, requests), (answers, its_words) = os.pipe(), os.pipe()
    options = (*QUIET, f"--user-data-dir={folder / 'profile'}", f"--window-size={size}")
    browser = subprocess.Popen(
        # Chromium reads requests from descriptor 3 and answers on 4.
        ["bash", "-c", f'exec "$@" 3<&{its_end} 4>&{its_words}', "bash", str(CHROMIUM), *options],
        stdout=subprocess.DEVNULL,
        stderr=(folder / "browser.log").open("w"),
        pass_fds=(its_end, its_words),
        env={**os.environ, "HOME": str(folder)},
    )
    os.close(its_end)
    os.close(its_words)
    found = Page(requests, answers)
    try:
        found.open(page.as_uri())
        yield found
    finally:
        found.close()  # it ends when nobody asks any more
        browser.wait(60)
