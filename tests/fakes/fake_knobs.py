"""Knobs of the fake SGLang server: one JSON object in FAKE_SGLANG_KNOBS (inline or a file), and
FAKE_SGLANG_<NAME> for a single one (JSON, or plain text). The single ones win.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

PREFIX = "FAKE_SGLANG_"


@dataclass
class Knobs:
    """Everything a test can turn. Times in ms unless the name says seconds."""

    # timing
    ttft_ms: float = 20.0  # request received -> first chunk
    step_ms: float = 5.0  # between chunks of a stream
    step_ms_per_stream: float = 0.0  # added per other running stream, read at the request's start
    tokens_per_step: float = 1.0  # tokens a chunk, also without speculation; fractions alternate
    accept_length: float | None = None  # tokens a verify step under speculation; None: tokens_per_step or costs
    jitter_ms: float = 0.0  # fixed per request, uniform in [0, jitter_ms], added to TTFT
    launch_offset: float = 0.0  # relative, the same for every step of this launch
    launch_noise: float = 0.0  # relative standard deviation of a random launch_offset
    cost_model: bool | float = False  # timing from flags and NCCL variables; a number scales it
    # what it says
    text_salt: str = ""  # another text for the same prompt: breaks the lossless check
    wrong_from: int | None = None  # tokens after this position are wrong
    wrong_with_speculation: bool = False  # wrong_from and garbage only when speculation is on
    flip_near_ties: str = ""  # "auto": by collectives and batch shape, as bf16 does
    garbage: bool = False  # one word for ever
    cached_tokens: int | None = None  # None: counts repeated prompts since the last flush
    usage_tokens_factor: float = 1.0  # a lying usage
    omit_spec_fields: bool = False
    resolved: dict[str, Any] = field(default_factory=dict)  # overrides of /server_info
    warnings: list[str] = field(default_factory=list)  # extra log lines at start
    # phases and failures
    start_ms: float = 100.0  # launch to ready, spread over the phases
    fail: str = ""  # a name of fake_failures.FAILURES, raised in its own phase (or "phase:name")
    exit_code: int | None = None  # overrides the failure's; negative: killed by that signal
    log_fixture: str = ""  # replay this log before going on (or before failing, with `fail`)
    time_compression: float = 1000.0  # a log fixture's silences are divided by this
    hang_at: str = ""  # start | load | capture | ready (no ready line) | measure
    busy_at: str = ""  # load | capture: burn CPU in a child named like a compiler, for busy_s, silently
    busy_s: float = 2.0
    die_after_requests: int | None = None  # then `fail` (default: scheduler_killed) while running
    die_after_s: float | None = None
    mute_after_requests: int | None = None  # healthy, but no generate ever gets a token
    error_rate: float = 0.0  # share of requests answered with 500
    flush_fails: int = 0  # so many refusals of /flush_cache
    silent: bool = False  # no log after ready
    # processes
    children: bool = True  # fork sglang::scheduler and detokenizer processes
    stubborn_children: bool = False  # they ignore TERM
    escaped_children: bool = False  # they leave the session
    stubborn: bool = False  # the server ignores TERM
    shm_segments: int = 0  # left in /dev/shm, named like SGLang's
    # ground truth
    stamps: str = ""  # JSONL file: one line a request, with the monotonic time of every write


def read(environ: Mapping[str, str] = os.environ) -> Knobs:
    """Read the knobs; an unknown one is an error, since a test that sets it tests nothing."""
    source = environ.get(f"{PREFIX}KNOBS", "{}")
    values = json.loads(source if source.lstrip().startswith("{") else Path(source).read_text())
    names = {f.name for f in fields(Knobs)}
    for key, text in environ.items():
        if key.startswith(PREFIX) and key != f"{PREFIX}KNOBS":
            values[key.removeprefix(PREFIX).lower()] = _value(text)
    if unknown := set(values) - names:
        raise SystemExit(f"fake sglang: unknown knobs {sorted(unknown)}")
    return Knobs(**values)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
