"""The lossless check: what is equal, what is numerics, what is wrong, and corruption by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import DraftModelSpeculation, EngineConfig, NgramSpeculation
from pipeline.errors import MeasurementError
from pipeline.lossless import (
    GreedyOutput,
    Reference,
    accept_ceiling,
    allowed_flips,
    compare,
    first_difference,
    loops,
    tolerance_of,
)
from pipeline.records import Estimate, LevelResult, LoadLevel

EAGLE = DraftModelSpeculation(algorithm="EAGLE3", draft_model="d", num_steps=3, eagle_topk=1, num_draft_tokens=4)
BF16 = EngineConfig(engine="sglang", model="m", speculation=EAGLE)
FP32 = EngineConfig(engine="embedded", model="m", speculation=NgramSpeculation(num_draft_tokens=4))
WORDS = tuple(
    f" {w}"
    for w in [
        "the",
        "depot",
        "received",
        "forty",
        "jars",
        "and",
        "two",
        "boards",
        "from",
        "a",
        "warehouse",
        "near",
        "the",
        "old",
        "harbour",
    ]
)


def output(i: int = 0, tokens: tuple[str, ...] = WORDS, margin: float = 3.0, *, batched: bool = True) -> GreedyOutput:
    return GreedyOutput(
        prompt_id=f"p{i}", text="".join(tokens), tokens=tokens, margins=(margin,) * len(tokens), batched=batched
    )


def flipped(i: int = 0, at: int = 5, word: str = " but") -> GreedyOutput:
    return GreedyOutput(prompt_id=f"p{i}", text="".join((*WORDS[:at], word, *WORDS[at + 1 :])))


def reference(count: int = 8, margin: float = 3.0, flips: int = 0) -> Reference:
    return Reference(outputs=tuple(output(i, margin=margin) for i in range(count)), flips=flips)


def level(accept_length: float | None) -> LevelResult:
    return LevelResult(
        level=LoadLevel(workload="extract", concurrency=1),
        window_s=1.0,
        requests_ok=1,
        output_tokens=1,
        output_tok_per_s=Estimate(value=1.0),
        accept_length=accept_length,
    )


def test_equal_outputs_pass() -> None:
    result = compare(reference(), [output(i) for i in range(8)], [level(3.0)], BF16)
    assert (result.passed, result.identical, result.diffs) == (True, 8, ())


def test_the_first_difference_is_the_baselines_token_and_its_margin() -> None:
    known = output().model_copy(update={"margins": tuple(float(i) for i in range(len(WORDS)))})
    diff = first_difference(known, flipped(at=5), tolerance=0.25)
    assert (diff.first_difference, diff.margin, diff.verdict) == (5, 5.0, "wrong")


def test_a_flip_at_a_near_tie_is_counted_as_numerics() -> None:
    result = compare(reference(margin=0.1), [flipped(0), *(output(i) for i in range(1, 8))], [level(3.0)], BF16)
    assert (result.passed, result.numerics, result.wrong) == (True, 1, 0)


def test_a_flip_at_a_clear_margin_fails() -> None:
    result = compare(reference(margin=2.0), [flipped(0), *(output(i) for i in range(1, 8))], [level(3.0)], BF16)
    assert (result.passed, result.numerics, result.wrong) == (False, 0, 1)


def test_a_flip_whose_margin_nobody_knows_is_not_excused() -> None:
    known = Reference(outputs=tuple(GreedyOutput(prompt_id=o.prompt_id, text=o.text) for o in reference().outputs))
    assert not compare(known, [flipped(0)], [level(3.0)], BF16).passed


def test_more_near_tie_flips_than_the_baseline_shows_itself_fail() -> None:
    near = reference(count=16, margin=0.1, flips=1)
    allowed = allowed_flips(near)
    for flips, passed in ((allowed, True), (allowed + 1, False)):
        outputs = [flipped(i) if i < flips else output(i) for i in range(16)]
        result = compare(near, outputs, [level(3.0)], BF16)
        assert (result.passed, result.allowed_flips) == (passed, allowed)


def test_on_the_embedded_fp32_engine_equality_is_exact() -> None:
    result = compare(reference(margin=0.0), [flipped(0)], [level(2.0)], FP32)
    assert (result.passed, result.tolerance, result.wrong) == (False, None, 1)
    assert tolerance_of(FP32.model_copy(update={"dtype": "bfloat16"})) is not None


@given(st.text(max_size=30), st.text(max_size=30))
def test_only_equal_texts_have_no_difference(a: str, b: str) -> None:
    diff = first_difference(GreedyOutput(prompt_id="p", text=a), GreedyOutput(prompt_id="p", text=b), None)
    assert (diff is None) == (a == b)
    assert diff is None or a[: diff.first_difference] == b[: diff.first_difference]


@pytest.mark.parametrize(("cut", "at"), [(6, 6), (len(WORDS), None)])
def test_an_answer_that_ends_early_differs_where_it_ends(cut: int, at: int | None) -> None:
    diff = first_difference(output(), GreedyOutput(prompt_id="p0", text="".join(WORDS[:cut])), 0.25)
    assert (None if diff is None else diff.first_difference) == at


def test_an_answer_that_goes_on_differs_after_the_last_token() -> None:
    longer = GreedyOutput(prompt_id="p0", text="".join(WORDS) + " today")
    assert first_difference(output(), longer, 0.25).first_difference == len(WORDS)


def test_the_baseline_is_its_own_measure_of_flips() -> None:
    alone = [output(i, batched=False) for i in range(4)]
    found = Reference.of([*alone, flipped(0), *(output(i) for i in range(1, 4))])
    assert (found.flips, len(found.outputs)) == (1, 4)
    assert found.outputs[0].margins is not None
    assert Reference.model_validate_json(found.model_dump_json()) == found
    with pytest.raises(MeasurementError, match="no greedy outputs"):
        Reference.of([])


def garbled(word: str) -> list[GreedyOutput]:
    return [GreedyOutput(prompt_id=f"p{i}", text=" ".join([word] * 14)) for i in range(8)]


def unlike() -> list[GreedyOutput]:
    return [GreedyOutput(prompt_id=f"p{i}", text=" ".join(f"zq{j}{i}" for j in range(14))) for i in range(8)]


@pytest.mark.parametrize(
    ("outputs", "accept_length", "name"),
    [
        (garbled("the"), 4.0, "accept length pinned at the ceiling"),
        (unlike(), 1.0, "accept length pinned at 1.00"),
        (garbled("the"), 2.5, "repetition loops"),
        (unlike(), 2.5, "text unlike the baseline's"),
    ],
)
def test_corruption_is_caught_by_name(outputs: list[GreedyOutput], accept_length: float, name: str) -> None:
    result = compare(reference(margin=0.1), outputs, [level(accept_length)], BF16)
    assert (result.corruption, result.passed) == (name, False)


def test_a_deserved_ceiling_is_no_corruption() -> None:
    result = compare(reference(), [output(i) for i in range(8)], [level(4.0)], BF16)
    assert (result.corruption, result.passed) == (None, True)


def test_outputs_of_other_prompts_cannot_be_held_against_the_baseline() -> None:
    with pytest.raises(MeasurementError, match="no greedy output"):
        compare(reference(2), [output(9)], [level(3.0)], BF16)


def test_ceilings_follow_each_algorithms_own_count() -> None:
    assert accept_ceiling(BF16) == 4
    assert accept_ceiling(FP32) == 4
    assert accept_ceiling(EngineConfig(engine="sglang", model="m")) is None


@pytest.mark.parametrize(
    ("text", "looping"),
    [("a b c d e f g h", False), ("so it goes " + "on and on, " * 5, True), ("no no no no", True), ("ha ha", False)],
)
def test_loops_are_patterns_repeated_at_the_end(text: str, looping: bool) -> None:
    assert loops(text) is looping


def test_a_flip_is_looked_for_in_the_whole_word_since_only_text_tells_where_the_other_went() -> None:
    """Seen on two GPUs: " " + "1 teaspoon" against " pinch": the flip was at the space, a near-tie, not at the "1"."""
    known = GreedyOutput(
        prompt_id="p", text="salt, 1 teaspoon", tokens=("salt", ",", " ", "1", " teaspoon"),
        margins=(3.0, 2.25, 0.125, 1.375, 2.6),
    )  # fmt: skip
    near = first_difference(known, GreedyOutput(prompt_id="p", text="salt, pinch"), tolerance=0.25)
    assert near is not None
    assert (near.margin, near.verdict) == (0.125, "numerics")
    clear = first_difference(known, GreedyOutput(prompt_id="p", text="salt, 1 spoon"), tolerance=0.25)
    assert clear is not None
    assert (clear.margin, clear.verdict) == (2.6, "wrong")
