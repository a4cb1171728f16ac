"""The soak of a promotion: the load goes up and down for as long as it was told, and what happens meanwhile counts."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import promoting
from pipeline.config import EngineConfig
from pipeline.promoting import Bench
from pipeline.records import Topology
from pipeline.ruler import MeasurePlan
from pipeline.spec import LoadSpec

CONFIG = EngineConfig(engine="sglang", model="m")


class Machine:
    """An engine whose every stretch takes two minutes on a clock of its own."""

    def __init__(self, speeds: list[float], failed: int = 0) -> None:
        self.now, self.speeds, self.failed = 0.0, speeds, failed
        self.asked: list[int] = []

    def stretch(self, engine: object, concurrency: int, *, salt: str) -> Any:
        self.now += 120
        self.asked.append(concurrency)
        speed = self.speeds[min(len(self.asked), len(self.speeds)) - 1]
        return (SimpleNamespace(requests_failed=self.failed, output_tok_per_s=SimpleNamespace(value=speed)),)


def soak(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, minutes: float) -> promoting.Gate:
    monkeypatch.setattr(promoting, "time", SimpleNamespace(monotonic=lambda: machine.now))
    monkeypatch.setattr(Bench, "plan", MeasurePlan(load=LoadSpec(concurrency=(1, 8)), salt="s"))
    monkeypatch.setattr(Bench, "_engine", lambda *_: nullcontext())
    monkeypatch.setattr(Bench, "_stretch", lambda _, *args, **options: machine.stretch(*args, **options))
    candidate: Any = None
    return Bench(candidate, tmp_path, Topology(), {}, lambda _: None).soak(CONFIG, minutes)


def test_the_load_goes_up_and_down_for_ten_minutes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine([100.0])
    gate = soak(machine, monkeypatch, tmp_path, minutes=10)
    assert gate.passed, gate.seen
    assert machine.asked == [8, 4, 1, 4, 8]
    assert "10.0 min, 0 errors, +0.0%" in gate.seen


def test_what_slows_down_or_fails_meanwhile_does_not_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slower = soak(Machine([100.0, 50.0, 20.0, 50.0, 80.0]), monkeypatch, tmp_path, minutes=10)
    assert not slower.passed
    assert "-20.0%" in slower.seen
    assert not soak(Machine([100.0], failed=1), monkeypatch, tmp_path, minutes=1).passed
