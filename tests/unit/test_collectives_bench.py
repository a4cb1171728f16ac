"""One rank of the collective bench, in this process, on a torch that is made up."""

from __future__ import annotations

import fcntl
import gc
import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import collectives_bench as bench

TORCH = Path(__file__).parents[1] / "fakes" / "torch_nccl"


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The made-up torch instead of the real one, and no sign of either change afterwards."""

    def exit_(code: int) -> None:
        raise SystemExit(code)

    def loaded() -> dict[str, Any]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}

    real = loaded()
    for name in real:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(TORCH))
    monkeypatch.setattr(os, "_exit", exit_)
    yield
    signal.alarm(0)
    gc.unfreeze()
    for name in loaded():
        del sys.modules[name]
    sys.modules.update(real)


def job(tmp_path: Path, **more: Any) -> dict[str, Any]:
    messages = [{"tokens": n, "all_reduce_bytes": 4 * n, "all_gather_bytes": 8 * n} for n in (1, 8)]
    return {
        "ranks": 1, "all_reduces": 5, "gathers": 8, "samples": 3, "messages": messages, "limit_s": 30,
        "store": str(tmp_path / "store"), "turn": str(tmp_path / "turn"), "turn_s": 9, **more,
    }  # fmt: skip


def run(
    told: dict[str, Any], *words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int | None, list[dict[str, Any]]]:
    """The exit code (None for a plain return) and the events."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join((json.dumps(told), *words)) + "\n"))
    code: int | None = None
    try:
        bench.main()
    except SystemExit as end:
        code = int(end.code or 0)
    return code, [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith('{"event"')]


def test_a_rank_measures_as_often_as_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("prepare", "measure", "measure")
    code, events = run(job(tmp_path), *words, monkeypatch=monkeypatch, capfd=capfd)
    assert code == 0
    assert [event["event"] for event in events] == ["imported", "ready", "result", "result"]
    for size in events[2]["sizes"]:
        assert size["reduce_ms"] == pytest.approx([0.05] * 3)  # 5 all-reduces of 0.01 ms, three samples
        assert size["gather_ms"] == pytest.approx([0.08] * 3)
    assert len(events[2]["sizes"]) == 2


def test_without_the_word_the_gpus_are_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, events = run(job(tmp_path), monkeypatch=monkeypatch, capfd=capfd)
    assert code is None
    assert [event["event"] for event in events] == ["imported"]


def test_an_error_becomes_an_event_with_its_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    code, events = run(job(tmp_path), "prepare", monkeypatch=monkeypatch, capfd=capfd)
    assert code == 1
    assert events[-1]["event"] == "failed" and events[-1]["phase"] == "all-gather warm-up"
    assert "no algorithm/protocol available for function AllGather" in events[-1]["cause"]


def test_a_turn_that_is_never_given_back_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    with (tmp_path / "turn").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, events = run(job(tmp_path, turn_s=0.2), "prepare", monkeypatch=monkeypatch, capfd=capfd)
    assert (code, events[-1]["event"]) == (0, "ready")
    assert 0.2 <= time.monotonic() - began < 5
