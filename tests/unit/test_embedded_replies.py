"""Answers: OpenAI's shapes and SGLang's, the same whether streamed or whole."""

from __future__ import annotations

from typing import Any

import pytest

from serve.embedded.records import Outcome, Step, Tally, Token
from serve.embedded.replies import Chat, Completion, Native, error_body
from serve.embedded.requests import Limits
from tests.unit.test_embedded_requests import HI, Bytes

LIMITS = Limits(context_length=1000, vocab_size=256)


class Vocabulary(Bytes):
    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode()


def step(text: str, done: int, *tokens: Token) -> Step:
    return Step(text, tokens, Tally(2, done, 2, done - 2, 6))


STEPS = [
    step("a", 1, Token(97, -0.5, ((97, -0.5), (98, -1.5)))),
    step("", 2, Token(98, -0.1, ((98, -0.1), (99, -3.0)))),
    step("bc", 4, Token(99, -0.2, ((99, -0.2), (97, -2.0))), Token(100, -0.3, ((100, -0.3), (98, -2.0)))),
]
OUTCOME = Outcome("stop", "!", "d", Tally(2, 4, 2, 2, 6))
DETAILS = {
    "spec_accept_length": 2.0,
    "spec_num_correct_drafts": 2,
    "spec_num_proposed_drafts": 6,
    "spec_verify_ct": 2,
    "spec_accept_rate": pytest.approx(1 / 3),
}
USAGE = {
    "prompt_tokens": 2,
    "completion_tokens": 4,
    "total_tokens": 6,
    "prompt_tokens_details": {"cached_tokens": 0},
}


def events(dialect: Any) -> list[dict[str, Any]]:
    return [event for s in STEPS for event in dialect.chunk(s)] + dialect.last(OUTCOME)


def make(kind: Any, **fields: Any) -> Any:
    base = {Chat: HI, Completion: {"prompt": "hi"}, Native: {"text": "hi"}}[kind]
    return kind(base | fields, Vocabulary(), LIMITS, "m")


def test_a_streamed_chat_says_who_speaks_once_and_ends_with_reason_counts_and_usage() -> None:
    sent = events(make(Chat, stream_options={"include_usage": True}, return_spec_tokens_details=True))
    deltas = [event["choices"][0]["delta"] for event in sent if event["choices"]]
    assert deltas == [{"role": "assistant", "content": "a"}, {"content": "bc"}, {"content": "d"}, {}]
    assert [event["choices"][0]["finish_reason"] for event in sent[:4]] == [None, None, None, "stop"]
    assert sent[4]["choices"] == [] and sent[4]["sglext"]["spec_tokens_details"] == DETAILS
    assert sent[5]["choices"] == [] and sent[5]["usage"] == USAGE
    assert len({event["id"] for event in sent}) == 1


def test_nothing_is_added_that_was_not_asked_for() -> None:
    sent = events(make(Chat))
    assert all(event["choices"] for event in sent)
    assert not any("sglext" in event or "usage" in event for event in sent)


@pytest.mark.parametrize("kind", [Chat, Completion])
def test_whole_and_streamed_answers_hold_the_same_text_and_logprobs(kind: Any) -> None:
    asked = {"logprobs": True, "top_logprobs": 2} if kind is Chat else {"logprobs": 2}
    whole = make(kind, **asked).whole(STEPS, OUTCOME)
    choice = whole["choices"][0]
    text = choice["message"]["content"] if kind is Chat else choice["text"]
    streamed = [event["choices"][0] for event in events(make(kind, **asked))]
    assert text == "".join(c["delta"].get("content", "") if kind is Chat else c["text"] for c in streamed) == "abcd"
    assert whole["usage"] == USAGE
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", "!")
    parts = [c["logprobs"] for c in streamed if c["logprobs"]]
    for key in choice["logprobs"]:
        assert choice["logprobs"][key] == [entry for part in parts for entry in part[key]]


def test_a_chat_logprob_holds_token_bytes_and_the_likeliest() -> None:
    first = make(Chat, logprobs=True, top_logprobs=2).whole(STEPS, OUTCOME)["choices"][0]["logprobs"]["content"][0]
    assert first["token"] == "a" and first["bytes"] == [97] and first["logprob"] == -0.5
    assert [entry["token"] for entry in first["top_logprobs"]] == ["a", "b"]


def test_meta_info_is_on_the_choice_as_sglang_has_it() -> None:
    choice = make(Chat, return_meta_info=True).whole(STEPS, OUTCOME)["choices"][0]
    assert choice["meta_info"].items() >= {"completion_tokens": 4, "spec_verify_ct": 2, "cached_tokens": 0}.items()


def test_generate_repeats_the_text_so_far() -> None:
    sent = events(make(Native, return_logprob=True, top_logprobs_num=2))
    assert [event["text"] for event in sent] == ["a", "a", "abc", "abcd"]
    assert sent[-1]["output_ids"] == [97, 98, 99, 100]
    assert sent[0]["meta_info"]["finish_reason"] is None
    assert sent[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "!"}
    assert sent[-1]["meta_info"]["output_top_logprobs"][0] == [[-0.5, 97, None], [-1.5, 98, None]]
    whole = make(Native, return_logprob=True, top_logprobs_num=2).whole(STEPS, OUTCOME)
    whole["meta_info"]["id"] = sent[-1]["meta_info"]["id"]
    assert whole == sent[-1]


def test_without_speculation_no_field_of_it_is_sent() -> None:
    plain = Outcome("length", None, "", Tally(2, 4))
    body = make(Chat, return_meta_info=True, return_spec_tokens_details=True).whole([], plain)
    assert "sglext" not in body
    assert not [name for name in body["choices"][0]["meta_info"] if name.startswith("spec_")]


def test_an_accept_rate_without_proposals_is_missing_not_zero() -> None:
    assert "spec_accept_rate" not in Tally(2, 4, 4, 0, 0).spec_details()


def test_errors_have_openai_s_shape() -> None:
    assert error_body("no", 400, "n")["error"] == {
        "message": "no", "type": "invalid_request_error", "param": "n", "code": None,
    }  # fmt: skip
    assert error_body("no", 503)["error"]["type"] == "server_error"
