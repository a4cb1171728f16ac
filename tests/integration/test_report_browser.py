"""What a person sees: the report and MLflow's pages of a study, in a headless Chromium."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.report import load_report, write_html
from tests.fakes.fake_study import full_study

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
LIMIT_MS = 60_000

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=LIMIT_MS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    return write_html(load_report(str(full_study().write(root))), root / "report.html")


def opened(browser: Any, url: str, width: int, scheme: str = "light") -> tuple[Any, list[str]]:
    """A page without network, and the errors of its console."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url, timeout=LIMIT_MS)
    page.wait_for_function("document.querySelectorAll('.main-svg').length >= 8", timeout=LIMIT_MS)
    return page, errors


@pytest.mark.parametrize("width", [400, 1280])
def test_the_report_shows_what_a_person_must_see(browser: Any, page_file: Path, width: int) -> None:
    page, errors = opened(browser, page_file.as_uri(), width)
    for card in (".winner", ".baseline", ".speed-up", ".noise-floor"):
        assert page.locator(f".answers {card}").is_visible()
    assert re.search(r"\d ± \d", page.locator(".answers .winner").inner_text())
    assert "faster than the baseline" in page.locator("h1").inner_text()
    assert page.locator(".answers").bounding_box()["y"] < 900  # on the first screen
    plot = page.locator("[data-figure=break_even]")
    assert plot.get_by_text("break-even line").is_visible()
    assert plot.get_by_text(re.compile(r"break-even \d\.\d\d")).is_visible()
    line = plot.locator(".scatterlayer .js-line").first
    assert line.evaluate("node => node.getBoundingClientRect().width") > width / 3
    assert line.evaluate("node => getComputedStyle(node).stroke") == "rgb(192, 57, 43)"
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing pushes the page sideways
    assert errors == []


def test_dark_mode_and_print_are_readable(browser: Any, page_file: Path) -> None:
    page, errors = opened(browser, page_file.as_uri(), 1280, "dark")
    fill = "getComputedStyle(document.querySelector('[data-figure=break_even] .xtick text')).fill"
    assert page.evaluate(fill) == "rgb(230, 232, 235)"
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"{fill} === 'rgb(31, 35, 40)'", timeout=LIMIT_MS)
    assert page.pdf()[:5] == b"%PDF-"
    assert errors == []
