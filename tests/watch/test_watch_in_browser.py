"""The live page in a real Chromium: it follows the run, and says when it cannot."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.browser import CHROMIUM, DRIVER, MISSING, Browser, chromium
from report.test_report_page import HOSTILE, hostile_plan
from spindle_cli.files.runs.records import note_ended, note_started
from spindle_cli.watch.server import WatchServer
from spindle_cli.watch.session import WatchSession
from watch.runs import append, launched, step

pytestmark = pytest.mark.skipif(not (DRIVER and CHROMIUM), reason=MISSING)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as started:
        started.resize(1200, 900)
        yield started


def until(found: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120
    while not found():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_the_page_follows_the_run(browser: Browser, tmp_path: Path) -> None:
    run = launched(tmp_path, hostile_plan(), steps=2000)
    append(run, *(step(number, 1000.0 / number, peak_share=0.25) for number in range(1, 1301)))
    note_started(run, 0, 2000, None)
    with WatchServer(WatchSession(run), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            browser.call("POST", "/url", {"url": server.url})
            browser.settle()
            assert "1,300of 2,000" in browser.text("#header")
            assert HOSTILE in browser.text("h1")
            assert browser.run("return document.title") != "pwned"
            charts = (
                "return [...document.querySelectorAll('#run .chart svg')].map((each) => each.dataset.scale)"
            )
            assert browser.run(charts) == ["log", "linear", "linear"]
            count = "return document.querySelectorAll('#run path.range[d*=V]').length"
            assert browser.run(count) == 3  # the total, its task, the time: least to most
            append(run, step(1301))
            until(lambda: "1,301of" in browser.text("#header"))
            note_started(run, 1200, 2000, "worker 1 was killed")
            note_ended(run, "failed", "<b>worker 1</b> failed")
            until(lambda: browser.run("return document.querySelector('#state').dataset.state") == "failed")
            assert "<b>worker 1</b> failed" in browser.text("#notices")
            assert "worker 1 was killed" in browser.text("#attempts")
            assert browser.log() == []
        finally:
            server.shutdown()
            thread.join()
