"""A headless Chromium, driven through WebDriver with the standard library alone."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRIVER = shutil.which("chromedriver")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
MISSING = "needs Chromium and its driver (Debian: apt-get install chromium chromium-driver)"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of a reference to an element (W3C WebDriver, 11)


@dataclass
class Browser:
    """A browser session. Coordinates are CSS pixels of the window."""

    session: str
    _opener: urllib.request.OpenerDirector

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One WebDriver command; its value."""
        return _call(self._opener, method, f"{self.session}{path}", body)

    def cdp(self, command: str, **parameters: Any) -> Any:
        """One command of the Chrome DevTools protocol."""
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, page: Path) -> None:
        """Load a file, and wait until its charts are drawn."""
        self.call("POST", "/url", {"url": page.resolve().as_uri()})
        self.settle()

    def settle(self) -> None:
        """Wait for two animation frames: what was asked for has been drawn."""
        script = "const d = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => d(1)));"
        self.call("POST", "/execute/async", {"script": script, "args": []})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """The text of the first element that matches."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def show(self, selector: str) -> None:
        """Scroll an element into the middle of the window."""
        script = "document.querySelector(arguments[0]).scrollIntoView({block: 'center', behavior: 'instant'})"
        self.run(script, selector)
        self.settle()

    def click(self, selector: str) -> None:
        """Scroll to an element and click it."""
        self.show(selector)
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})
        self.call("POST", f"/element/{found[ELEMENT]}/click", {})
        self.settle()

    def resize(self, width: int, height: int, *, mobile: bool = False, scale: float = 1) -> None:
        """Show the page as on a screen of this size."""
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=mobile,
        )
        self.cdp("Emulation.setTouchEmulationEnabled", enabled=mobile)
        self.settle()

    def prefer(self, scheme: str) -> None:
        """'light' or 'dark'."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.cdp("Emulation.setEmulatedMedia", features=features)
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A real mouse event: 'mouseMoved', 'mousePressed', 'mouseReleased' or 'mouseWheel'."""
        self.cdp("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.settle()

    def touch(self, kind: str, *points: tuple[float, float]) -> None:
        """Fingers: 'touchStart', 'touchMove' or 'touchEnd'."""
        listed = [{"x": x, "y": y, "id": index} for index, (x, y) in enumerate(points)]
        self.cdp("Input.dispatchTouchEvent", type=kind, touchPoints=listed)
        self.settle()

    def key(self, key: str) -> None:
        """Press a key on what has the focus."""
        self.cdp("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
        self.cdp("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def log(self) -> list[dict[str, Any]]:
        """What the console and the network said since the last call."""
        entries: list[dict[str, Any]] = self.call("POST", "/se/log", {"type": "browser"})
        return entries

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """What is seen, or the whole page, as PNG."""
        taken = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))


def _call(
    opener: urllib.request.OpenerDirector, method: str, url: str, body: Mapping[str, Any] | None = None
) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with opener.open(request, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{method} {url}: {error.read().decode()}") from error


@contextmanager
def chromium(profile_dir: Path, flags: Sequence[str] = FLAGS) -> Iterator[Browser]:
    """A browser of its own, with a profile folder of its own; ended at the end."""
    assert DRIVER and CHROMIUM, MISSING
    driver = subprocess.Popen(
        [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert driver.stdout
    try:
        base = f"http://127.0.0.1:{_port(driver)}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        options = {"binary": CHROMIUM, "args": [*flags, f"--user-data-dir={profile_dir}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = _call(opener, "POST", f"{base}/session", {"capabilities": {"alwaysMatch": wanted}})
        browser = Browser(f"{base}/session/{made['sessionId']}", opener)
        try:
            yield browser
        finally:
            browser.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(120)
        driver.stdout.close()


def _port(driver: subprocess.Popen[str]) -> int:
    """The port that the driver says it listens on."""
    assert driver.stdout
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (line := driver.stdout.readline()):
        if "started successfully on port" in line:
            return int(line.rsplit(" ", 1)[1].strip().rstrip("."))
    raise RuntimeError("chromedriver did not start")
