"""Sanity rules as data: what must hold of figures before they are believed. Pure.

A broken rule marks the trial and says what it protects from; it never drops anything. A fatal one
keeps the trial from winning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.config import EngineConfig
from pipeline.lossless import GreedyOutput, loops, pinned
from pipeline.metrics import level_value
from pipeline.records import Broken, LevelResult

CLIENT_CPU = 0.9  # of one core
CACHED_SHARE = 0.5  # chat templates share a system prompt; identical prompts share all of it
RETOKENIZED = (0.8, 1.2)  # special tokens vanish from the text, some texts tokenise differently
PACING = (0.5, 1.5)  # TPOT x throughput ÷ concurrency ÷ 1000: prefill and the last wave cost the rest
LOG_AGREES = 0.15  # the log averages over its own windows
LOOPING_SHARE = 0.5


@dataclass(frozen=True)
class Evidence:
    """What the rules look at: one launch."""

    levels: tuple[LevelResult, ...]
    config: EngineConfig
    greedy: tuple[GreedyOutput, ...] = ()
    log_accept_length: float | None = None  # the engine's own word, from its log
    resolved: Mapping[str, Any] = field(default_factory=dict)  # the engine's resolved settings


@dataclass(frozen=True)
class Rule:
    """One rule. `seen` yields what breaks it, in words; nothing means that it holds or cannot be judged."""

    name: str
    protects_from: str
    seen: Callable[[Evidence], Iterator[str]]
    fatal: bool = True


def broken_rules(
    levels: Sequence[LevelResult],
    config: EngineConfig,
    greedy: Sequence[GreedyOutput] = (),
    log_accept_length: float | None = None,
    resolved: Mapping[str, Any] | None = None,
) -> tuple[Broken, ...]:
    """Every rule that the launch breaks, each at most once, with all that was seen."""
    evidence = Evidence(tuple(levels), config, tuple(greedy), log_accept_length, resolved or {})
    found = ((rule, list(rule.seen(evidence))) for rule in RULES)
    return tuple(
        Broken(rule=rule.name, protects_from=rule.protects_from, seen="; ".join(seen), fatal=rule.fatal)
        for rule, seen in found
        if seen
    )


def _each_level(say: Callable[[LevelResult, EngineConfig], str | None]) -> Callable[[Evidence], Iterator[str]]:
    """A rule about single levels: prefix what it says with the level's key."""

    def seen(evidence: Evidence) -> Iterator[str]:
        for level in evidence.levels:
            if said := say(level, evidence.config):
                yield f"{level.level.key}: {said}"

    return seen


def _no_tokens(level: LevelResult, _: EngineConfig) -> str | None:
    return None if level.output_tokens > 0 else "no output tokens"


def _ttft_zero(level: LevelResult, _: EngineConfig) -> str | None:
    value = level_value(level, "mean_ttft_ms")
    return None if value is None or value > 0 else f"mean TTFT {value:g} ms"


def _failed(level: LevelResult, _: EngineConfig) -> str | None:
    return f"{level.requests_failed} failed ({'; '.join(level.errors)})" if level.requests_failed else None


def _cut_off(level: LevelResult, _: EngineConfig) -> str | None:
    return f"{level.requests_cut_off} cut off by the time budget" if level.requests_cut_off else None


def _saturated(level: LevelResult, _: EngineConfig) -> str | None:
    used = level.client_cpu
    return f"client used {used:.0%} of a core" if used is not None and used > CLIENT_CPU else None


def _retokenized(level: LevelResult, _: EngineConfig) -> str | None:
    ratio, (low, high) = level.retokenized_ratio, RETOKENIZED
    return None if ratio is None or low <= ratio <= high else f"text holds {ratio:.2f} of the tokens in usage"


def _cached(level: LevelResult, _: EngineConfig) -> str | None:
    if level.cached_tokens is None or not level.prompt_tokens:
        return None
    share = level.cached_tokens / level.prompt_tokens
    return f"{share:.0%} of the prompt tokens came from the prefix cache" if share > CACHED_SHARE else None


def _pacing(level: LevelResult, config: EngineConfig) -> str | None:
    streams, tpot = level.level.concurrency, level_value(level, "mean_tpot_ms")
    if not streams or not tpot or not level.ttft_ms or level.ttft_ms.mean is None or not level.e2e_latency_ms:
        return None
    if config.engine == "embedded":
        return None  # one request at a time: most of a stream's life is spent waiting
    whole = level.e2e_latency_ms.mean or 0.0
    decoding = 1 - level.ttft_ms.mean / whole if whole else 0.0  # the share that TPOT speaks of
    seen, (low, high) = tpot * level.output_tok_per_s.value / streams / 1000, PACING
    return None if low * decoding <= seen <= high else f"TPOT x throughput ÷ streams is {seen:.2f}, not near 1"


def _over_the_limit(evidence: Evidence) -> Iterator[str]:
    asked, got = evidence.config.max_running_requests, evidence.resolved.get("max_running_requests")
    limit = min(asked, got) if isinstance(got, int) else asked
    offered = max((level.level.concurrency or 0 for level in evidence.levels), default=0)
    if offered > limit:
        yield f"{offered} streams offered, {limit} run at once"


def _no_counters(level: LevelResult, config: EngineConfig) -> str | None:
    speculates = config.speculation.algorithm != "none"
    return "no accept length" if speculates and level.accept_length is None else None


def _speculates_alone(level: LevelResult, config: EngineConfig) -> str | None:
    length = level.accept_length
    odd = config.speculation.algorithm == "none" and length is not None and length > 1.02
    return f"accept length {length:.2f} without speculation" if odd else None


def _pinned(evidence: Evidence) -> Iterator[str]:
    if said := pinned(evidence.levels, evidence.config):
        yield said


def _log_disagrees(evidence: Evidence) -> Iterator[str]:
    tokens = [(level.accept_length, level.verify_steps) for level in evidence.levels]
    known = [(length, steps) for length, steps in tokens if length is not None and steps]
    if evidence.log_accept_length is None or not known:
        return
    ours = sum(length * steps for length, steps in known) / sum(steps for _, steps in known)
    if abs(ours / evidence.log_accept_length - 1) > LOG_AGREES:
        yield f"accept length {ours:.2f} by the requests, {evidence.log_accept_length:.2f} by the log"


def _looping(evidence: Evidence) -> Iterator[str]:
    texts = [output.text for output in evidence.greedy]
    looping = sum(loops(text) for text in texts)
    if texts and looping > LOOPING_SHARE * len(texts):
        yield f"{looping} of {len(texts)} greedy answers end in a loop"


RULES: tuple[Rule, ...] = (
    Rule("tokens", "an engine that answers without generating", _each_level(_no_tokens)),
    Rule("ttft", "a stream that was not parsed: TTFT 0 would win", _each_level(_ttft_zero)),
    Rule("no_failed_requests", "refused requests that make the rest look fast", _each_level(_failed)),
    Rule("no_cut_off_requests", "a throughput that misses its slowest requests", _each_level(_cut_off), fatal=False),
    Rule("client_not_saturated", "measuring the load generator", _each_level(_saturated)),
    # Not fatal: small models emit special tokens, which the text does not show.
    Rule("retokenized", "usage that counts other tokens than the text holds", _each_level(_retokenized), fatal=False),
    Rule("cached_share", "a warm prefix cache taken for a fast engine", _each_level(_cached)),
    Rule("pacing", "chunk gaps taken for token gaps, or lost tokens", _each_level(_pacing), fatal=False),
    Rule("running_limit", "a smaller batch limit under speculation", _over_the_limit),
    Rule("accept_length_known", "speculation that nobody counts", _each_level(_no_counters), fatal=False),
    Rule("speculation_off", "a baseline that speculates", _each_level(_speculates_alone)),
    # Not fatal: copying texts may deserve it; the lossless check decides whether the text is right.
    Rule("accept_length_pinned", "silent corruption behind a perfect or dead drafter", _pinned, fatal=False),
    Rule("log_agrees", "counters of another window or another engine", _log_disagrees, fatal=False),
    Rule("no_repetition_loop", "garbage that drafts well", _looping, fatal=False),
)
