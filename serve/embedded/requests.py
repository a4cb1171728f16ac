"""Request bodies of the three endpoints, checked and turned into an `Ask`.

Fields that the engine cannot honour are refused by name; fields that change nothing are ignored,
as SGLang ignores them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serve.embedded.records import Ask


class RequestError(Exception):
    """A request that is answered with 400: what is wrong, and the field that holds it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Tokenizer(Protocol):
    """What is asked of a tokenizer here."""

    def __call__(self, text: str) -> Mapping[str, list[int]]: ...
    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> Mapping[str, list[int]]: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model allows: its context, and ids below its vocabulary's size."""

    context_length: int
    vocab_size: int


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        # OpenAI's clients send null for "not stated".
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


Body = TypeVar("Body", bound=_Body)


class _Sampling(_Body):
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    stop: str | list[str] = Field(default_factory=list)
    ignore_eos: bool = False

    def stops(self) -> tuple[str, ...]:
        """Stop strings, without empty ones, which would match everywhere."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        return tuple(stop for stop in stops if stop)


class StreamOptions(_Body):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class _OpenAIBody(_Sampling):
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    return_spec_tokens_details: bool = False


class ChatBody(_OpenAIBody):
    """`/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    return_meta_info: bool = False

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


class CompletionBody(_OpenAIBody):
    """`/v1/completions`."""

    prompt: str | list[int] | list[str]
    logprobs: int | None = Field(None, ge=0, le=20)


class SamplingParams(_Sampling):
    """`sampling_params` of `/generate`."""

    max_new_tokens: int = Field(128, ge=1)
    sampling_seed: int | None = None


class GenerateBody(_Body):
    """SGLang's own `/generate`."""

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingParams = SamplingParams.model_construct()
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give either text or input_ids")
        return self


# What would change the answer but is not there, and the values that ask for nothing.
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "n": lambda value: value == 1,
    "best_of": lambda value: value == 1,
    "tools": lambda value: value == [],
    "tool_choice": lambda value: value in ("none", "auto"),
    "functions": lambda value: value == [],
    "response_format": lambda value: isinstance(value, dict) and value.get("type") == "text",
    "json_schema": lambda value: False,
    "regex": lambda value: False,
    "ebnf": lambda value: False,
    "logit_bias": lambda value: value == {},
    "frequency_penalty": lambda value: value == 0,
    "presence_penalty": lambda value: value == 0,
    "repetition_penalty": lambda value: value == 1,
    "min_p": lambda value: value == 0,
    "echo": lambda value: value is False,
    "suffix": lambda value: value == "",
    "audio": lambda value: False,
    "modalities": lambda value: value == ["text"],
    "stop_token_ids": lambda value: value == [],
    "stop_regex": lambda value: value == [],
}


def parse(kind: type[Body], data: Any) -> Body:
    """Check a decoded JSON body.

    Raises:
        RequestError: a field is wrong, or asks for what the embedded engine does not have.
    """
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    _refuse_unsupported(data)
    if isinstance(params := data.get("sampling_params"), dict):
        _refuse_unsupported(params)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or None
        raise RequestError(f"{where}: {first['msg']}" if where else first["msg"], where) from error


def _refuse_unsupported(data: dict[str, Any]) -> None:
    for name, harmless in _UNSUPPORTED.items():
        value = data.get(name)
        if value is not None and not harmless(value):
            raise RequestError(f"the embedded engine does not support {name}={value!r:.80}", name)


def chat_ask(body: ChatBody, tokenizer: Tokenizer, limits: Limits) -> Ask:
    """A chat: its messages through the model's template; as long as the context allows by default."""
    messages = [_message(message, index) for index, message in enumerate(body.messages)]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    room = max(limits.context_length - len(ids), 1)
    return _ask(
        ids,
        body.max_completion_tokens or body.max_tokens or room,
        limits,
        body,
        seed=body.seed,
        logprobs=body.top_logprobs if body.logprobs else None,
    )


def completion_ask(body: CompletionBody, tokenizer: Tokenizer, limits: Limits) -> Ask:
    """A completion: one prompt, as text or tokens; 16 tokens by default, as OpenAI has it."""
    ids = _prompt_ids(body.prompt, tokenizer)
    return _ask(ids, body.max_tokens or 16, limits, body, seed=body.seed, logprobs=body.logprobs)


def generate_ask(body: GenerateBody, tokenizer: Tokenizer, limits: Limits) -> Ask:
    """SGLang's own request."""
    params = body.sampling_params
    ids = body.input_ids if body.input_ids is not None else list(tokenizer(str(body.text))["input_ids"])
    logprobs = body.top_logprobs_num if body.return_logprob else None
    return _ask(ids, params.max_new_tokens, limits, params, seed=params.sampling_seed, logprobs=logprobs)


def _prompt_ids(prompt: str | list[int] | list[str], tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        if len(prompt) > 1:
            raise RequestError("the embedded engine answers one prompt a request", "prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return [int(token) for token in prompt]


def _message(message: dict[str, Any], index: int) -> dict[str, str]:
    where = f"messages.{index}"
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "developer", "user", "assistant"):
        raise RequestError(f"{where}.role: {role!r} is none of system, developer, user, assistant", f"{where}.role")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        content = "".join(map(str, texts)) if len(texts) == len(content) else None
    if not isinstance(content, str):
        raise RequestError(f"{where}.content: expected text or text parts", f"{where}.content")
    return {"role": "system" if role == "developer" else str(role), "content": content}


def _ask(
    ids: list[int], max_tokens: int, limits: Limits, sampling: _Sampling, *, seed: int | None, logprobs: int | None
) -> Ask:
    if not ids:
        raise RequestError("the prompt is empty", "prompt")
    if not all(0 <= token < limits.vocab_size for token in ids):
        raise RequestError(f"a token id is not in the vocabulary of {limits.vocab_size}", "prompt")
    if len(ids) + max_tokens > limits.context_length:
        raise RequestError(
            f"the request needs {len(ids)} prompt tokens and {max_tokens} new ones; "
            f"the context length is {limits.context_length}",
            "max_tokens",
        )
    return Ask(
        prompt_ids=tuple(ids),
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        seed=seed,
        stop=sampling.stops(),
        ignore_eos=sampling.ignore_eos,
        logprobs=logprobs,
    )
