"""Numbers as a person reads them; a dash for what is missing."""

from __future__ import annotations

import math

from pipeline.records import Estimate


def figure(value: float | None, digits: int = 3) -> str:
    """A number in a few significant digits; a dash for what is missing."""
    if value is None:
        return "–"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def spread(estimate: Estimate | None) -> str:
    """A value with half its 95 % interval; of two values both, since an interval of two says nothing; one is alone."""
    if estimate is None:
        return "–"
    if estimate.n == 2 and estimate.std is not None:
        half = estimate.std / math.sqrt(2)
        return f"{figure(estimate.value)} ({figure(estimate.value - half)}–{figure(estimate.value + half)})"
    if estimate.low is None or estimate.high is None:
        return figure(estimate.value)
    half = (estimate.high - estimate.low) / 2
    return f"{figure(estimate.value)} ± {figure(half, 2)}"


def change(share: float | None) -> str:
    """A signed share such as `+3.1%`; never `-0.0%`."""
    return "–" if share is None else f"{round(share, 3) + 0.0:+.1%}"


def times(ratio: float | None) -> str:
    """A speed-up such as `1.93×`."""
    return "–" if ratio is None else f"{ratio:.2f}×"
