"""Ctrl-C, SIGTERM and a closed terminal: noted while Ray starts, raised while trials run, held off during teardown."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from pipeline.interrupts import Interrupts

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    assert {number: signal.getsignal(number) for number in NUMBERS} == before
    for number, handler in before.items():
        signal.signal(number, handler)


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", NUMBERS)
def test_each_signal_interrupts_what_runs(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupts() as interrupts:
        interrupts.listen()
        with pytest.raises(KeyboardInterrupt):
            send(number)
    assert capfd.readouterr().err.count("interrupted: ") == 1


def test_what_comes_during_the_start_interrupts_after_it() -> None:
    with Interrupts() as interrupts:
        send(signal.SIGINT)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray does
        with pytest.raises(KeyboardInterrupt):
            interrupts.listen()
        send(signal.SIGTERM)  # ours again: this process lives on


def test_an_impatient_second_one_tears_nothing() -> None:
    with Interrupts() as interrupts:
        interrupts.listen()
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        send(signal.SIGINT, signal.SIGTERM)


def test_a_later_one_interrupts_again_where_the_first_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.interrupts.TWICE_S", 0.0)
    with Interrupts() as interrupts:
        interrupts.listen()
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                send(signal.SIGINT)


def test_nothing_interrupts_the_teardown() -> None:
    with Interrupts() as interrupts:
        interrupts.listen()
        interrupts.hold()
        send(*NUMBERS)


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            interrupts.listen()
            send(signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                send(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
