"""Collects the greedy answers that the lossless check compares: fixed prompts, temperature 0, no tags."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import MeasurementError
from pipeline.load import Sending, post_chat
from pipeline.lossless import GreedyOutput
from pipeline.spec import WorkloadSpec
from pipeline.workload import Prompt

TOGETHER = 8  # streams at once, for the batched answers


async def greedy_outputs(
    sending: Sending, prompts: Mapping[str, Sequence[Prompt]], spec: WorkloadSpec, *, margins: bool
) -> tuple[GreedyOutput, ...]:
    """Answer the first `spec.greedy_prompts` of each set together; with `margins` also each alone before.

    Margins need log-probabilities, which the baseline alone is asked for: not every speculation gives
    them. A server without them is asked again without.

    Raises:
        MeasurementError: a request failed.
    """
    chosen = [prompt for rows in prompts.values() for prompt in rows[: spec.greedy_prompts]]
    alone = [await _answer(sending, prompt, spec, batched=False) for prompt in chosen] if margins else []
    gate = asyncio.Semaphore(TOGETHER)

    async def together(prompt: Prompt) -> GreedyOutput:
        async with gate:
            return await _answer(sending, prompt, spec, batched=True)

    return (*alone, *await asyncio.gather(*map(together, chosen)))


async def _answer(sending: Sending, prompt: Prompt, spec: WorkloadSpec, *, batched: bool) -> GreedyOutput:
    payload: dict[str, Any] = {
        "model": sending.model,
        "messages": prompt.messages,
        "max_tokens": spec.greedy_tokens,
        "temperature": 0.0,
    }
    asked = payload if batched else payload | {"logprobs": True, "top_logprobs": 2}
    status, reply = await post_chat(sending, asked)
    if status == 400 and asked is not payload:
        status, reply = await post_chat(sending, payload)
    if status != 200:
        raise MeasurementError(f"greedy prompt {prompt.prompt_id}: HTTP {status} {str(reply)[:200]}")
    choice = reply["choices"][0]
    tokens, margins = _margins((choice.get("logprobs") or {}).get("content") or ())
    text = choice["message"].get("content") or ""
    return GreedyOutput(prompt_id=prompt.prompt_id, text=text, tokens=tokens, margins=margins, batched=batched)


def _margins(
    content: Sequence[Mapping[str, Any]],
) -> tuple[tuple[str, ...] | None, tuple[float | None, ...] | None]:
    """The tokens' texts and their top-1 minus top-2; (None, None) where none were sent."""
    if not content:
        return None, None
    best = [sorted((top["logprob"] for top in entry.get("top_logprobs") or ()), reverse=True) for entry in content]
    margins = tuple(top[0] - top[1] if len(top) > 1 else None for top in best)
    return tuple(entry["token"] for entry in content), margins
