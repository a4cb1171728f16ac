"""What a request asks for and what comes back, between HTTP and the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of one request so far. The speculative ones are None without speculation."""

    prompt_tokens: int
    completion_tokens: int = 0
    verify_steps: int | None = None
    correct_drafts: int | None = None
    proposed_drafts: int | None = None

    def spec_details(self) -> dict[str, int | float]:
        """SGLang's per-request fields; empty without speculation."""
        if not self.verify_steps or self.correct_drafts is None or self.proposed_drafts is None:
            return {}
        details: dict[str, int | float] = {
            "spec_accept_length": self.completion_tokens / self.verify_steps,
            "spec_num_correct_drafts": self.correct_drafts,
            "spec_num_proposed_drafts": self.proposed_drafts,
            "spec_verify_ct": self.verify_steps,
        }
        if self.proposed_drafts:
            details["spec_accept_rate"] = self.correct_drafts / self.proposed_drafts
        return details


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, checked and tokenized. `temperature` 0 is greedy; `logprobs` None asks for none."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """An output token. `top` holds (token, logprob) pairs, likeliest first."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What one decode step added; its text may lag behind its tokens (see `TextStream`)."""

    text: str
    tokens: tuple[Token, ...]
    tally: Tally


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended. `matched` is the stop string or end token that did it."""

    finish_reason: Literal["stop", "length", "abort"]
    matched: str | int | None
    text: str  # what was held back until now
    tally: Tally
