"""How long the phases of a trial take; pure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Store the seconds that a block took under its name, also when it raises."""
    began = time.monotonic()
    try:
        yield
    finally:
        phases[name] = time.monotonic() - began
