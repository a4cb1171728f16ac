"""The arithmetic of a verify step: what speculation costs, what it must accept, what could be gained.

A *cycle* is everything between two verify steps: drafting, the target's pass over the drafts, and
what lies between. With `streams` requests at once, throughput = streams x accept length / cycle. From
that one identity follow the break-even accept length, the ceiling of a perfect drafter and the worth
of a faster step. Times here include the share of prefill in the measured window, so that the figures
agree with the throughput that users see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pipeline.config import DflashSpeculation, EngineConfig, Frozen, NoSpeculation
from pipeline.records import Estimate

Bottleneck = Literal["step", "drafter", "none"]
_WORTH = 1.02  # a gain below 2 % is not called one


class Anatomy(Frozen):
    """One speculative configuration beside plain decoding at one load. Times in ms, rates in tok/s."""

    name: str
    level: str | None = None
    streams: float = 1.0
    plain_tok_per_s: float
    tok_per_s: float
    accept_length: float
    max_accept_length: int | None = None  # a perfect drafter's: all drafts and the bonus token
    verify_ms: float | None = None  # the target's pass alone, where it was measured
    plain_step_ms: float
    cycle_ms: float
    allowed_cycle_ms: float  # accept length x plain step: a longer cycle loses
    break_even_accept_length: float
    break_even_at_verify: float | None = None  # the same if the cycle were the verify pass alone
    speedup: float
    ceiling_tok_per_s: float | None = None  # perfect drafter, present cycle
    ceiling_at_verify_tok_per_s: float | None = None  # perfect drafter that costs nothing
    cheap_step_tok_per_s: float  # present drafter, a cycle as short as a plain step
    bottleneck: Bottleneck
    advice: str


class WhatIf(Frozen):
    """Throughput for accept lengths (rows) and cycle times (columns)."""

    accept_lengths: tuple[float, ...]
    cycles_ms: tuple[float, ...]
    cycle_names: tuple[str, ...]
    tok_per_s: tuple[tuple[float, ...], ...]
    plain_tok_per_s: float


def step_ms(tok_per_s: float, streams: float = 1.0, accept_length: float = 1.0) -> float:
    """Milliseconds of one decode step, or of one verify cycle when tokens come `accept_length` at a time."""
    return 1e3 * streams * accept_length / tok_per_s


def tok_per_s(cycle_ms: float, streams: float = 1.0, accept_length: float = 1.0) -> float:
    """Tokens a second of `streams` requests that each get `accept_length` tokens a cycle."""
    return 1e3 * streams * accept_length / cycle_ms


def max_accept_length(config: EngineConfig, resolved: Mapping[str, Any] | None = None) -> int | None:
    """Most tokens one verify step can yield; None where neither the configuration nor the server says.

    SGLang counts the last known token among its draft tokens and a chain of n steps drafts n, so a step
    yields at most `num_draft_tokens`, and at most `num_steps` + 1, tokens.
    """
    stated, seen = config.speculation.model_dump(), resolved or {}
    if isinstance(config.speculation, NoSpeculation):
        return 1
    if isinstance(config.speculation, DflashSpeculation):
        return config.speculation.block_size
    tokens = stated["num_draft_tokens"] or _whole(seen.get("speculative_num_draft_tokens"))
    if config.engine == "embedded":
        return tokens + 1 if tokens else None  # transformers counts only what is proposed
    steps = stated.get("num_steps") or _whole(seen.get("speculative_num_steps"))
    limits = [limit for limit in (tokens, steps + 1 if steps and "num_steps" in stated else None) if limit]
    return min(limits) if limits else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def dissect(
    name: str,
    *,
    plain: float,
    speculative: float,
    accept_length: float,
    streams: float = 1.0,
    max_accepted: int | None = None,
    verify_ms: float | None = None,
    level: str | None = None,
) -> Anatomy:
    """Take a verify cycle apart.

    Args:
        name: the configuration in words.
        plain: tok/s without speculation at this load.
        speculative: tok/s with it.
        accept_length: output tokens a verify step and stream, bonus included.
        streams: requests decoding at once.
        max_accepted: tokens a perfect drafter would yield a step.
        verify_ms: the target's pass alone, where it was measured apart.
        level: the load level's key.
    """
    plain_ms, cycle = step_ms(plain, streams), step_ms(speculative, streams, accept_length)
    ceiling = tok_per_s(cycle, streams, max_accepted) if max_accepted else None
    at_verify = tok_per_s(verify_ms, streams, max_accepted) if max_accepted and verify_ms else None
    cheap = tok_per_s(plain_ms, streams, accept_length)
    bottleneck, advice = _advise(plain, speculative, cheap, ceiling, at_verify, cycle / plain_ms)
    return Anatomy(
        name=name,
        level=level,
        streams=streams,
        plain_tok_per_s=plain,
        tok_per_s=speculative,
        accept_length=accept_length,
        max_accept_length=max_accepted,
        verify_ms=verify_ms,
        plain_step_ms=plain_ms,
        cycle_ms=cycle,
        allowed_cycle_ms=plain_ms * accept_length,
        break_even_accept_length=cycle / plain_ms,
        break_even_at_verify=verify_ms / plain_ms if verify_ms else None,
        speedup=speculative / plain,
        ceiling_tok_per_s=ceiling,
        ceiling_at_verify_tok_per_s=at_verify,
        cheap_step_tok_per_s=cheap,
        bottleneck=bottleneck,
        advice=advice,
    )


def _advise(
    plain: float, now: float, cheap: float, ceiling: float | None, at_verify: float | None, steps: float
) -> tuple[Bottleneck, str]:
    """Compare what a perfect drafter would give with what a cycle as short as a plain step would."""
    perfect = max((c for c in (ceiling, at_verify) if c is not None), default=None)
    if perfect is None:
        return "none", f"A cycle as short as a plain step would give {_rate(cheap)} tok/s; it takes {steps:.1f} now."
    both = f"a perfect one would give {_rate(perfect)} tok/s, a cycle as short as a plain step {_rate(cheap)}"
    if perfect <= plain:
        return "step", f"No drafter can pay here: even {both[2:]}; plain decoding gives {_rate(plain)}."
    if max(perfect, cheap) < now * _WORTH:
        return "none", f"Little is left to gain: {both}; {_rate(now)} is reached."
    if cheap > perfect:
        return "step", f"The drafter is not the bottleneck: {both}. Work on the verify step ({steps:.1f} plain steps)."
    return "drafter", f"The drafter is the bottleneck: {both}. Work on the accept length."


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def what_if(anatomy: Anatomy, shares: tuple[float, ...] = (0.75, 0.5)) -> WhatIf:
    """Throughput over accept lengths up to the perfect drafter's, and cycles down to a plain step.

    Args:
        anatomy: where the configuration stands now.
        shares: cycles to try, as shares of the present one, where they are longer than a plain step.
    """
    top = anatomy.max_accept_length or max(4, round(anatomy.accept_length) + 2)
    cycles = {anatomy.cycle_ms: "now", anatomy.plain_step_ms: "plain step"}
    cycles |= {anatomy.cycle_ms * s: f"{s:.0%}" for s in shares if anatomy.cycle_ms * s > anatomy.plain_step_ms}
    if anatomy.verify_ms:
        cycles[anatomy.verify_ms] = "verify alone"
    columns = sorted(cycles, reverse=True)
    rows = sorted({*_lengths(top), round(anatomy.accept_length, 2)})
    table = tuple(tuple(tok_per_s(c, anatomy.streams, r) for c in columns) for r in rows)
    return WhatIf(
        accept_lengths=tuple(rows),
        cycles_ms=tuple(columns),
        cycle_names=tuple(cycles[c] for c in columns),
        tok_per_s=table,
        plain_tok_per_s=anatomy.plain_tok_per_s,
    )


def _lengths(top: int) -> list[float]:
    """About six accept lengths between 1 and `top`."""
    stride = max(1, round((top - 1) / 5))
    return [float(n) for n in (*range(1, top, stride), top)]


class Simulated(Frozen):
    """A launch whose accept length the engine made up, beside what the arithmetic says of it.

    It is no trial record and has no answers: nothing can rank it, promote it or judge its text.
    """

    simulated: Literal[True] = True
    config_id: str
    name: str
    level: str
    asked: float
    accept_length: float  # as the engine gave it
    cycle_ms: float  # of the study's own launches
    predicted_tok_per_s: float
    measured: Estimate

    @property
    def error(self) -> float:
        """Share by which the prediction is above what was measured."""
        return self.predicted_tok_per_s / self.measured.value - 1


class CollectiveShare(Frozen):
    """All-reduces of one verify step against those of a plain step, and what does not fit."""

    all_reduces: int
    verify_ms: float
    collectives_ms: float
    share: float
    us_each: float
    plain_us_each_at_most: float  # if a plain step did nothing else
    verdict: str
    fits: bool


def collective_share(
    all_reduces: int, collectives_ms: float, verify_ms: float, plain_step_ms: float
) -> CollectiveShare:
    """Check a claimed collective time of a verify step against the plain step, which runs as many."""
    each, plain_each = 1e3 * collectives_ms / all_reduces, 1e3 * plain_step_ms / all_reduces
    fits = collectives_ms <= plain_step_ms
    claim = f"{collectives_ms:g} ms of all-reduces in a verify step, {each:.0f} µs each"
    verdict = f"{claim}: fits a plain step of {plain_step_ms:.1f} ms with as many of them."
    if not fits:
        verdict = (
            f"{claim}, does not fit a plain step of {plain_step_ms:.1f} ms with as many of them "
            f"(at most {plain_each:.0f} µs each, had it no compute): either a verify step's all-reduces take another, "
            f"slower path, at least {each / plain_each:.1f} times as long, or the time was not taken on the same run."
        )
    return CollectiveShare(
        all_reduces=all_reduces,
        verify_ms=verify_ms,
        collectives_ms=collectives_ms,
        share=collectives_ms / verify_ms,
        us_each=each,
        plain_us_each_at_most=plain_each,
        verdict=verdict,
        fits=fits,
    )
