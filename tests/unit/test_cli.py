"""How a command ends: wrong flags, expected errors and readers that leave, each in one line or none."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer

from pipeline.cli import run_command
from pipeline.errors import FastverifyError, UserError

app = typer.Typer(add_completion=False)


@app.command()
def serve(
    place: Annotated[str, typer.Argument(help="The space file, such as a.yaml.")],
    trials: Annotated[int, typer.Option(help="How many.")] = 3,
    json_: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Do nothing, well."""
    ends = {
        "user": UserError("theirs"),
        "own": FastverifyError("ours"),
        "exit": typer.Exit(7),
        "^C": KeyboardInterrupt(),
    }
    if place in ends:
        raise ends[place]
    Path(place).is_file()
    if place == "full":
        raise OSError(errno.ENOSPC, "No space left on device")
    print(f"{place} {trials} {json_}")


def _run(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["serve", *argv])
    with pytest.raises(SystemExit) as ended:
        run_command(app)
    return ended.value.code


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "place: missing; expected the space file, such as a.yaml"),
        (("a", "--trails", "3"), "--trails: no such option; did you mean '--trials'?"),
        (("a", "--trials", "many"), "--trials: 'many' does not fit; expected a valid integer"),
        (("a", "--trials"), "Option '--trials' requires an argument"),
        (("a", "--json=5"), "Option '--json' does not take a value"),
        (("a", "b"), "Got unexpected extra argument(s) (b)"),
        (("user",), "theirs"),
        (("x" * 300,), f"[Errno 36] File name too long: {'x' * 300!r}"),
    ],
)
def test_what_the_caller_did_wrong_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    assert _run(monkeypatch, *argv) == 2
    assert capsys.readouterr() == ("", f"error: {said}\n")


@pytest.mark.parametrize(("place", "code"), [("fine", None), ("own", 1), ("full", 1), ("exit", 7), ("^C", 130)])
def test_the_exit_code_says_how_it_ended(monkeypatch: pytest.MonkeyPatch, place: str, code: int | None) -> None:
    assert _run(monkeypatch, place) == code


@pytest.mark.parametrize("columns", ["40", "200"])
def test_help_is_plain_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert not _run(monkeypatch, "--help")
    text = capsys.readouterr().out
    assert text.isascii() and "\x1b" not in text
    assert "--trials <int>  How many." in text


def test_a_reader_that_leaves_is_no_error() -> None:
    """`python -m pipeline.tune --help | true`: no word of a broken pipe."""
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "tests.unit.test_cli", "fine"]
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(words, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_what_the_terminal_cannot_show_is_replaced() -> None:
    words = [sys.executable, "-m", "tests.unit.test_cli", "5±1"]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert (done.returncode, done.stdout) == (0, "5?1 3 False\n")


def test_a_program_without_standard_streams_works_all_the_same(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.unit.test_cli", "fine"]
    script = '"$@" >&- 2>&- <&-; echo $?'
    done = subprocess.run(["sh", "-c", script, "sh", *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "0\n"


if __name__ == "__main__":
    run_command(app)
