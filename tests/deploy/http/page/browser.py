"""A headless Chromium, driven by chromedriver's own protocol (W3C WebDriver): nothing is installed for it."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMEDRIVER = shutil.which("chromedriver")
MISSING = "needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
TIMEOUT_S = 90.0


class Browser:
    """One tab."""

    def __init__(self, port: int) -> None:
        self._port = port
        options = {"binary": CHROMIUM, "args": OPTIONS}
        logs = {"browser": "ALL"}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": logs}
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        self._path = f"/session/{session}"

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = HTTPConnection("localhost", self._port, timeout=TIMEOUT_S)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"content-type": "application/json"})
            value = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        assert not (isinstance(value, dict) and "error" in value), value
        return value

    def open(self, address: str) -> None:
        self._call("POST", f"{self._path}/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """The script's result; the page's Content-Security-Policy does not hold for it."""
        return self._call("POST", f"{self._path}/execute/sync", {"script": script, "args": arguments})

    def wait(self, expression: str) -> Any:
        """Its value, once that is true."""
        end_s = time.monotonic() + TIMEOUT_S
        while not (value := self.run(f"return {expression}")):
            assert time.monotonic() < end_s, f"{expression} has not become true"
            time.sleep(0.1)
        return value

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def enter(self, selector: str, value: str) -> None:
        self.run("document.querySelector(arguments[0]).value = arguments[1]", selector, value)

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """The size of the window in CSS pixels, and the wanted colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._devtools("Emulation.setEmulatedMedia", {"features": features})

    def picture(self) -> bytes:
        """A PNG of what is seen."""
        return base64.b64decode(self._call("GET", f"{self._path}/screenshot"))

    def complaints(self) -> list[str]:
        """Errors and violations of the policy that the browser has logged since the last call."""
        entries = self._call("POST", f"{self._path}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def close(self) -> None:
        self._call("DELETE", self._path)

    def _devtools(self, command: str, parameters: dict[str, Any]) -> None:
        self._call("POST", f"{self._path}/goog/cdp/execute", {"cmd": command, "params": parameters})


@contextmanager
def browser() -> Iterator[Browser]:
    """Ends with the block, the driver, too."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    assert CHROMEDRIVER is not None
    driver = subprocess.Popen([CHROMEDRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        tab = Browser(port)
        try:
            yield tab
        finally:
            tab.close()
    finally:
        driver.terminate()
        driver.wait()


def _wait_for(port: int) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            socket.create_connection(("localhost", port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < end_s, "chromedriver does not answer"
            time.sleep(0.1)
        else:
            return
