"""The engine on a tiny random model: lossless with speculation, honest counts, and every way to stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.embedded.engine import Engine
from serve.embedded.flags import parse
from serve.embedded.records import Ask, Outcome, Step
from tests.fakes.tiny_model import CONTEXT, build

PROMPTS = ("the cat sat on the mat. the cat sat", "to be or not to be, to be or", "12 34 12 34 12")
NGRAM = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "5"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`varied` hardly repeats itself, `looping` does; `draft` is another model, `foreign` of another vocabulary."""
    root = tmp_path_factory.mktemp("models")
    return {
        "varied": build(root / "varied"),
        "looping": build(root / "looping", spread=0.05),
        "draft": build(root / "draft", layers=1, seed=1),
        "foreign": build(root / "foreign", extra_vocab=3),
    }


Load = Callable[..., Engine]


@pytest.fixture(scope="module")
def load(folders: dict[str, Path]) -> Load:
    def load(model: str, *flags: str, draft: str | None = None) -> Engine:
        if draft is not None:
            flags = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", draft, *flags)
        args = parse(["--model", str(folders[model]), "--threads", "1", *flags])
        return Engine(folders[model], args, folders[draft] if draft else None)

    return load


@pytest.fixture(scope="module")
def varied(load: Load) -> Engine:
    return load("varied")


def ask(engine: Engine, prompt: str, **changes: Any) -> Ask:
    fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True} | changes
    return Ask(prompt_ids=tuple(engine.tokenizer(prompt)["input_ids"]), **fields)


def run(engine: Engine, request: Ask) -> tuple[list[int], Outcome, list[Step]]:
    steps: list[Step] = []
    outcome = engine.generate(request, steps.append, lambda: False)
    return [token.id for step in steps for token in step.tokens], outcome, steps


def plain(engine: Engine, prompt: str, tokens: int) -> list[int]:
    """Greedy decoding by hand, one full pass a token: no cache, no `generate()`."""
    ids = engine.tokenizer(prompt, return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    for _ in range(tokens):
        with torch.inference_mode():
            ids = torch.cat([ids, engine._model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return list(ids[0, start:].tolist())


@pytest.mark.parametrize("model", ["varied", "looping"])
@pytest.mark.parametrize(
    ("flags", "draft"), [((), None), (NGRAM, None), ((), "draft"), (("--speculative-num-steps", "2"), "varied")]
)
def test_greedy_output_is_exactly_the_model_s_own_whatever_speculates(
    load: Load, model: str, flags: list[str], draft: str | None
) -> None:
    engine = load(model, *flags, draft=draft)
    for prompt in PROMPTS:
        tokens, outcome, _ = run(engine, ask(engine, prompt))
        assert tokens == plain(engine, prompt, 40)
        assert outcome.finish_reason == "length"


def test_counts_are_those_of_the_steps_themselves(load: Load) -> None:
    engine = load("looping", *NGRAM)
    tokens, outcome, steps = run(engine, ask(engine, PROMPTS[0]))
    tally = outcome.tally
    assert tally.completion_tokens == len(tokens) == 40
    assert tally.verify_steps == len(steps) < 40  # it loops, so lookups hit
    assert tally.correct_drafts == sum(len(step.tokens) - 1 for step in steps)
    assert tally.proposed_drafts is not None and tally.correct_drafts is not None
    assert tally.correct_drafts <= tally.proposed_drafts <= 4 * len(steps)  # 5 with the bonus token
    assert max(len(step.tokens) for step in steps) == 5


def test_a_draft_that_is_the_target_is_always_right(load: Load) -> None:
    engine = load("varied", "--speculative-num-steps", "3", draft="varied")
    _, outcome, _ = run(engine, ask(engine, PROMPTS[0]))
    assert outcome.tally.verify_steps == 10  # 40 tokens, 3 drafts and the bonus each
    assert outcome.tally.correct_drafts == outcome.tally.proposed_drafts == 30


def test_without_speculation_there_are_no_counts_of_it(varied: Engine) -> None:
    _, outcome, steps = run(varied, ask(varied, PROMPTS[0]))
    assert outcome.tally.verify_steps is outcome.tally.correct_drafts is None
    assert all(len(step.tokens) == 1 for step in steps)


@pytest.mark.parametrize("flags", [(), NGRAM])
def test_logprobs_are_the_model_s_at_each_position(load: Load, flags: list[str]) -> None:
    engine = load("looping", *flags)
    request = ask(engine, PROMPTS[1], logprobs=2)
    tokens, _, steps = run(engine, request)
    with torch.inference_mode():
        logits = engine._model(torch.tensor([[*request.prompt_ids, *tokens]])).logits[0].log_softmax(-1)
    for offset, token in enumerate(token for step in steps for token in step.tokens):
        row = logits[len(request.prompt_ids) + offset - 1]
        assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-4)
        assert [value for _, value in token.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


def test_an_end_token_stops_unless_it_is_to_be_ignored(varied: Engine) -> None:
    ending = frozenset(plain(varied, PROMPTS[0], 10)[9:])
    original, varied.end_ids = varied.end_ids, ending
    try:
        tokens, outcome, _ = run(varied, ask(varied, PROMPTS[0], ignore_eos=False))
        ignored, _, _ = run(varied, ask(varied, PROMPTS[0]))
    finally:
        varied.end_ids = original
    assert outcome.finish_reason == "stop" and outcome.matched == tokens[-1] in ending
    assert not ending & set(tokens[:-1])
    assert outcome.tally.completion_tokens == len(tokens) <= 10
    assert len(ignored) == 40


@pytest.mark.parametrize("flags", [(), NGRAM])
def test_a_stop_string_ends_the_text_before_itself(load: Load, flags: list[str]) -> None:
    engine = load("looping", *flags)
    _, outcome, steps = run(engine, ask(engine, PROMPTS[0]))
    full = "".join(step.text for step in steps) + outcome.text
    stop = full[len(full) // 2 :][:2]
    tokens, outcome, steps = run(engine, ask(engine, PROMPTS[0], stop=(stop,)))
    assert "".join(step.text for step in steps) + outcome.text == full[: full.index(stop)]
    assert (outcome.finish_reason, outcome.matched) == ("stop", stop)
    assert outcome.tally.completion_tokens == len(tokens) < 40


def test_a_client_that_went_away_stops_the_work(varied: Engine) -> None:
    steps: list[Step] = []
    outcome = varied.generate(ask(varied, PROMPTS[0]), steps.append, lambda: len(steps) >= 3)
    assert outcome.finish_reason == "abort"
    assert outcome.tally.completion_tokens == 3


def test_a_seed_repeats_a_sample_and_another_does_not(varied: Engine) -> None:
    samples = [run(varied, ask(varied, PROMPTS[0], temperature=1.0, seed=seed))[0] for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]


def test_what_does_not_fit_the_model_is_refused_at_the_start(load: Load, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{CONTEXT + 1} is longer"):
        load("varied", "--context-length", str(CONTEXT + 1))
    with pytest.raises(ValueError, match="same vocabulary"):
        load("varied", draft="foreign")
    with pytest.raises(OSError, match="config"):
        Engine(tmp_path, parse(["--model", str(tmp_path)]))
