"""Deterministic text: what the fake model says is a function of the prompt alone.

A token is one common English word with a leading space, so a real tokenizer counts about the same.
At each position the runner-up and its logprob margin are fixed too; some positions are near-ties.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

WORDS = re.findall(
    r"\w+",
    "the of and to in is it you that he was for on are with as his they be at one have this from or had by hot "
    "but some what there we can out other were all your when up use word how said an each she which do their "
    "time if will way about many then them would write like so these her long make thing see him two has look "
    "more day could go come did my sound no most number who over know water than call first people may down side "
    "been now find any new work part take get place made live where after back little only round man year came "
    "show every good me give our under name very through just form much great think say help low line before "
    "turn cause same mean right old too does tell set three want air well also play small end put home read hand "
    "large add land here must big high such",
)
NEAR_TIE = 0.02  # nats


@dataclass(frozen=True)
class Token:
    """One generated token, its runner-up, and how far apart they are (nats)."""

    text: str
    id: int
    logprob: float
    runner_up: int
    margin: float


def digest(*parts: object) -> int:
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def count_tokens(text: str) -> int:
    return max(1, len(text.split()))


def _token(choice: int, other: int, margin: float) -> Token:
    return Token(f" {WORDS[choice]}", choice, -0.05, other, margin)


def generate(prompt: str, length: int, *, flip_near_ties: str = "", wrong_from: int | None = None) -> list[Token]:
    """Return `length` tokens for `prompt`.

    `flip_near_ties` (any text, such as a collective's name) takes the runner-up at its share of the
    near-ties, and all that follows changes with it. `wrong_from` is a position from which the text
    is simply another one.
    """
    tokens: list[Token] = []
    state = digest(prompt)
    for position in range(length):
        if position == wrong_from:
            state = digest(state, "wrong")
        draw = digest(state, position)
        choice, other = draw % len(WORDS), (draw >> 16) % len(WORDS)
        near = (draw >> 32) % 40 == 0
        margin = NEAR_TIE / 2 if near else 0.5 + ((draw >> 40) % 400) / 100
        if near and flip_near_ties and digest(flip_near_ties, state) % 2:
            choice, other, state = other, choice, digest(state, "flipped")
        tokens.append(_token(choice, other, margin))
    return tokens


def natural_length(prompt: str) -> int:
    """Where the model would stop by itself."""
    return 16 + digest(prompt, "length") % 240
