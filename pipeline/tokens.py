"""Counts the tokens of a text with the model's own tokenizer, as a check on a server's `usage`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from pipeline.models import MODELS, resolve


@lru_cache(maxsize=2)
def token_counter(model: str) -> Callable[[str], int] | None:
    """A counter for a model that lies on this disk; None for others: nothing is fetched for a check."""
    if not (model in MODELS or Path(model).is_dir()):
        return None
    file = resolve(model) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
