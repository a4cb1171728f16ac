"""What a person sees: the report and MLflow's pages of a study, in a headless Chromium."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.mlflow_view import compare_url, view_url
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
    axes = page.locator("[data-figure=parallel] .main-svg").first
    assert axes.evaluate("node => node.getBoundingClientRect().width") > 700  # wide enough to read; it scrolls
    assert errors == []


def test_dark_mode_and_print_are_readable(browser: Any, page_file: Path) -> None:
    page, errors = opened(browser, page_file.as_uri(), 1280, "dark")
    fill = "getComputedStyle(document.querySelector('[data-figure=break_even] .xtick text')).fill"
    assert page.evaluate(fill) == "rgb(230, 232, 235)"
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"{fill} === 'rgb(31, 35, 40)'", timeout=LIMIT_MS)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"{fill} === 'rgb(230, 232, 235)'", timeout=LIMIT_MS)
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")  # paper is white, and narrower than a screen
    page.wait_for_function(f"{fill} === 'rgb(0, 0, 0)'", timeout=LIMIT_MS)
    plot = page.locator("[data-figure=break_even] .main-svg").first
    assert plot.evaluate("node => node.getBoundingClientRect().width") == 680
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    page.wait_for_function(f"{fill} === 'rgb(230, 232, 235)'", timeout=LIMIT_MS)
    assert page.pdf()[:5] == b"%PDF-"
    assert errors == []


@pytest.fixture(scope="module")
def mlflow_pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, list[str]]]:
    """A study logged as the driver logs it, and the server that `make ui` starts: base URL, experiment, runs."""
    from mlflow import MlflowClient
    from pipeline.store import Study
    from pipeline.tracking import MlflowTracker
    from pipeline.ui import server

    root = tmp_path_factory.mktemp("runs")
    study = Study.open(full_study().write(root))
    tracker = MlflowTracker(study, f"sqlite:///{root}/mlflow.db")
    tracker.open()
    tracker.finish({"winner": "EAGLE3"}, [])
    experiment = str(study.facts["mlflow_experiment_id"])
    runs = MlflowClient(tracker.uri).search_runs([experiment], order_by=["metrics.objective DESC"])
    chosen = [run for run in runs if "objective" in run.data.metrics]
    command, added = server(root, free_port())
    base = f"http://127.0.0.1:{added['MLFLOW_PORT']}"
    with (root / "ui.log").open("w") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **added}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until_answering(f"{base}/health", process)
        yield base, experiment, [chosen[0].info.run_id, chosen[len(chosen) // 2].info.run_id, chosen[-1].info.run_id]
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_until_answering(url: str, process: subprocess.Popen[bytes], limit_s: float = 90) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        assert process.poll() is None, "the MLflow server ended"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"{url} did not answer within {limit_s} s")


def mlflow_page(browser: Any, url: str) -> Any:
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    page = context.new_page()
    # MLflow's assistant covers a third of the page the first time.
    page.add_init_script("localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')")
    page.goto(url, timeout=LIMIT_MS)
    return page


@pytest.mark.slow
def test_mlflow_shows_which_and_why(browser: Any, mlflow_pages: tuple[str, str, list[str]]) -> None:
    base, experiment, _ = mlflow_pages
    page = mlflow_page(browser, view_url(base, experiment, "gpu2"))
    page.get_by_text("26 matching runs").wait_for(timeout=LIMIT_MS)
    header = page.locator("[role=columnheader]").all_inner_texts()
    for column in ("accept_length", "objective", "speedup_vs_baseline", "algorithm"):
        assert any(column in text for text in header), header
    first = page.locator("[data-testid=experiment-view-table-run-name], a[href*='/runs/']").first
    assert "EAGLE3 steps=3" in first.inner_text()
    charts = mlflow_page(browser, view_url(base, experiment, "gpu2", "CHART"))
    charts.get_by_text("Which and why").wait_for(timeout=LIMIT_MS)
    charts.get_by_text("Parallel Coordinates").first.wait_for(timeout=LIMIT_MS)


@pytest.mark.slow
def test_mlflows_compare_page_plots_the_speed_up(browser: Any, mlflow_pages: tuple[str, str, list[str]]) -> None:
    base, experiment, runs = mlflow_pages
    page = mlflow_page(browser, compare_url(base, experiment, runs))
    page.get_by_text("Comparing 3 Runs from 1 Experiment").wait_for(timeout=LIMIT_MS)
    page.locator(".js-plotly-plot").first.wait_for(timeout=LIMIT_MS)
    assert page.get_by_text("speedup_vs_baseline").first.is_visible()
    assert page.get_by_text("algorithm", exact=True).first.is_visible()
    assert page.get_by_text(re.compile(r"^\d{3} EAGLE3 ")).first.is_visible()
