"""The report in a real Chromium: it draws, says what is under the pointer, zooms, and fits a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.browser import CHROMIUM, DRIVER, MISSING, Browser, chromium
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of, two_towers
from helpers.timelines import simulated_timeline
from report.pages import CANVAS, Picture, thousand_devices, write_page
from report.test_report_page import HOSTILE, hostile_plan
from spindle_cli.files.artifact import to_compact_json, write_json
from spindle_cli.files.run_files import (
    Comparison,
    DeviceTimes,
    MetaOpComparison,
    PredictedVsMeasured,
    StepMetrics,
)
from spindle_cli.report.build import build_report
from spindle_cli.report.page import render_page

pytestmark = pytest.mark.skipif(not (DRIVER and CHROMIUM), reason=MISSING)

SECTIONS = ["schedule", "use", "work", "memory", "strategies", "curves", "run"]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def browser(session: Browser) -> Browser:
    """On a desktop's screen, light, its console empty."""
    session.resize(1200, 900)
    session.prefer("light")
    session.log()
    return session


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """towers.html with everything in it; work.html: 6 GFLOP/s for 3 s, sequential 4 and then 2 for 6 s;
    hostile.html; thousand.html.
    """
    folder = tmp_path_factory.mktemp("pages")
    profile, plan = two_towers()
    run = folder / "run"
    run.mkdir()
    metrics = [
        StepMetrics(step=n, loss=4.0 / n, task_losses={"pairs": 4.0 / n}, iteration_s=4.0) for n in (1, 2, 3)
    ]
    (run / "metrics.jsonl").write_text("".join(each.to_line() for each in metrics))
    compared = PredictedVsMeasured(
        steps=2,
        iteration=Comparison(predicted_s=3.8, measured_s=4.0),
        metaops=(MetaOpComparison(metaop="pairs/vision", predicted_s=3.6, measured_s=3.5),),
        devices=tuple(DeviceTimes(device=d, compute_s=3.0, wait_s=0.9, data_s=0.1) for d in range(4)),
    )
    write_json(run / "predicted.json", compared)
    (run / "timeline.json").write_text(to_compact_json(simulated_timeline(plan, {})), encoding="utf-8")
    whole = render_page(build_report(plan, profile=profile, run_dir=run))
    (folder / "towers.html").write_text(whole, encoding="utf-8")
    one, other = (
        metaop_of(f"{task}/net", 1, {1: 3.0}, flops_per_op=rate * 1e9) for task, rate in (("a", 4), ("b", 2))
    )
    counted = profile_of(one, other)
    wave = (slice_of(one, (0, 1), (0,), 0.0), slice_of(other, (0, 1), (1,), 0.0))
    work = render_page(build_report(plan_of(counted, cluster_of(2), [wave], 3.0), profile=counted))
    (folder / "work.html").write_text(work, encoding="utf-8")
    write_page(folder / "hostile.html", hostile_plan())
    write_page(folder / "thousand.html", thousand_devices())
    return folder


def hover(browser: Browser, seconds: float, row: float) -> str:
    """What the tooltip says with the pointer there; '' if there is none."""
    browser.mouse("mouseMoved", *Picture.of(browser).at(seconds, row))
    script = "const t = document.querySelector('#tooltip'); return t.hidden ? '' : t.textContent"
    return str(browser.run(script))


def wheel(browser: Browser, seconds: float, row: float, delta: float, **more: int) -> None:
    x, y = Picture.of(browser).at(seconds, row)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=delta, **more)


def pixel(browser: Browser, seconds: float, row: float) -> list[int]:
    """Red, green and blue of the canvas there."""
    x, y = Picture.of(browser).at(seconds, row)
    script = """
        const canvas = document.querySelector(arguments[0]);
        const box = canvas.getBoundingClientRect();
        const scale = canvas.width / box.width;
        const at = [(arguments[1] - box.left) * scale, (arguments[2] - box.top) * scale];
        return [...canvas.getContext('2d').getImageData(...at, 1, 1).data].slice(0, 3);
    """
    colour: list[int] = browser.run(script, CANVAS, x, y)
    return colour


def overflow(browser: Browser) -> int:
    """CSS pixels by which the page is wider than the screen."""
    return int(browser.run("return document.documentElement.scrollWidth - innerWidth"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_is_drawn_without_errors_or_requests(browser: Browser, pages: Path, scheme: str) -> None:
    browser.prefer(scheme)
    browser.open(pages / "towers.html")
    for view in ("measured", "simulated", "planned"):
        browser.click(f"[data-value={view}]")
    assert browser.log() == []
    assert browser.run("return [...document.querySelectorAll('section')].map((each) => each.id)") == SECTIONS
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    count = "return document.querySelectorAll(arguments[0]).length"
    assert browser.run(count, ".chart > svg") == browser.run(count, ".chart") > 5
    assert "3.8 s" in browser.text("#header")
    page = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (page == "rgb(255, 255, 255)") == (scheme == "light")


def test_the_picture_has_the_slices_colours(browser: Browser, pages: Path) -> None:
    browser.open(pages / "towers.html")
    browser.click("[data-value=component]")
    vision, text, idle = pixel(browser, 1.5, 0.4), pixel(browser, 0.75, 2.4), pixel(browser, 2.5, 2.4)
    assert vision != text and idle not in (vision, text)
    assert pixel(browser, 3.1, 3.2) == vision  # its last op, on all four devices


def said_by_marks(browser: Browser, chart: str) -> list[str]:
    """What the tooltip says of each mark of a chart, one after another."""
    script = """
        return [...document.querySelectorAll(arguments[0] + ' .mark')].map((mark) => {
          mark.dispatchEvent(new PointerEvent('pointerenter'));
          return document.querySelector('#tooltip').textContent;
        });
    """
    return [str(said) for said in browser.run(script, chart)]


def test_the_cluster_s_work_over_time_is_drawn_beside_sequential_s(browser: Browser, pages: Path) -> None:
    """40 strips over 6 s: in the 20th the plan does 6 GFLOP/s, in the 21st nothing any more; sequential runs
    forward 1 s at 4 and 1 s at 2, then backward 2 s at 2 and 2 s at 4.
    """
    browser.open(pages / "work.html")
    browser.show("#work .chart")
    assert browser.log() == []
    assert browser.run("return document.querySelectorAll('#work .chart > svg path.line').length") == 2
    strips = said_by_marks(browser, "#work svg[aria-label^='FLOP']")
    assert len(strips) == 40
    expected = {0: ("6", "4"), 7: ("6", "2"), 19: ("6", "2"), 20: ("0", "2"), 27: ("0", "4"), 39: ("0", "4")}
    for index, (own, beside) in expected.items():
        unit = {"0": " ", "6": " G"}[own]
        assert f"{own}{unit}FLOP/s" in strips[index], strips[index]
        assert f"{beside} GFLOP/s" in strips[index], strips[index]
    table = browser.text("#work table")
    assert "6 GFLOP/s" in table and "3 GFLOP/s" in table
    (both,) = said_by_marks(browser, "#work svg[aria-label^='Least']")[:1]
    assert "spindle" in both and "sequential" in both and " to " in both
    assert not browser.run("return document.querySelectorAll('#work .missing').length")


def test_what_is_missing_of_the_cluster_s_work_is_said(browser: Browser, pages: Path) -> None:
    browser.open(pages / "thousand.html")
    missing = browser.run("return [...document.querySelectorAll('#work .missing')].map((p) => p.textContent)")
    assert len(missing) == 2
    assert "has not counted the operations" in missing[0] and "--profile" in missing[1]
    assert browser.run("return document.querySelectorAll('#work .chart > svg').length") == 1


@pytest.mark.parametrize(
    ("seconds", "row", "said"),
    [
        (1.5, 0, "pairs/vision[0:3]"),
        (1.0, 3, "pairs/text[0:3]"),
        (3.3, 2, "pairs/vision[3:4]"),
        (3.7, 0, "pairs/loss[0:1]"),
        (2.5, 2, ""),
    ],
)
def test_hovering_says_the_slice_under_the_pointer(
    browser: Browser, pages: Path, seconds: float, row: int, said: str
) -> None:
    browser.open(pages / "towers.html")
    text = hover(browser, seconds, row)
    assert text.startswith(said) and bool(text) == bool(said)
    if said:
        assert f"device {row}" in text


def test_the_simulation_says_what_a_device_does(browser: Browser, pages: Path) -> None:
    """Forward takes a third: vision's first three ops on device 0 from 0 to 1 s."""
    browser.open(pages / "towers.html")
    browser.click("[data-value=simulated]")
    assert hover(browser, 0.5, -0.2).startswith("Forward of pairs/vision[0:3]")
    assert hover(browser, 3.0, -0.2).startswith("Backward of pairs/vision[0:3]")
    assert hover(browser, 0.8, 2.8 - 1).startswith("Wait before pairs/vision[3:4]")


def test_the_measured_iteration_is_drawn_like_the_simulated_one(browser: Browser, pages: Path) -> None:
    browser.open(pages / "towers.html")
    browser.click("[data-value=measured]")
    assert "as measured" in browser.text("#schedule .caption")
    assert hover(browser, 0.5, -0.2).startswith("Forward of pairs/vision[0:3]")
    assert hover(browser, 3.0, -0.2).startswith("Backward of pairs/vision[0:3]")


def test_the_wheel_zooms_at_the_pointer(browser: Browser, pages: Path) -> None:
    browser.open(pages / "towers.html")
    before = Picture.of(browser)
    wheel(browser, 1.0, 1, -300)
    after = Picture.of(browser)
    assert after.x1 - after.x0 < 0.8 * (before.x1 - before.x0)
    assert (after.y0, after.y1) == (before.y0, before.y1)
    assert after.at(1.0, 1)[0] == pytest.approx(before.at(1.0, 1)[0], abs=1.5)
    wheel(browser, 1.0, 1, -300, modifiers=8)  # with Shift: the rows
    assert Picture.of(browser).y1 - Picture.of(browser).y0 < before.y1 - before.y0
    assert hover(browser, 1.0, 1).startswith("pairs/vision[0:3]")


def test_the_wheel_scrolls_the_page_when_there_is_nothing_to_zoom_out_of(
    browser: Browser, pages: Path
) -> None:
    browser.open(pages / "towers.html")
    browser.run("addEventListener('wheel', (event) => { window.wasKept = event.defaultPrevented; })")
    wheel(browser, 1.0, 1, 200)
    assert browser.run("return window.wasKept") is False
    assert Picture.of(browser).x1 == pytest.approx(3.8)


def test_buttons_keys_drags_and_double_clicks_move_the_view(browser: Browser, pages: Path) -> None:
    browser.open(pages / "towers.html")
    whole = Picture.of(browser).view
    browser.click("[aria-label='Zoom in in time']")
    zoomed = Picture.of(browser)
    assert zoomed.x1 - zoomed.x0 < whole[1]
    x, y = zoomed.at((zoomed.x0 + zoomed.x1) / 2, 1)
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    dragged = Picture.of(browser)
    seconds_per_px = (zoomed.x1 - zoomed.x0) / zoomed.width
    assert dragged.x0 - zoomed.x0 == pytest.approx(100 * seconds_per_px, rel=0.05)
    browser.run("document.querySelector(arguments[0]).focus()", CANVAS)
    browser.key("0")
    assert Picture.of(browser).view == whole
    browser.key("+")
    assert Picture.of(browser).x1 < whole[1]
    browser.click("[aria-label='Show everything']")
    x, y = Picture.of(browser).at(1.0, 2)
    for count in (1, 2):
        browser.mouse("mousePressed", x, y, button="left", clickCount=count)
        browser.mouse("mouseReleased", x, y, button="left", clickCount=count)
    shown = Picture.of(browser)
    assert shown.x1 < 2.0 and shown.y0 > 1.0  # text on devices 2 and 3, until 1.5 s


def test_keys_walk_through_the_slices_and_say_each(browser: Browser, pages: Path) -> None:
    browser.open(pages / "towers.html")
    browser.run("document.querySelector(arguments[0]).focus()", CANVAS)
    said = []
    for _ in range(4):
        browser.key("n")
        said.append(browser.text("#schedule-details strong"))
    assert said == ["pairs/vision[0:3]", "pairs/text[0:3]", "pairs/vision[3:4]", "pairs/loss[0:1]"]
    browser.key("Escape")
    assert "pairs" not in browser.text("#schedule-details")


def test_keys_walk_through_the_marks_of_a_chart(browser: Browser, pages: Path) -> None:
    browser.open(pages / "towers.html")
    browser.show("#memory svg")
    browser.run("document.querySelector('#memory svg').focus()")
    browser.key("ArrowRight")
    first = browser.text("#tooltip")
    browser.key("ArrowRight")
    assert first.startswith("Device") and browser.text("#tooltip") != first


def test_rows_can_be_components_and_the_legend_singles_out(browser: Browser, pages: Path) -> None:
    browser.open(pages / "towers.html")
    browser.click("[data-value=components]")
    assert Picture.of(browser).y1 == 7  # vision at most on 4, text on 2, the loss on 1
    assert hover(browser, 1.0, 5).startswith("pairs/text[0:3]")
    browser.click("[data-value=component]")
    before = pixel(browser, 1.5, 0.4)
    browser.click(".legend-entry:nth-child(2)")  # text alone
    assert pixel(browser, 1.5, 0.4) != before
    browser.click(".legend-entry:nth-child(2)")
    assert pixel(browser, 1.5, 0.4) == before


@pytest.mark.parametrize("page", ["towers", "hostile", "thousand"])
def test_a_phone_shows_it_without_scrolling_sideways(browser: Browser, pages: Path, page: str) -> None:
    browser.resize(360, 740, mobile=True, scale=2)
    browser.open(pages / f"{page}.html")
    assert overflow(browser) <= 0
    browser.click("[data-value=simulated]")
    browser.run("for (const each of document.querySelectorAll('details')) each.open = true")
    browser.settle()
    assert overflow(browser) <= 0
    assert browser.log() == []


def test_fingers_tap_and_pinch(browser: Browser, pages: Path) -> None:
    browser.resize(360, 740, mobile=True, scale=2)
    browser.open(pages / "towers.html")
    before = Picture.of(browser)
    x, y = before.at(1.5, 0)
    browser.touch("touchStart", (x, y))
    browser.touch("touchEnd")
    assert browser.text("#schedule-details strong") == "pairs/vision[0:3]"
    y = before.at(0, 1.5)[1]
    browser.touch("touchStart", (130, y), (230, y))
    browser.touch("touchMove", (105, y), (255, y))
    browser.touch("touchMove", (80, y), (280, y))
    browser.touch("touchEnd")
    after = Picture.of(browser)
    assert after.x1 - after.x0 == pytest.approx((before.x1 - before.x0) / 2, rel=0.15)


def test_names_that_look_like_markup_are_only_text(browser: Browser, pages: Path) -> None:
    browser.open(pages / "hostile.html")
    assert browser.run("return document.title") != "pwned"
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert browser.text("h1") == HOSTILE
    assert hover(browser, 1.5, 0).startswith(f"pairs/vision{HOSTILE}[0:3]")
    assert browser.log() == []


def test_a_thousand_devices_can_be_told_apart(browser: Browser, pages: Path) -> None:
    page = pages / "thousand.html"
    assert page.stat().st_size < 300_000
    browser.open(page)
    assert hover(browser, 0.5, 100).startswith("task/a[0:1]")
    assert hover(browser, 0.5, 900).startswith("task/b[0:1]")
    assert hover(browser, 1.25, 700).startswith("task/c[0:1]")  # one device, half a pixel high
    for _ in range(30):
        wheel(browser, 1.25, 700, -300, modifiers=8)
    shown = Picture.of(browser)
    assert shown.y1 - shown.y0 == pytest.approx(2)
    assert "device 700" in hover(browser, 1.25, 700)
    assert hover(browser, 1.25, 700.95 if shown.y1 > 701.5 else 699.05) == ""
