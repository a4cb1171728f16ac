"""The five classic ways to promote a wrong winner. Each test shows the trap biting, then the guard."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline import ruler as ruler_module
from pipeline import rules
from pipeline.config import Collectives, EngineConfig, NgramSpeculation
from pipeline.lossless import Reference, compare
from pipeline.metrics import objective
from pipeline.records import Topology
from pipeline.ruler import Measured, MeasurePlan, Ruler
from pipeline.sanity import broken_rules
from pipeline.spec import Goal, LoadSpec, WorkloadSpec
from serve.engines import sglang
from tests.fakes.running import fake_server

NGRAM = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"]
PLAIN = EngineConfig(engine="sglang", model="m", max_running_requests=16)
SPECULATING = PLAIN.model_copy(update={"speculation": NgramSpeculation(num_draft_tokens=8)})


def measure(url: str, concurrency: int = 4, *, baseline: bool = False, tokens: int = 16) -> Measured:
    workload = WorkloadSpec(prompts={"open": "open"}, output_tokens=tokens, greedy_prompts=8, greedy_tokens=16)
    load = LoadSpec(concurrency=(concurrency,), requests_per_level=2 * concurrency, max_repeats=2, ci_width=10.0)
    return Ruler(MeasurePlan(workload=workload, load=load, salt="traps")).measure(url, baseline=baseline)


def rules_broken(measured: Measured, config: EngineConfig) -> set[str]:
    found = broken_rules(measured.levels, config, measured.greedy, resolved=measured.server)
    return {rule.rule for rule in found}


def test_a_smaller_batch_limit_under_speculation() -> None:
    """SGLang lowers max_running_requests under speculation, and the queue is taken for a slow drafter."""
    speed = {"ttft_ms": 20, "step_ms": 10}
    with fake_server([*NGRAM, "--max-running-requests", "4"], tokens_per_step=2, **speed) as url:
        limited = measure(url, 16)
    with fake_server(["--max-running-requests", "16"], tokens_per_step=1, **speed) as url:
        plain = measure(url, 16)
    assert objective(limited.levels, Goal()).value < objective(plain.levels, Goal()).value  # twice as fast, yet loses
    assert "running_limit" in rules_broken(limited, SPECULATING)
    assert "running_limit" not in rules_broken(plain, PLAIN)
    argv = sglang.plan(PLAIN, port=1, inherited={}, release="0.5.23").argv
    assert argv[argv.index("--max-running-requests") + 1] == "16"  # stated in every trial, the baseline too


def test_a_warm_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second trial on the same prompts meets a warm cache, unless each window starts with a flush."""
    with fake_server(ttft_ms=5, step_ms=2) as url:
        assert measure(url).levels[0].cached_tokens == 0
        assert "cached_share" not in rules_broken(measure(url), PLAIN)

        async def forgotten(*_: object, **__: object) -> bool:
            return True

        monkeypatch.setattr(ruler_module, "flush", forgotten)
        measure(url)
        warm = measure(url)
    assert warm.levels[0].cached_tokens > 0.9 * warm.levels[0].prompt_tokens
    assert "cached_share" in rules_broken(warm, PLAIN)


def test_chunk_gaps_taken_for_token_gaps() -> None:
    """Four tokens a chunk every 20 ms are 5 ms a token; the gap between chunks says 20."""
    with fake_server(NGRAM, ttft_ms=20, step_ms=20, tokens_per_step=4) as url:
        level = measure(url, 1, tokens=65).levels[0]
    assert level.chunk_gap_ms.p50 == pytest.approx(20, rel=0.15)
    assert level.tpot_ms.p50 == pytest.approx(5, rel=0.15)
    assert "pacing" not in {rule.rule for rule in broken_rules([level], SPECULATING)}
    mistaken = level.model_copy(update={"tpot_ms": level.chunk_gap_ms})
    assert "pacing" in {rule.rule for rule in broken_rules([mistaken], SPECULATING)}


@pytest.mark.parametrize("garbled", [{"garbage": True}, {"text_salt": "other"}])
def test_garbage_with_a_perfect_score(garbled: dict[str, Any]) -> None:
    """A corrupt verify step accepts everything: the fastest trial of all, and its text is nonsense."""
    with fake_server(["--max-running-requests", "16"], ttft_ms=5, step_ms=5) as url:
        plain = measure(url, baseline=True)
    with fake_server(
        [*NGRAM, "--max-running-requests", "16"], ttft_ms=5, step_ms=5, tokens_per_step=8, **garbled
    ) as url:
        corrupt = measure(url)
    assert objective(corrupt.levels, Goal()).value > 1.5 * objective(plain.levels, Goal()).value
    reference = Reference.of(plain.greedy)
    result = compare(reference, corrupt.greedy, corrupt.levels, SPECULATING)
    assert not result.passed
    assert result.wrong == result.prompts - result.numerics > 0
    assert compare(reference, plain.greedy, plain.levels, PLAIN).passed


def test_a_fused_kernel_that_was_on_all_along() -> None:
    """SGLang turns all-reduce fusion on by itself for some models: "not stated" is not "off"."""

    def resolved(fusion: Any) -> EngineConfig:
        config = PLAIN.model_copy(
            update={"tensor_parallel_size": 2, "collectives": Collectives(flashinfer_fusion=fusion)}
        )
        hopper = Topology(gpu_count=2, sm=90, peer_access=True)
        return rules.canonical(config, "0.5.23", hopper, "DeepseekV3ForCausalLM").config

    assert resolved(None) == resolved("auto")  # one trial, not "with and without fusion"
    assert resolved("off") != resolved("auto")
    off = sglang.plan(resolved("off"), port=1, inherited={}, release="0.5.23").argv
    assert "--enforce-disable-flashinfer-allreduce-fusion" in off
