"""Screenshots for the README, from a real study: the report, and MLflow's pages where the study was logged.

    python benchmarks/screenshots.py STUDY [--out docs/img]

Needs Chromium (`apt-get install chromium`) and playwright (the `dev` extra). MLflow's server is started on a
free port for the time of the pictures. A picture has 256 colours and must stay below 200 kB.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.mlflow_trial import STUDY_TAG
from pipeline.mlflow_view import compare_url, view_url
from pipeline.report import study_report, write_html
from pipeline.reporting.figures import leaders
from pipeline.store import Study
from pipeline.tracking import TRIAL_TAG
from pipeline.ui import server

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
LIMIT_MS = 120_000  # MLflow's pages take their time on a busy machine
LARGEST = 200_000
WINDOWS = (("report", 1280, "light"), ("report-dark", 1280, "dark"), ("report-400", 400, "light"))
CLOSE_ASSISTANT = "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"


def main() -> int:
    """Take the pictures; return 0, or 2 where something needed is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study")
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    asked = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("error: no Chromium; apt-get install chromium", file=sys.stderr)
        return 2
    from playwright.sync_api import sync_playwright

    study = Study.open(asked.study)
    asked.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS, timeout=LIMIT_MS)
        shoot_report(browser, study, asked.out)
        shoot_mlflow(browser, study, asked.out)
        browser.close()
    return 0


def shoot_report(browser: Any, study: Study, out: Path) -> None:
    """First screens, light, dark and narrow, and the break-even plot."""
    with tempfile.TemporaryDirectory() as folder:
        url = write_html(study_report(study), Path(folder) / "report.html").as_uri()
        for name, width, scheme in WINDOWS:
            page = open_page(browser, url, width, scheme)
            page.wait_for_selector(".main-svg", timeout=LIMIT_MS)
            save(page, out / f"{name}.png")
            plot = page.locator("figure:has([data-figure=break_even])")
            if name == "report" and plot.count():
                save(plot, out / "break-even.png")


def shoot_mlflow(browser: Any, study: Study, out: Path) -> None:
    """The study's saved view, its charts, and the compare page of a few trials."""
    experiment = study.facts.get("mlflow_experiment_id")
    if experiment is None:
        print("this study was not logged to MLflow: no pictures of it")
        return
    with serving(study.folder.parent) as base:
        pages = {
            "mlflow-table": (view_url(base, experiment, study.name), ".ag-center-cols-container [role=row]"),
            "mlflow-charts": (view_url(base, experiment, study.name, "CHART"), ".js-plotly-plot"),
            "mlflow-compare": (compare_url(base, experiment, some_runs(study)), ".js-plotly-plot"),
        }
        for name, (url, ready) in pages.items():
            page = open_page(browser, url, 1280, "light")
            page.wait_for_selector(ready, timeout=LIMIT_MS)
            page.wait_for_timeout(2000)  # the plots fade in
            save(page, out / f"{name}.png")


def some_runs(study: Study) -> list[str]:
    """A run of the baseline, of the winner and of the best of each algorithm."""
    from mlflow import MlflowClient

    client = MlflowClient(study.facts["mlflow_uri"])
    query = f"tags.`{STUDY_TAG}` = '{study.name}'"
    found = client.search_runs([str(study.facts["mlflow_experiment_id"])], query, max_results=1000)
    runs = {run.data.tags.get(TRIAL_TAG): run.info.run_id for run in found}
    shown = [str(row.trials[0]) for row in leaders(study_report(study).ranking)]
    return [runs[trial] for trial in shown if trial in runs][:4]


def open_page(browser: Any, url: str, width: int, scheme: str) -> Any:
    """A fresh page at `url`."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.add_init_script(CLOSE_ASSISTANT)
    page.goto(url, timeout=LIMIT_MS)
    return page


def save(page: Any, path: Path) -> None:
    """Write what the window, or a part of the page, shows, as a small file."""
    from PIL import Image

    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path}: {size / 1000:.0f} kB")
    if size > LARGEST:
        raise ValueError(f"{path} has {size} bytes; the most is {LARGEST}")


@contextmanager
def serving(runs: Path, limit_s: float = 90) -> Iterator[str]:
    """MLflow's server, as `make ui` starts it, on a free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command, added = server(runs, port)
    process = subprocess.Popen(
        command, env={**os.environ, **added}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        wait(f"http://127.0.0.1:{port}/health", limit_s)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def wait(url: str, limit_s: float) -> None:
    """Return once `url` answers."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(f"{url} did not answer within {limit_s} s")


if __name__ == "__main__":
    sys.exit(main())
