"""Request bodies: what is honoured, what is refused by name, and what is a clear 400."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.embedded.requests import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    Limits,
    RequestError,
    chat_ask,
    completion_ask,
    generate_ask,
    parse,
)

LIMITS = Limits(context_length=100, vocab_size=256)
HI = {"messages": [{"role": "user", "content": "hi"}]}


class Bytes:
    """A tokenizer of one token a byte."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
        return self("".join(f"{m['role']}:{m['content']};" for m in messages))


def chat(**fields: Any) -> Any:
    return chat_ask(parse(ChatBody, HI | fields), Bytes(), LIMITS)


def completion(**fields: Any) -> Any:
    return completion_ask(parse(CompletionBody, {"prompt": "hi"} | fields), Bytes(), LIMITS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"5": 1}),
        ("frequency_penalty", 0.5),
        ("echo", True),
    ],
)
def test_what_the_engine_lacks_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as refused:
        chat(**{field: value})
    assert refused.value.param == field


def test_the_same_fields_pass_when_they_ask_for_nothing() -> None:
    asked = chat(n=1, tools=[], tool_choice="auto", response_format={"type": "text"}, frequency_penalty=0, stop=None)
    assert asked.stop == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"max_tokens": 95}, "max_tokens"),  # over the context
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(**fields)
    assert refused.value.param == param


def test_top_logprobs_alone_is_refused() -> None:
    with pytest.raises(RequestError, match="logprobs"):
        chat(top_logprobs=2)


def test_a_chat_takes_text_parts_and_fills_the_context_by_default() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert chat(messages=[{"role": "user", "content": parts}]) == chat()
    assert len(chat().prompt_ids) + chat().max_tokens == LIMITS.context_length
    assert chat(max_tokens=5).max_tokens == chat(max_completion_tokens=5).max_tokens == 5


def test_a_developer_speaks_as_the_system() -> None:
    assert bytes(chat(messages=[{"role": "developer", "content": "x"}]).prompt_ids) == b"system:x;"


def test_logprobs_of_a_chat_are_off_without_the_switch() -> None:
    assert chat().logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=2).logprobs == 2


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105]])
def test_a_completion_takes_text_or_tokens(prompt: Any) -> None:
    assert completion(prompt=prompt).prompt_ids == (104, 105)
    assert completion(prompt=prompt).max_tokens == 16


@pytest.mark.parametrize("prompt", ["", [], [300], [-1], ["a", "b"]])
def test_a_completion_refuses_what_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(RequestError) as refused:
        completion(prompt=prompt)
    assert refused.value.param == "prompt"


def test_generate_reads_its_sampling_parameters() -> None:
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 3, "temperature": 0, "stop": ["x", ""]}}
    asked = generate_ask(parse(GenerateBody, body), Bytes(), LIMITS)
    assert (asked.max_tokens, asked.temperature, asked.stop) == (3, 0, ("x",))
    with pytest.raises(RequestError, match="json_schema"):
        parse(GenerateBody, {"text": "hi", "sampling_params": {"json_schema": "{}"}})
    with pytest.raises(RequestError, match="text or input_ids"):
        parse(GenerateBody, {"text": "hi", "input_ids": [1]})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [*ChatBody.model_fields, "n", "tools", "response_format", "prompt"]


@given(json_values | st.dictionaries(st.sampled_from(FIELDS), json_values).map(lambda fields: HI | fields))
def test_any_json_is_a_request_or_a_request_error(data: Any) -> None:
    for kind, ask in ((ChatBody, chat_ask), (CompletionBody, completion_ask)):
        try:
            asked = ask(parse(kind, data), Bytes(), LIMITS)
        except RequestError:
            continue
        assert asked.max_tokens >= 1
