"""Prompt sets -> planned requests with arrival times, from a seed. Pure: reads files, sends nothing.

Fresh and fair: each planned request carries a short tag made from (salt, level, repeat, index) at the
start of its user message. No two requests of a study share a prefix worth caching, and every trial
of the study gets exactly the same texts, because nothing of the trial goes into the tag.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoints import expanded
from pipeline.errors import InputError, nearest
from pipeline.records import LoadLevel
from pipeline.spec import WorkloadSpec

SHIPPED = Path(__file__).parent / "prompts"
SHIPPED_SETS = ("extract", "open")
HELD_OUT_EVERY = 4  # of a user's own file, every fourth prompt is kept for confirmation
CHARACTERS_PER_TOKEN = 4  # to cut prompts to a trace's lengths; `usage` says what it came to

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation up to the answer that is asked for."""

    prompt_id: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send. `at_s` counts from the window's start; None: as soon as a stream is free."""

    index: int
    prompt_id: str
    workload: str
    messages: tuple[Message, ...]
    output_tokens: int
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    at_s: float | None = None


def located(source: str) -> str:
    """A file's absolute path, since trials run in other places; a shipped set, or what is missing, as it is."""
    path = expanded(source)
    return str(path.absolute()) if source not in SHIPPED_SETS and path.is_file() else source


def load_prompts(source: str, *, held_out: bool = False) -> tuple[Prompt, ...]:
    """Read a shipped set (`extract`, `open`) or a JSONL file of prompts, OpenAI chats or ShareGPT rows.

    `held_out` gives prompts that the plain call never returns: the shipped sets have a second file, of
    a user's file every fourth row is kept apart.

    Raises:
        InputError: no such set or file, or a bad row, with file and line.
    """
    if source in SHIPPED_SETS:
        return _read_prompts(SHIPPED / f"{source}{'_held_out' if held_out else ''}.jsonl")
    path = Path(source)
    if not path.is_file():
        raise InputError(
            f"no prompt set or file named {source!r}",
            source="prompts",
            expected=f"one of {', '.join(SHIPPED_SETS)}, or a JSONL file",
            nearest=nearest(source, SHIPPED_SETS),
        )
    prompts = _read_prompts(path)
    chosen = tuple(p for i, p in enumerate(prompts) if (i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out)
    if not chosen:
        raise InputError(f"too few prompts to hold some out: {len(prompts)}", source=source, expected="4 or more")
    return chosen


def plan(
    level: LoadLevel,
    workload: WorkloadSpec,
    prompts: Sequence[Prompt],
    repeat: int,
    salt: str,
    *,
    count: int,
) -> tuple[PlannedRequest, ...]:
    """Plan one window of one load level.

    Args:
        level: closed loop, open loop (Poisson, seeded) or the replay of a trace file.
        workload: output length, temperature, seed.
        prompts: the level's prompt set; walked in a shuffled order that later repeats continue.
        repeat: 0, 1, … ; each has its own requests.
        salt: one per study, the same in all its trials.
        count: requests in the window; a trace has its own count.
    """
    key = f"{salt}|{workload.seed}|{level.key}"
    rows = read_trace(level.trace) if level.trace is not None else (None,) * count
    arrivals = _poisson(level.request_rate, f"{key}|{repeat}") if level.request_rate else itertools.repeat(None)
    order = list(prompts)
    random.Random(key).shuffle(order)  # noqa: S311 - reproducible, not secret
    first = repeat * len(rows)
    return tuple(
        PlannedRequest(
            index=i,
            prompt_id=(prompt := order[(first + i) % len(order)]).prompt_id,
            workload=level.workload,
            messages=_tagged(
                prompt.messages if row is None else _of_length(order, first + i, row), f"{key}|{repeat}|{i}"
            ),
            output_tokens=workload.output_tokens if row is None else row.output_tokens,
            ignore_eos=workload.ignore_eos,
            temperature=workload.temperature,
            seed=workload.seed,
            at_s=at_s if row is None else row.at_s,
        )
        for i, (row, at_s) in enumerate(zip(rows, arrivals, strict=False))
    )


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a recorded trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def read_trace(path: str) -> tuple[TraceRow, ...]:
    """Read a JSONL trace; arrival times count from its first row.

    Two shapes: `{"timestamp_s", "prompt_tokens", "output_tokens"}`, and Mooncake's
    `{"timestamp" (ms), "input_length", "output_length"}`.
    """
    rows = [_trace_row(path, line, row) for line, row in _rows(Path(path))]
    if not rows:
        raise InputError("the trace is empty", source=path)
    start = min(row.at_s for row in rows)
    return tuple(
        TraceRow(row.at_s - start, row.prompt_tokens, row.output_tokens) for row in sorted(rows, key=lambda r: r.at_s)
    )


def _trace_row(path: str, line: int, row: Any) -> TraceRow:
    try:
        if "timestamp_s" in row:
            parsed = TraceRow(float(row["timestamp_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]))
        else:
            parsed = TraceRow(row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"not a trace row ({error})", source=path, line=line, expected="timestamp_s, prompt_tokens, output_tokens"
        ) from error
    if parsed.prompt_tokens < 1 or parsed.output_tokens < 1 or not math.isfinite(parsed.at_s):
        raise InputError("a length below 1, or a time that is none", source=path, line=line)
    return parsed


def _poisson(rate: float, key: str) -> Iterator[float]:
    rng, at = random.Random(key), 0.0  # noqa: S311 - reproducible, not secret
    while True:
        yield at
        at += rng.expovariate(rate)


def _tagged(messages: tuple[Message, ...], key: str) -> tuple[Message, ...]:
    """Put the tag at the start of the last user message."""
    tag = hashlib.sha256(key.encode()).hexdigest()[:8]
    at = max(i for i, message in enumerate(messages) if message["role"] == "user")
    tagged = {"role": "user", "content": f"[{tag}] {messages[at]['content']}"}
    return (*messages[:at], tagged, *messages[at + 1 :])


def _of_length(order: Sequence[Prompt], first: int, row: TraceRow) -> tuple[Message, ...]:
    """Fill a user message with prompt texts up to the traced length."""
    want, text = row.prompt_tokens * CHARACTERS_PER_TOKEN, ""
    for i in itertools.count(first):
        if len(text) >= want:
            break
        text += order[i % len(order)].messages[-1]["content"] + "\n"
    return ({"role": "user", "content": text[:want]},)


def _read_prompts(path: Path) -> tuple[Prompt, ...]:
    prompts = tuple(_prompt(path, line, row) for line, row in _rows(path))
    if not prompts:
        raise InputError("the file holds no prompts", source=str(path))
    return prompts


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line, parsed row) of a JSONL file, empty lines left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", source=str(path)) from error
    for line, row in enumerate(text.splitlines(), start=1):
        if not row.strip():
            continue
        try:
            yield line, json.loads(row)
        except ValueError as error:
            raise InputError(f"not JSON ({error})", source=str(path), line=line) from error


_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def _prompt(path: Path, line: int, row: Any) -> Prompt:
    messages = _messages(row)
    if messages is None:
        raise InputError(
            "not a prompt",
            source=str(path),
            line=line,
            expected='a string, {"prompt"}, {"messages": [{"role", "content"}]} or {"conversations": [{"from", …}]}',
        )
    return Prompt(str(row.get("id", line) if isinstance(row, Mapping) else line), messages)


def _messages(row: Any) -> tuple[Message, ...] | None:
    """The conversation up to and with its first user turn, None where the row has none."""
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, Mapping):
        return None
    if isinstance(row.get("prompt"), str):
        return ({"role": "user", "content": row["prompt"]},) if row["prompt"].strip() else None
    if isinstance(row.get("messages"), list):
        return _turns(row["messages"], "role", "content")
    if isinstance(row.get("conversations"), list):
        return _turns(row["conversations"], "from", "value")
    return None


def _turns(turns: list[Any], role_key: str, text_key: str) -> tuple[Message, ...] | None:
    messages: list[Message] = []
    for turn in turns:
        role = _ROLES.get(str(turn.get(role_key))) if isinstance(turn, Mapping) else None
        text = turn.get(text_key) if role else None
        if role is None or not isinstance(text, str) or not text.strip():
            return None
        messages.append({"role": role, "content": text})
        if role == "user":
            return tuple(messages)
    return None
