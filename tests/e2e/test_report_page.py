"""The report in a real browser: it draws without a network, executes nothing of a response, pages by mouse and keys."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.monitor.report import build_report
from tests.synthetic_run import HOSTILE, write_run

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1300,1000",
)


class Page:
    """A report opened in the browser."""

    def __init__(self, driver: Any, path: Path) -> None:
        self.driver = driver
        driver.get(path.as_uri())
        WebDriverWait(driver, 30).until(lambda d: d.execute_script("return document.readyState") == "complete")

    def js(self, script: str) -> Any:
        return self.driver.execute_script(f"return {script}")

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({selector!r}).textContent"))

    def click(self, selector: str) -> None:
        self.driver.find_element(By.CSS_SELECTOR, selector).click()

    def press(self, key: str) -> None:
        webdriver.ActionChains(self.driver).send_keys(key).perform()

    def select(self, selector: str, value: str) -> None:
        Select(self.driver.find_element(By.CSS_SELECTOR, selector)).select_by_value(value)

    def colour_scheme(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    browser.set_page_load_timeout(60)
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_report(write_run(tmp_path_factory.mktemp("run"), steps=44))


@pytest.fixture
def page(driver: Any, report: Path) -> Page:
    return Page(driver, report)


def test_every_chart_is_drawn_without_an_error_and_without_a_request(page: Page) -> None:
    plots, drawn = page.js("document.querySelectorAll('.plot').length"), ".plot .main-svg .xy"
    assert plots >= 14
    assert page.js(f"document.querySelectorAll({drawn!r}).length") >= plots
    assert [entry for entry in page.driver.get_log("browser") if entry["level"] != "INFO"] == []
    assert page.js("performance.getEntriesByType('resource').map(e => e.name)") == []


def test_a_response_full_of_html_is_shown_as_text_and_never_runs(page: Page) -> None:
    page.select("#filter", "all")
    seen = []
    for _ in range(16):
        seen.append(page.text("#response"))
        page.click("#next")
    assert HOSTILE in seen
    assert page.js("window.hacked === undefined")
    assert page.js("document.querySelectorAll('#viewer b, #viewer img, #viewer script').length") == 0


def test_arrow_keys_page_through_samples_and_steps(page: Page) -> None:
    page.click("#meta")
    step, sample = page.js("document.getElementById('step').selectedIndex"), page.text("#count")
    assert sample.startswith("sample 1 of 16")
    page.press(Keys.ARROW_RIGHT)
    assert page.text("#count").startswith("sample 2 of 16")
    first = page.text("#response")
    page.press(Keys.ARROW_UP)
    assert page.js("document.getElementById('step').selectedIndex") == step - 1
    assert page.text("#response") != first
    page.press(Keys.ARROW_DOWN)
    page.press(Keys.ARROW_LEFT)
    assert page.text("#count") == sample
    page.press(Keys.ARROW_LEFT)
    assert page.text("#count") == sample  # the first sample is an end, not a jump to another step


def test_up_and_down_scroll_the_page_while_the_viewer_has_no_focus(page: Page) -> None:
    step = page.js("document.getElementById('step').selectedIndex")
    page.press(Keys.ARROW_UP)
    page.press(Keys.ARROW_UP)
    assert page.js("document.getElementById('step').selectedIndex") == step


def test_mouse_selects_steps_kinds_and_rewards(page: Page) -> None:
    page.select("#step", "0")
    page.select("#filter", "wrong")
    assert "correctness0.00" in page.text("#meta")
    count = page.js("document.querySelectorAll('#dots button').length")
    page.click(f"#dots button:nth-child({count})")
    assert page.text("#count").startswith(f"sample {count} of {count}")
    page.click("[data-kind=eval]")
    page.select("#step", "0")
    assert page.text("#step option:checked").startswith("0 ")
    page.select("#filter", "truncated")
    page.select("#step", "1")
    shown = page.js("document.querySelectorAll('#dots button').length")
    assert shown == 0 or "ended bylength" in page.text("#meta")
    assert page.js("document.getElementById('none').hidden") == (shown > 0)


def test_charts_follow_the_colour_scheme(page: Page) -> None:
    colour = "document.querySelector('#chart-entropy .scatterlayer .js-line').style.stroke"
    page.colour_scheme("light")
    light = page.js(colour)
    page.colour_scheme("dark")
    WebDriverWait(page.driver, 20).until(lambda _: page.js(colour) != light)
    page.colour_scheme("light")


@pytest.mark.parametrize("width", [360, 800, 1700])
def test_no_width_needs_sideways_scrolling(page: Page, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.driver.refresh()
        assert page.js("document.documentElement.scrollWidth") <= width
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_run_that_has_only_begun_still_makes_a_page(driver: Any, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: begun\nsteps: 5\n", "utf-8")
    page = Page(driver, build_report(tmp_path))
    assert page.text("h1") == "begun"
    assert "No step has been recorded yet" in page.text("main")
    assert [entry for entry in driver.get_log("browser") if entry["level"] != "INFO"] == []
