"""Answers in the shapes of OpenAI's two endpoints and of SGLang's `/generate`, streamed or whole.

A dialect is made for one request. It takes the engine's steps and outcome in order and gives JSON
objects; `serve.embedded.server` puts them on the wire.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Protocol

from serve.embedded.records import Ask, Outcome, Step, Tally, Token
from serve.embedded.requests import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    Limits,
    Tokenizer,
    chat_ask,
    completion_ask,
    generate_ask,
    parse,
)

Json = dict[str, Any]


class Vocabulary(Tokenizer, Protocol):
    """A tokenizer that also gives a token's text."""

    def decode(self, ids: list[int], **options: Any) -> str: ...


class Dialect(Protocol):
    """One endpoint's way of asking and answering."""

    ask: Ask
    stream: bool

    def chunk(self, step: Step) -> list[Json]:
        """Stream events of one step."""
        ...

    def last(self, outcome: Outcome) -> list[Json]:
        """Stream events at the end."""
        ...

    def whole(self, steps: list[Step], outcome: Outcome) -> Json:
        """The answer in one piece."""
        ...


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> Json:
    """An error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 429 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _OpenAI:
    """What chat and completion have in common."""

    object_name = chunk_name = id_prefix = ""

    def __init__(self, body: ChatBody | CompletionBody, ask: Ask, vocabulary: Vocabulary, model: str) -> None:
        self.ask, self.stream = ask, body.stream
        self._options, self._vocabulary = body, vocabulary
        self._head: Json = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._texts = [""]

    def chunk(self, step: Step) -> list[Json]:
        """One event, unless the step's text is still held back and no one asked for its logprobs."""
        if not step.text and self.ask.logprobs is None:
            return []
        return [self._event([self._delta(step.text, self._logprobs(step.tokens))])]

    def last(self, outcome: Outcome) -> list[Json]:
        """The reason, then what was asked for: speculation's counts, usage."""
        events = [self._event([self._delta(outcome.text, None)])] if outcome.text else []
        events.append(self._event([self._delta("", None, outcome)]))
        if details := self._extension(outcome.tally):
            events.append(self._event([]) | details)
        if self._options.stream_options.include_usage:
            events.append(self._event([]) | {"usage": usage(outcome.tally)})
        return events

    def whole(self, steps: list[Step], outcome: Outcome) -> Json:
        """The answer in one piece."""
        text = "".join(step.text for step in steps) + outcome.text
        tokens = tuple(token for step in steps for token in step.tokens)
        choice = self._choice(text, self._logprobs(tokens), outcome)
        body = self._head | {"object": self.object_name, "choices": [choice], "usage": usage(outcome.tally)}
        return body | self._extension(outcome.tally)

    def _event(self, choices: list[Json]) -> Json:
        return self._head | {"object": self.chunk_name, "choices": choices}

    def _extension(self, tally: Tally) -> Json:
        """SGLang's place for speculation's counts, on request."""
        details = tally.spec_details() if self._options.return_spec_tokens_details else {}
        return {"sglext": {"spec_tokens_details": details}} if details else {}

    def _text_of(self, token: int) -> str:
        return self._vocabulary.decode([token])

    def _logprobs(self, tokens: tuple[Token, ...]) -> Json | None:
        raise NotImplementedError

    def _delta(self, text: str, logprobs: Json | None, outcome: Outcome | None = None) -> Json:
        raise NotImplementedError

    def _choice(self, text: str, logprobs: Json | None, outcome: Outcome) -> Json:
        raise NotImplementedError


class Chat(_OpenAI):
    """`/v1/chat/completions`."""

    object_name, chunk_name, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, data: Any, vocabulary: Vocabulary, limits: Limits, model: str) -> None:
        body = parse(ChatBody, data)
        super().__init__(body, chat_ask(body, vocabulary, limits), vocabulary, model)
        self._meta, self._role = body.return_meta_info, {"role": "assistant"}

    def _delta(self, text: str, logprobs: Json | None, outcome: Outcome | None = None) -> Json:
        delta = self._role | ({"content": text} if outcome is None else {})
        self._role = {}  # only the first delta says who speaks
        return {"index": 0, "delta": delta, "logprobs": logprobs} | _reason(outcome)

    def _choice(self, text: str, logprobs: Json | None, outcome: Outcome) -> Json:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": logprobs} | _reason(outcome)
        return choice | ({"meta_info": meta_info(self._head["id"], outcome.tally, outcome)} if self._meta else {})

    def _logprobs(self, tokens: tuple[Token, ...]) -> Json | None:
        if self.ask.logprobs is None:
            return None
        return {
            "content": [
                self._entry(token.id, token.logprob) | {"top_logprobs": [self._entry(*pair) for pair in token.top]}
                for token in tokens
            ]
        }

    def _entry(self, token: int, logprob: float | None) -> Json:
        text = self._text_of(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class Completion(_OpenAI):
    """`/v1/completions`."""

    object_name, chunk_name, id_prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, data: Any, vocabulary: Vocabulary, limits: Limits, model: str) -> None:
        body = parse(CompletionBody, data)
        super().__init__(body, completion_ask(body, vocabulary, limits), vocabulary, model)
        self._offset = 0

    def _delta(self, text: str, logprobs: Json | None, outcome: Outcome | None = None) -> Json:
        return {"index": 0, "text": text, "logprobs": logprobs} | _reason(outcome)

    def _choice(self, text: str, logprobs: Json | None, outcome: Outcome) -> Json:
        return self._delta(text, logprobs, outcome)

    def _logprobs(self, tokens: tuple[Token, ...]) -> Json | None:
        if self.ask.logprobs is None:
            return None
        texts = [self._text_of(token.id) for token in tokens]
        offsets = [self._offset + sum(map(len, texts[:index])) for index in range(len(texts))]
        self._offset += sum(map(len, texts))
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self._text_of(id_): value for id_, value in token.top} for token in tokens],
            "text_offset": offsets,
        }


class Native:
    """SGLang's `/generate`: every stream event repeats the text so far."""

    def __init__(self, data: Any, vocabulary: Vocabulary, limits: Limits, model: str) -> None:
        body = parse(GenerateBody, data)
        self.ask, self.stream = generate_ask(body, vocabulary, limits), body.stream
        self._id = uuid.uuid4().hex
        self._text = ""
        self._tokens: list[Token] = []

    def chunk(self, step: Step) -> list[Json]:
        """The text, tokens and counts so far."""
        self._text += step.text
        self._tokens += step.tokens
        return [self._body(step.tally, None)]

    def last(self, outcome: Outcome) -> list[Json]:
        """The same once more, with the reason."""
        self._text += outcome.text
        return [self._body(outcome.tally, outcome)]

    def whole(self, steps: list[Step], outcome: Outcome) -> Json:
        """The answer in one piece."""
        for step in steps:
            self.chunk(step)
        return self.last(outcome)[0]

    def _body(self, tally: Tally, outcome: Outcome | None) -> Json:
        meta = meta_info(self._id, tally, outcome)
        if self.ask.logprobs is not None:
            meta["output_token_logprobs"] = [[token.logprob, token.id, None] for token in self._tokens]
            meta["output_top_logprobs"] = [[[value, id_, None] for id_, value in t.top] for t in self._tokens]
        return {"text": self._text, "output_ids": [token.id for token in self._tokens], "meta_info": meta}


def usage(tally: Tally) -> Json:
    """OpenAI's token counts. There is no prefix cache, so nothing is ever cached."""
    return {
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "total_tokens": tally.prompt_tokens + tally.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def meta_info(request_id: str, tally: Tally, outcome: Outcome | None) -> Json:
    """SGLang's counts of one request; `finish_reason` is null while it runs."""
    reason: Json | None = None
    if outcome is not None:
        reason = {"type": outcome.finish_reason}
        reason |= {"length": tally.completion_tokens} if outcome.finish_reason == "length" else {}
        reason |= {"matched": outcome.matched} if outcome.matched is not None else {}
    counts = {
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "cached_tokens": 0,
    }
    return {"id": request_id, "finish_reason": reason} | counts | tally.spec_details()


def _reason(outcome: Outcome | None) -> Json:
    if outcome is None:
        return {"finish_reason": None}
    return {"finish_reason": outcome.finish_reason, "matched_stop": outcome.matched}
