"""What a person sees while a study runs: a table on a terminal, lines elsewhere, nothing with --json."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pipeline.config import EngineConfig, NgramSpeculation
from pipeline.live import Board
from tests.fakes.toy_search import level, record

CONFIG = EngineConfig(engine="sglang", model="m", speculation=NgramSpeculation(num_draft_tokens=8))


def finished(number: int = 1, value: float | None = 100.0, accept: float | None = None):  # type: ignore[no-untyped-def]
    done = record(number, CONFIG, value)
    if done.measurement is None:
        return done
    levels = (level(100.0).model_copy(update={"accept_length": accept}),)
    return done.model_copy(update={"measurement": done.measurement.model_copy(update={"levels": levels})})


def test_off_a_terminal_each_phase_and_each_end_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Board(tty=False) as board:
        board.expect(4)
        board.start(1, "search", CONFIG.words())
        board.phase(1, "launch")
        board.phase(1, "launch")
        board.finish(finished(accept=2.5))
        board.finish(finished(2, None))
        board.phase(9, "of a trial that was never started")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "trial   1  search    NGRAM draft=8: launch"
    assert lines[1].startswith(
        "trial   1  search    NGRAM draft=8: ok: 100.0 tok/s (extract.c8), accept length 2.50, 0 s"
    )
    assert lines[1].endswith("(less than a minute left)")
    assert lines[2].startswith("trial   2  search    NGRAM draft=8: failed: collective (NCCL error)")
    assert len(lines) == 3


def test_points_that_needed_no_launch_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    board = Board(tty=False)
    board.finish(record(3, CONFIG, None, status="reused", reason=None, failure=None, reused_from=1))
    board.finish(record(4, CONFIG, None, status="pruned", reason="bare-tree: hangs", failure=None))
    said = capsys.readouterr().out
    assert "reused (the same as trial 1)" in said
    assert "pruned (bare-tree: hangs)" in said


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Board(quiet=True, tty=True) as board:
        board.say("a line")
        board.start(1, "search", "x")
        board.finish(finished())
    assert capsys.readouterr().out == ""


def test_on_a_terminal_the_table_shows_figures_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with Board(tty=True) as board:
        board.say("engine: sglang")
        board.expect(3)
        board.start(1, "search", CONFIG.words())
        board.phase(1, "measure")
        board.finish(finished())
        board.start(2, "search", "none")
    said = capsys.readouterr().out
    assert "engine: sglang" in said
    assert "minute left" in said
    assert "100.0" in said
    assert "queued" in said


def test_a_study_whose_reader_leaves_goes_on_unseen() -> None:
    """`… | head -1`, or a terminal that was closed: hours of work do not hang on a pager."""
    read, write = os.pipe()
    os.close(read)
    script = "from pipeline.live import Board\nwith Board(tty=False) as b:\n  b.say('x'); b.say('y')\nprint('z')"
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")
