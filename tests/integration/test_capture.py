"""Profiles of a study, through real launches of the fake SGLang."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pipeline.report import load_report
from tests.fakes.fake_study import full_study
from tests.fakes.fake_trace import LAYERS
from tests.fakes.running import with_fake


def capture(*words: str) -> subprocess.CompletedProcess[str]:
    return with_fake("pipeline.capture", *words, FAKE_SGLANG_STEP_MS="4")


@pytest.mark.slow
def test_a_study_is_profiled_and_what_has_a_profile_is_left_alone(tmp_path: Path) -> None:
    folder = full_study().write(tmp_path)
    out = capture(str(folder), "--steps", "6", "--stop-after", "0")
    assert out.returncode == 3 and "goes on" in out.stdout  # no time: nothing was launched
    out = capture(str(folder), "--steps", "6")
    assert out.returncode == 0, out.stderr
    report = load_report(str(folder))
    assert {p.rank for p in report.profiles} == {"TP-0", "TP-1"}
    assert len(report.profiles) == 10
    for profile in report.profiles:
        assert (profile.all_reduces, profile.all_gathers) == (2 * LAYERS + 1, 1)
        assert profile.measured_step_ms is not None and 3 < profile.measured_step_ms < 20
        assert (profile.draft_ms > 0) == (not profile.label.startswith("no speculation"))
    one = next((folder / "profiles").glob("*/profile.json"))
    one.write_text(json.dumps(json.loads(one.read_text())[:1]))
    assert capture(str(folder)).stdout == ""
