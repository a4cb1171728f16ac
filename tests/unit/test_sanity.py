"""Every sanity rule, broken by one change to figures that break none."""

from __future__ import annotations

import pytest

from pipeline.config import DraftModelSpeculation, EngineConfig, NoSpeculation
from pipeline.lossless import GreedyOutput
from pipeline.records import Distribution, Estimate, LevelResult, LoadLevel
from pipeline.sanity import RULES, broken_rules

EAGLE = DraftModelSpeculation(algorithm="EAGLE3", draft_model="d", num_steps=3, eagle_topk=1, num_draft_tokens=4)
CONFIG = EngineConfig(engine="sglang", model="m", speculation=EAGLE, max_running_requests=8)
# 8 streams, 10 ms a token, 100 ms to the first: 800 tok/s while decoding.
SOUND = LevelResult(
    level=LoadLevel(workload="extract", concurrency=8),
    window_s=10.0,
    requests_ok=40,
    output_tokens=7000,
    output_tok_per_s=Estimate(value=700.0),
    ttft_ms=Distribution(n=40, mean=100.0),
    tpot_ms=Distribution(n=40, mean=10.0),
    e2e_latency_ms=Distribution(n=40, mean=1100.0),
    accept_length=2.5,
    verify_steps=2800,
    prompt_tokens=4000,
    cached_tokens=400,
    retokenized_ratio=0.98,
    client_cpu=0.2,
)


def broken(config: EngineConfig = CONFIG, **changes: object) -> set[str]:
    keep = {k: changes.pop(k) for k in ("greedy", "log_accept_length", "resolved") if k in changes}
    return {rule.rule for rule in broken_rules([SOUND.model_copy(update=changes)], config, **keep)}


def test_sound_figures_break_nothing() -> None:
    greedy = [GreedyOutput(prompt_id="p", text="a fine answer with an end")]
    assert broken(greedy=greedy, log_accept_length=2.6, resolved={"max_running_requests": 8}) == set()


LOOP = [GreedyOutput(prompt_id="p", text="on " * 9)]
CASES = {
    "tokens": {"output_tokens": 0},
    "ttft": {"ttft_ms": Distribution(n=40, mean=0.0)},
    "no_failed_requests": {"requests_failed": 1},
    "no_cut_off_requests": {"requests_cut_off": 1},
    "client_not_saturated": {"client_cpu": 0.95},
    "retokenized": {"retokenized_ratio": 0.5},
    "cached_share": {"cached_tokens": 3900},
    "pacing": {"tpot_ms": Distribution(n=40, mean=40.0)},
    "running_limit": {"resolved": {"max_running_requests": 4}},
    "accept_length_known": {"accept_length": None, "verify_steps": None},
    "speculation_off": {"config": CONFIG.model_copy(update={"speculation": NoSpeculation()})},
    "accept_length_pinned": {"accept_length": 4.0},
    "log_agrees": {"log_accept_length": 1.2},
    "no_repetition_loop": {"greedy": LOOP},
}


def test_every_rule_has_its_case() -> None:
    assert {rule.name for rule in RULES} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_each_rule_catches_its_own(name: str) -> None:
    assert broken(**CASES[name]) == {name}


def test_what_was_not_measured_breaks_nothing() -> None:
    missing = dict.fromkeys(
        ("ttft_ms", "tpot_ms", "e2e_latency_ms", "cached_tokens", "retokenized_ratio", "client_cpu")
    )
    assert broken(**missing) == set()


def test_a_broken_rule_says_what_it_protects_from_and_what_was_seen() -> None:
    (found,) = broken_rules([SOUND.model_copy(update={"requests_failed": 3, "errors": ("3 x HTTP 500",)})], CONFIG)
    assert found.fatal
    assert found.protects_from
    assert "extract.c8: 3 failed (3 x HTTP 500)" in found.seen


def test_dead_drafts_are_marked_too() -> None:
    assert broken(accept_length=1.0) == {"accept_length_pinned"}
