"""Promotion's gates: what each refuses, what --force records, and the first champion."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.api_matrix import Difference, MatrixResult
from pipeline.config import EngineConfig, NgramSpeculation
from pipeline.promotion import API, FASTER, LIMITS, LOSSLESS, SOAK, Decision, Evidence, Gate, decide, soak_gate
from pipeline.records import (
    Distribution,
    Estimate,
    Failure,
    FailureClass,
    LevelResult,
    LoadLevel,
    LosslessResult,
    Measurement,
    TrialRecord,
)
from pipeline.spec import Constraints, ObjectiveSpec

BASE = EngineConfig(engine="sglang", model="m")
WINNER = BASE.model_copy(update={"speculation": NgramSpeculation(num_draft_tokens=4)})
SPEC = ObjectiveSpec(constraints=Constraints(p95_ttft_ms=100))
ALIKE = MatrixResult(passed=True, probes=("chat", "tools"), lacking=("tools: no tools here",))
LOSSLESS_OK = LosslessResult(prompts=8, identical=8, passed=True)


def launch(number: int, config: EngineConfig, tok_per_s: float, round_: int, **more: Any) -> TrialRecord:
    speed = Estimate(value=tok_per_s, n=3, std=tok_per_s / 200, low=tok_per_s * 0.99, high=tok_per_s * 1.01)
    level = LevelResult(
        level=LoadLevel(workload="open", concurrency=2),
        window_s=1,
        requests_ok=20,
        output_tokens=100,
        output_tok_per_s=speed,
        ttft_ms=Distribution(n=100, mean=50, p95=more.pop("p95_ttft_ms", 50.0)),
    )
    facts = {"lossless": LOSSLESS_OK, "measurement": Measurement(levels=(level,), objective=speed), "status": "ok"}
    return TrialRecord(
        study="s", number=number, role="confirm", config=config, config_id=config.config_id, round=round_,
        **(facts | more),
    )  # fmt: skip


def evidence(speed: float, *, champion: bool = True, **more: Any) -> Evidence:
    """Three rounds of a winner this much faster than an incumbent of 100 tok/s, with launch noise of 1 %."""
    launches = []
    for round_, noise in enumerate((0.99, 1.0, 1.01)):
        launches.append(launch(2 * round_ + 1, BASE, 100 * noise, round_))
        launches.append(launch(2 * round_ + 2, WINNER, 100 * speed * (2 - noise), round_, **more))
    return Evidence(
        winner=WINNER.config_id, incumbent=BASE.config_id, has_champion=champion, launches=tuple(launches), matrix=ALIKE
    )


def failed(decision: Decision) -> list[str]:
    return [gate.name for gate in decision.gates if not gate.passed]


def test_a_faster_lossless_winner_within_its_limits_is_promoted() -> None:
    decision = decide(evidence(1.3), SPEC)
    assert decision.promote == WINNER.config_id
    assert failed(decision) == []
    assert "refused by both: tools: no tools here" in "\n".join(decision.lines())


@pytest.mark.parametrize("speed", [1.0, 1.01, 0.8])
def test_a_gain_within_noise_is_no_gain(speed: float) -> None:
    decision = decide(evidence(speed), SPEC)
    assert (decision.promote, failed(decision)) == (None, [FASTER])
    assert "the champion stays" in decision.reason


@pytest.mark.parametrize(
    ("more", "gate"),
    [
        ({"p95_ttft_ms": 150.0}, LIMITS),
        ({"lossless": LosslessResult(prompts=8, identical=5, wrong=3, passed=False)}, LOSSLESS),
        ({"lossless": None}, LOSSLESS),
    ],
)
def test_speed_alone_does_not_promote(more: dict[str, Any], gate: str) -> None:
    decision = decide(evidence(2.0, **more), SPEC)
    assert (decision.promote, failed(decision)) == (None, [gate])


def test_another_answer_in_the_api_matrix_refuses_and_says_which() -> None:
    differs = Difference(probe="tools", baseline="calls 1", winner="calls 0")
    found = evidence(2.0).model_copy(
        update={"matrix": MatrixResult(passed=False, probes=("tools",), differences=(differs,))}
    )
    decision = decide(found, SPEC)
    assert failed(decision) == [API]
    assert "tools: the baseline answers calls 1, the winner calls 0" in "\n".join(decision.lines())


def test_a_winner_that_does_not_start_again_is_refused() -> None:
    broken = Failure(failure_class=FailureClass.HANG, cause="no log for 180 s")
    decision = decide(evidence(2.0, status="failed", failure=broken, measurement=None, lossless=None), SPEC)
    assert decision.promote is None
    assert {FASTER, LIMITS, LOSSLESS} <= set(failed(decision))


def test_force_promotes_and_records_what_it_overruled() -> None:
    decision = decide(evidence(0.9), SPEC, force=True)
    assert (decision.promote, decision.forced) == (WINNER.config_id, True)
    assert FASTER in decision.reason
    assert not decide(evidence(1.3), SPEC, force=True).forced  # nothing was overruled


def test_without_a_champion_the_baseline_is_promoted_and_that_is_said() -> None:
    decision = decide(evidence(1.0, champion=False), SPEC)
    assert decision.promote == BASE.config_id
    assert "there is no champion yet, so the baseline is promoted" in decision.reason


def test_when_the_winner_is_the_baseline_it_is_promoted_once() -> None:
    only = (launch(1, BASE, 100, 0),)
    found = Evidence(winner=BASE.config_id, incumbent=BASE.config_id, has_champion=False, launches=only)
    assert decide(found, SPEC).promote == BASE.config_id
    again = decide(found.model_copy(update={"has_champion": True}), SPEC)
    assert (again.promote, again.reason) == (None, "this configuration is the champion already")


def test_a_baseline_that_breaks_a_limit_does_not_become_champion_either() -> None:
    only = (launch(1, BASE, 100, 0, p95_ttft_ms=500.0),)
    found = Evidence(winner=BASE.config_id, incumbent=BASE.config_id, has_champion=False, launches=only)
    decision = decide(found, SPEC)
    assert decision.promote is None
    assert LIMITS in decision.reason


def test_a_soak_fails_on_errors_and_on_slowing_down() -> None:
    assert soak_gate([100, 95], 0, 600, 0.1).passed
    assert not soak_gate([100, 85], 0, 600, 0.1).passed
    assert not soak_gate([100, 100], 1, 600, 0.1).passed
    assert not soak_gate([], 0, 600, 0.1).passed
    bad = evidence(2.0).model_copy(update={"soak": Gate(name=SOAK, passed=False, seen="1 errors")})
    assert failed(decide(bad, SPEC)) == [SOAK]
