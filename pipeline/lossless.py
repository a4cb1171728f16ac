"""Greedy outputs against the no-speculation baseline's. Pure.

After the first differing token two greedy texts diverge for good, so only the first difference tells
anything. In fp32 on one engine there must be none. In bf16 another collective or verify shape changes
the rounding: where the baseline's own two best tokens are closer than the tolerance, a flip is
numerics; at a clear margin the output is wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate

from pipeline.config import DflashSpeculation, DraftModelSpeculation, EngineConfig, Frozen, NgramSpeculation
from pipeline.errors import MeasurementError
from pipeline.records import LevelResult, LosslessResult, PromptDiff

# Logits between 16 and 32 are 0.125 apart in bf16: the margin of two of them, one step off each.
BF16_TOLERANCE = 0.25
PINNED = 0.02  # within this share of the ceiling, or of 1.00
FEWEST_SHARED_WORDS = 0.25  # of a garbled text's words, how many the baseline's texts know
LOOP_WORDS, LOOP_TIMES = 8, 4  # a loop: a pattern of up to 8 words, at least 4 times at the end


class GreedyOutput(Frozen):
    """One prompt's greedy answer. Tokens and margins are known where log-probabilities were asked.

    Args:
        tokens: the answer's tokens as text; together they are `text`.
        margins: per token, top-1 minus top-2 log-probability, in nats.
        batched: sent together with the others, or alone.
    """

    prompt_id: str
    text: str
    tokens: tuple[str, ...] | None = None
    margins: tuple[float | None, ...] | None = None
    batched: bool = True


class Reference(Frozen):
    """The baseline's answers: each alone with margins, and its own flips when sent together."""

    outputs: tuple[GreedyOutput, ...]
    flips: int = 0

    @classmethod
    def of(cls, greedy: Sequence[GreedyOutput]) -> Reference:
        """Build the reference from what a ruler brought back for the baseline."""
        alone = {output.prompt_id: output for output in greedy if not output.batched}
        batched = {output.prompt_id: output for output in greedy if output.batched}
        outputs = alone or batched
        if not outputs:
            raise MeasurementError("the baseline has no greedy outputs to compare with")
        flips = sum(batched[name].text != output.text for name, output in alone.items() if name in batched)
        return cls(outputs=tuple(outputs.values()), flips=flips)


def tolerance_of(config: EngineConfig) -> float | None:
    """The flip margin that counts as numerics, in nats; None where equality must be exact."""
    exact = config.dtype == "float32" or (config.dtype is None and config.engine == "embedded")
    return None if exact else BF16_TOLERANCE


def allowed_flips(reference: Reference) -> int:
    """Flips that a lossless configuration may show: the baseline's own, plus two deviations of a count."""
    return math.ceil(reference.flips + 2 * math.sqrt(reference.flips + 1))


def accept_ceiling(config: EngineConfig) -> int | None:
    """The most tokens that a verify step can emit; None without speculation, or where it is not stated."""
    speculation = config.speculation
    if isinstance(speculation, DraftModelSpeculation):
        return speculation.num_steps + 1 if speculation.num_steps else None
    if isinstance(speculation, NgramSpeculation):
        return speculation.num_draft_tokens  # what one pass verifies: the bonus token is one of them
    if isinstance(speculation, DflashSpeculation):
        return speculation.block_size
    return None


def compare(
    reference: Reference, outputs: Sequence[GreedyOutput], levels: Sequence[LevelResult], config: EngineConfig
) -> LosslessResult:
    """Hold a trial's greedy outputs against the baseline's.

    Args:
        reference: the baseline's answers.
        outputs: the trial's; of a prompt sent both ways, the one sent together counts.
        levels: the trial's levels, for the accept length.
        config: gives the tolerance and the accept length's ceiling.
    """
    tolerance = tolerance_of(config)
    answers = {output.prompt_id: output for output in sorted(outputs, key=lambda output: output.batched)}
    pairs = [(known, answers[known.prompt_id]) for known in reference.outputs if known.prompt_id in answers]
    if not pairs:
        raise MeasurementError("no greedy output to hold against the baseline's")
    diffs = tuple(diff for known, answer in pairs if (diff := first_difference(known, answer, tolerance)))
    wrong = sum(diff.verdict == "wrong" for diff in diffs)
    allowed = None if tolerance is None else allowed_flips(reference)
    corruption = _corruption(pairs, levels, config) if diffs else None
    too_many = allowed is not None and len(diffs) > allowed
    return LosslessResult(
        prompts=len(pairs),
        identical=len(pairs) - len(diffs),
        numerics=len(diffs) - wrong,
        wrong=wrong,
        tolerance=tolerance,
        allowed_flips=allowed,
        diffs=diffs,
        corruption=corruption,
        passed=not wrong and not too_many and corruption is None,
    )


def first_difference(known: GreedyOutput, answer: GreedyOutput, tolerance: float | None) -> PromptDiff | None:
    """Where two answers part, and what the baseline's margin there makes of it; None when they are equal."""
    if known.text == answer.text:
        return None
    at = _common_prefix(known.text, answer.text)
    token = _token_at(known.tokens, at)
    margin = _margin(known, token, at)
    numerics = tolerance is not None and margin is not None and margin <= tolerance
    return PromptDiff(
        prompt_id=known.prompt_id,
        first_difference=at if token is None else token,
        margin=margin,
        verdict="numerics" if numerics else "wrong",
    )


def _margin(known: GreedyOutput, token: int | None, at: int) -> float | None:
    """The smallest margin at which the other token may have been chosen; None where it is not known.

    Only the other's text is known: a token of it may begin like the baseline's and go on differently (" " and "1"
    against " p"). So every token from the start of the word that holds character `at` is a place of the flip.
    """
    if known.tokens is None or known.margins is None or token is None:
        return None
    start = next((i for i in range(at - 1, -1, -1) if known.text[i].isspace()), 0)
    ends = accumulate(map(len, known.tokens))
    first = next((i for i, end in enumerate(ends) if end > start), token)
    margins = [margin for margin in known.margins[first : token + 1] if margin is not None]
    return min(margins, default=None)


def _common_prefix(a: str, b: str) -> int:
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def _token_at(tokens: Sequence[str] | None, at: int) -> int | None:
    """The token that holds character `at`, or the one after the last (an end that the other went past)."""
    if tokens is None:
        return None
    end = 0
    for i, token in enumerate(tokens):
        end += len(token)
        if at < end:
            return i
    return len(tokens)


def _corruption(
    pairs: Sequence[tuple[GreedyOutput, GreedyOutput]], levels: Sequence[LevelResult], config: EngineConfig
) -> str | None:
    """The name of a known pattern of silent corruption, given that some texts differ; None when none fits."""
    differing = [(known.text, answer.text) for known, answer in pairs if known.text != answer.text]
    few = len(pairs) / 4
    if len(differing) > 2 * few and (said := pinned(levels, config)):
        return said
    if sum(loops(answer) and not loops(known) for known, answer in differing) > few:
        return "repetition loops"
    vocabulary = {word for known, _ in pairs for word in _words(known.text)}
    if sum(_unlike(answer, vocabulary) for _, answer in differing) > few:
        return "text unlike the baseline's"
    return None


def pinned(levels: Sequence[LevelResult], config: EngineConfig) -> str | None:
    """Say so when speculation's accept length is stuck at 1.00 or at its ceiling at every level."""
    lengths = [level.accept_length for level in levels if level.accept_length is not None]
    ceiling = accept_ceiling(config)
    if not lengths or config.speculation.algorithm == "none":
        return None
    if max(lengths) <= 1 + PINNED:
        return "accept length pinned at 1.00"
    if ceiling is not None and min(lengths) >= ceiling * (1 - PINNED):
        return "accept length pinned at the ceiling"
    return None


def loops(text: str) -> bool:
    """True when the text ends in one pattern over and over."""
    words = _words(text)
    for size in range(1, LOOP_WORDS + 1):
        pattern = words[-size:]
        if len(words) >= size * LOOP_TIMES and words[-size * LOOP_TIMES :] == pattern * LOOP_TIMES:
            return True
    return False


def _unlike(text: str, vocabulary: set[str]) -> bool:
    words = _words(text)
    return not words or sum(word in vocabulary for word in words) < FEWEST_SHARED_WORDS * len(words)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.casefold())
