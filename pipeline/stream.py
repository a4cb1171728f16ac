"""The bytes of a streamed answer: stamped while they come, read when the window is over. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.records import RequestTrace, SpecCounters
from pipeline.workload import PlannedRequest

CountTokens = Callable[[str], int]

# A content chunk holds `"content":"x…`; the value is captured still escaped. Quotes inside a JSON
# string are escaped, so the pattern cannot match inside a text; logprobs' `"content":[` does not match.
_CONTENT = re.compile(rb'"(?:reasoning_)?content"\s*:\s*"((?:[^"\\]++|\\.)++)"')
_SAYS_MORE = re.compile(rb'"(?:usage|finish_reason)"\s*:\s*[{"]')


@dataclass(slots=True)
class Stream:
    """One request while it runs: raw stamps and bytes only."""

    planned: PlannedRequest
    started: float
    scheduled: float | None = None
    stamps: list[float] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)  # escaped JSON strings without their quotes
    others: list[bytes] = field(default_factory=list)  # lines that say something besides content
    finished: float | None = None
    status: Literal["ok", "failed", "cut_off"] = "ok"
    error: str | None = None
    rest: bytes = b""  # the beginning of a line whose end has not come

    def take(self, data: bytes, now: float) -> None:
        """Stamp the content in whole lines, keep the lines that may say something else."""
        if self.rest or data[-1:] != b"\n":
            lines, newline, self.rest = (self.rest + data).rpartition(b"\n")
            data = lines + newline
        found = _CONTENT.findall(data)
        if found:
            self.texts += found
            self.stamps += [now] * len(found)
        if data.count(b"data:") > len(found) or _SAYS_MORE.search(data):
            self.others.append(data)


def trace_of(stream: Stream, count_tokens: CountTokens | None = None) -> RequestTrace:
    """Read the kept bytes once the window is over; `count_tokens` retokenises the text as a check."""
    said = _Said()
    for line in b"".join([*stream.others, stream.rest]).splitlines():
        said.read(line)
    text = json.loads(b'"' + b"".join(stream.texts) + b'"')
    status, error = stream.status, stream.error
    if status == "ok" and (said.error or not stream.stamps):
        status, error = "failed", said.error or "the stream ended without content"
    return RequestTrace(
        index=stream.planned.index,
        prompt_id=stream.planned.prompt_id,
        workload=stream.planned.workload,
        started=stream.started,
        chunk_times=tuple(stream.stamps),
        finished=stream.finished,
        scheduled=stream.scheduled,
        status=status,
        prompt_tokens=said.usage.get("prompt_tokens"),
        cached_tokens=said.cached_tokens,
        output_tokens=said.usage.get("completion_tokens"),
        retokenized_tokens=count_tokens(text) if count_tokens and status == "ok" else None,
        finish_reason=said.finish_reason,
        text=text,
        error=error,
        spec=said.spec,
    )


@dataclass
class _Said:
    """What the lines besides the content say."""

    usage: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)  # every object below `sglext`, merged
    finish_reason: str | None = None
    error: str | None = None

    def read(self, line: bytes) -> None:
        """Read one line of the stream; anything that is no JSON event is left alone."""
        if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
            return
        try:
            event = json.loads(line[5:])
        except ValueError:
            return
        if error := event.get("error"):
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)[:200]
        self.usage = event.get("usage") or self.usage
        for part in (event.get("sglext") or {}).values():
            self.details |= part if isinstance(part, dict) else {}
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.details |= choice.get("meta_info") or {}

    @property
    def spec(self) -> SpecCounters | None:
        """The request's counters, None where the server gave none or does not speculate."""
        details = self.usage | self.details
        tokens = self.usage.get("completion_tokens")
        if not details.get("spec_verify_ct") or tokens is None:
            return None
        return SpecCounters(
            output_tokens=tokens,
            verify_steps=details["spec_verify_ct"],
            accepted_drafts=details.get("spec_num_correct_drafts"),
            proposed_drafts=details.get("spec_num_proposed_drafts"),
        )

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens from the prefix cache: by usage, else by source in `sglext`."""
        usage = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if usage is not None:
            return int(usage)
        sources = [self.details[s] for s in ("device", "host", "storage") if self.details.get(s) is not None]
        return sum(sources) if sources else None


def scrape_metrics(text: str) -> dict[str, float]:
    """Sum every sample of a Prometheus text over its labels (ranks, sources, streaming or not).

    Sums mean something for counters only. NaN samples are left out.
    """
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        head, brace, rest = line.partition("{")
        name, value = (head, rest.rpartition("}")[2]) if brace else (line.split()[0], line.partition(" ")[2])
        with suppress(ValueError, IndexError):
            number = float(value.split()[0])
            if math.isfinite(number):
                sums[name] = sums.get(name, 0.0) + number
    return sums
