"""The measure command: a person's view of the ruler."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pipeline.errors import InputError
from pipeline.measure import base_url
from tests.fakes.running import fake_server, free_port

QUICK = ["--concurrency", "2", "--requests", "4", "--repeats", "2", "--output-tokens", "8", "--ci-width", "10"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline.measure", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_server(ttft_ms=10, step_ms=3) as running:
        yield running


def test_json_holds_the_plan_and_every_level(url: str) -> None:
    done = run(url, "--json", *QUICK)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [level["level"]["workload"] for level in data["levels"]] == ["extract", "open"]
    assert all(level["requests_ok"] == 8 for level in data["levels"])
    assert data["plan"]["load"]["concurrency"] == [2]


def test_the_table_has_a_line_a_level_and_phases_go_to_stderr(url: str) -> None:
    done = run(url.removeprefix("http://") + "/v1", "--prompts", "open", *QUICK)
    head, line, *_notes = done.stdout.splitlines()
    assert "tok/s" in head and "TTFT p50" in head
    assert line.split()[0] == "open.c2"
    assert "open.c2 1/2" in done.stderr


def test_an_open_loop_can_be_asked_for(url: str) -> None:
    done = run(url, "--json", "--rate", "50", "--prompts", "open", *QUICK[2:])
    assert json.loads(done.stdout)["levels"][0]["level"]["request_rate"] == 50


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--concurrency", "0", "0 does not fit; expected greater than 0"),
        ("--rate", "nan", "nan does not fit; expected greater than 0"),
        ("--budget-s", "1e9", "1000000000.0 does not fit; expected less than or equal to 604800"),
        ("--ci-width", "-1", "-1.0 does not fit; expected greater than 0"),
    ],
)
def test_a_flag_that_does_not_fit_is_one_clear_line(flag: str, value: str, words: str) -> None:
    done = run("127.0.0.1:9", flag, value)
    assert (done.returncode, done.stderr) == (2, f"error: {flag}: {words}\n")


def test_nothing_listening_is_one_clear_line() -> None:
    done = run(f"127.0.0.1:{(port := free_port())}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: nothing listens at 127.0.0.1:{port}\n"


def test_an_unknown_prompt_set_names_the_nearest(url: str) -> None:
    done = run(url, "--prompts", "extrat")
    assert done.returncode == 2
    assert "did you mean 'extract'" in done.stderr
    assert "Traceback" not in done.stderr


def test_addresses_may_be_short() -> None:
    assert base_url("localhost:1/v1/") == base_url("http://localhost:1") == "http://localhost:1"
    with pytest.raises(InputError, match="not an HTTP address"):
        base_url("ftp://x")
