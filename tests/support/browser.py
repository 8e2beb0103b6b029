"""Pages in a headless Chromium, by the WebDriver protocol (W3C), which chromedriver speaks over HTTP."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1920,1200"),
)
PROGRAMS = ("chromium", "chromedriver")
needs_browser = pytest.mark.skipif(
    not all(map(shutil.which, PROGRAMS)), reason=f"needs {' and '.join(PROGRAMS)} (Debian: chromium, chromium-driver)"
)


class Browser:
    """One window.

    Args:
        url: of the session at chromedriver.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def open(self, page: str) -> None:
        _call("POST", f"{self.url}/url", {"url": page})

    def run(self, script: str) -> Any:
        """What a script returns, as JSON."""
        return _call("POST", f"{self.url}/execute/sync", {"script": script, "args": []})


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile.

    Args:
        folder: for the profile.
    """
    port = free_port()
    with process("chromedriver", f"--port={port}"):
        driver = f"http://127.0.0.1:{port}"
        wait_for(lambda: _call("GET", f"{driver}/status")["ready"], "chromedriver to answer")
        options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={folder}"]}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        session = f"{driver}/session/{_call('POST', f'{driver}/session', wanted)['sessionId']}"
        try:
            yield Browser(session)
        finally:
            _call("DELETE", session)


@contextmanager
def process(*command: str) -> Iterator[None]:
    """A program that runs meanwhile."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as running:
        try:
            yield
        finally:
            running.terminate()


def wait_for(condition: Callable[[], Any], awaited: str, seconds: float = 60.0) -> None:
    """Wait until a condition holds; a server that does not answer yet counts as no."""
    last: Any = None
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if last := condition():
                return
        except (urllib.error.URLError, ConnectionError) as error:
            last = error
        time.sleep(0.3)
    raise TimeoutError(f"waited {seconds:.0f} s for {awaited}: {last}")


def answer(url: str) -> Any:
    """What a server answers, as JSON."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.loads(response.read())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _call(method: str, url: str, body: object = None) -> Any:
    """A WebDriver command: what its answer holds."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())["value"]
