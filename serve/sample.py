"""A sample of the traffic's prompts, only where the operator asks for one: the next study's workload."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Sample:
    """Appends one chat in `every` to a JSONL file that only its owner can read, until it has `limit` lines.

    The lines have the shape that a space file's `workload.prompts` takes. Answers are never kept.
    """

    def __init__(self, path: Path, *, every: int, limit: int) -> None:
        self._path, self._every, self._limit = path, every, limit
        self._seen = 0
        self._kept = sum(1 for _ in path.open()) if path.is_file() else 0

    def offer(self, route: str, body: bytes) -> None:
        """Keep this request, if it is its turn and a chat of plain texts."""
        self._seen += route == "/v1/chat/completions"
        if route != "/v1/chat/completions" or self._seen % self._every or self._kept >= self._limit:
            return
        messages = _texts(body)
        if messages:
            self._kept += 1
            with os.fdopen(os.open(self._path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600), "a") as file:
                file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def _texts(body: bytes) -> list[dict[str, str]] | None:
    """The messages of a chat, None when they are anything but texts."""
    try:
        asked: Any = json.loads(body)
        messages = [{"role": m["role"], "content": m["content"]} for m in asked["messages"]]
    except (ValueError, KeyError, TypeError):
        return None
    plain = all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in messages)
    return messages if plain else None
