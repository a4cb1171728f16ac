"""The fake's engine: admits requests up to the batch limit, paces tokens on absolute deadlines, counts."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fake_costs
import fake_text
from fake_knobs import Knobs


@dataclass
class Job:
    """One request on its way through the engine."""

    rid: str
    prompt: str
    max_tokens: int
    ignore_eos: bool
    received: float
    admitted: float = 0.0  # when a slot was free
    stop: tuple[str, ...] = ()
    cached_tokens: int = 0
    tokens: list[fake_text.Token] = field(default_factory=list)
    finish_reason: str = "length"
    verify_steps: int = 0
    sent: int = 0
    writes: list[tuple[float, int]] = field(default_factory=list)
    aborted: bool = False

    @property
    def prompt_tokens(self) -> int:
        return fake_text.count_tokens(self.prompt)


@dataclass
class Counters:
    """Lifetime totals; `flush` zeroes what SGLang's flush zeroes."""

    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    verify_calls: int = 0
    spec_tokens: int = 0  # output tokens since the last flush
    spec_steps: int = 0


class FakeEngine:
    """Generation under the knobs; knows no HTTP."""

    def __init__(self, knobs: Knobs, flags: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> None:
        self.knobs, self.flags = knobs, flags
        self.algorithm = flags.get("speculative-algorithm")
        self.limit = int(flags.get("max-running-requests", 48))
        self.slots = asyncio.Semaphore(self.limit)
        self.running: dict[str, Job] = {}
        self.counters = Counters()
        self.seen: set[str] = set()
        self.queued = 0
        self._timing(environ)
        self._stamps = Path(knobs.stamps).open("a", buffering=1) if knobs.stamps else None  # noqa: SIM115

    def _timing(self, environ: Mapping[str, str]) -> None:
        knobs = self.knobs
        self.step_s, self.per_stream_s = knobs.step_ms / 1e3, knobs.step_ms_per_stream / 1e3
        self.accept_length = knobs.accept_length if knobs.accept_length is not None else knobs.tokens_per_step
        if knobs.cost_model:
            costs, scale = fake_costs.costs(self.flags, environ), float(knobs.cost_model) / 1e3
            self.step_s, self.per_stream_s = costs.step_ms * scale, costs.per_stream_ms * scale
            self.accept_length = costs.accept_length or 1.0
        self._simulate(environ)
        offset = knobs.launch_offset + (random.gauss(0, knobs.launch_noise) if knobs.launch_noise else 0.0)
        self.step_s *= max(0.1, 1 + offset)
        self.tokens_per_step = self.accept_length if self.algorithm or knobs.cost_model else knobs.tokens_per_step
        self.collectives = "|".join(f"{k}={v}" for k, v in sorted(environ.items()) if k.startswith("NCCL_"))
        self.collectives += "|no-car" if "disable-custom-all-reduce" in self.flags else ""

    def _simulate(self, environ: Mapping[str, str]) -> None:
        """SGLANG_SIMULATE_ACC_LEN, as SGLang 0.5.17 and 0.5.23 take it: clamped to the draft's depth + 1."""
        asked = float(environ.get("SGLANG_SIMULATE_ACC_LEN", -1))
        self.simulated = bool(self.algorithm) and asked > 0
        if self.simulated:
            drafts = int(self.flags.get("speculative-num-draft-tokens", 4))
            deepest = int(self.flags.get("speculative-num-steps", drafts - 1)) + 1
            self.accept_length = max(1.0, min(asked, deepest))

    def admit(self, job: Job) -> None:
        """Fill in what the job will say, before it waits for a slot."""
        knobs, counters = self.knobs, self.counters
        counters.requests += 1
        counters.prompt_tokens += job.prompt_tokens
        repeated = job.prompt in self.seen
        self.seen.add(job.prompt)
        job.cached_tokens = (
            knobs.cached_tokens if knobs.cached_tokens is not None else (job.prompt_tokens - 1) * repeated
        )
        counters.cached_tokens += job.cached_tokens
        job.tokens = self._say(job)
        self._stop(job)

    def _say(self, job: Job) -> list[fake_text.Token]:
        knobs = self.knobs
        natural = fake_text.natural_length(job.prompt)
        length = job.max_tokens if job.ignore_eos else min(job.max_tokens, natural)
        job.finish_reason = "length" if length == job.max_tokens else "stop"
        broken = bool(self.algorithm) or not knobs.wrong_with_speculation
        flips = knobs.flip_near_ties
        if flips == "auto":
            flips = f"{self.collectives}|{self.algorithm}|{len(self.running) > 4}"
        tokens = fake_text.generate(
            knobs.text_salt + job.prompt,
            length,
            flip_near_ties=flips,
            wrong_from=knobs.wrong_from if broken else None,
        )
        garbage = (knobs.garbage and broken) or self.simulated
        return tokens[:1] * length if garbage else tokens

    def _stop(self, job: Job) -> None:
        text = ""
        for count, token in enumerate(job.tokens):
            text += token.text
            if any(stop in text for stop in job.stop):
                job.tokens, job.finish_reason = job.tokens[:count], "stop"
                return

    def emitted(self, job: Job, step: int) -> int:
        """Tokens out after `step` steps: the prefill's own token, then the accept length's share a step."""
        return min(len(job.tokens), 1 + int((step - 1) * self.tokens_per_step + 1e-9))

    async def run(self, job: Job, deliver: Any) -> None:
        """Pace `job`: call `deliver(job, first, last)` for each chunk of tokens, on absolute deadlines."""
        waits = self.slots.locked()
        self.queued += 1
        async with self.slots:
            self.queued -= 1
            job.admitted = time.monotonic() if waits else job.received
            self.running[job.rid] = job
            try:
                await self._pace(job, deliver)
            finally:
                del self.running[job.rid]
                self._account(job)

    async def _pace(self, job: Job, deliver: Any) -> None:
        knobs = self.knobs
        jitter = knobs.jitter_ms * (fake_text.digest(job.rid) % 1000) / 1000
        first = job.admitted + (knobs.ttft_ms + jitter) / 1e3
        step_s = self.step_s + self.per_stream_s * (len(self.running) - 1)
        step = 0
        while job.sent < len(job.tokens) or step == 0:
            await sleep_until(first + step * step_s)
            step += 1
            first_token, job.sent = job.sent, self.emitted(job, step)
            job.verify_steps = max(1, step - 1)
            if job.aborted or not deliver(job, first_token, job.sent):
                job.aborted, job.finish_reason = True, "abort"
                return

    def _account(self, job: Job) -> None:
        counters = self.counters
        counters.generation_tokens += job.sent
        if self.algorithm:
            counters.verify_calls += job.verify_steps
            counters.spec_steps += job.verify_steps
            counters.spec_tokens += job.sent
        if self._stamps:
            self._stamps.write(json.dumps(self._stamp(job)) + "\n")

    def _stamp(self, job: Job) -> dict[str, Any]:
        return {
            "rid": job.rid,
            "prompt": job.prompt[:200],
            "received": job.received,
            "admitted": job.admitted,
            "writes": job.writes,  # [monotonic time just before the write, tokens in it]
            "prompt_tokens": job.prompt_tokens,
            "output_tokens": job.sent,
            "verify_steps": job.verify_steps if self.algorithm else None,
            "aborted": job.aborted,
            "finished": time.monotonic(),
        }

    def flush(self) -> bool:
        """Empty the prefix cache and the accept counters; refused while requests run."""
        if self.running or self.queued:
            return False
        self.seen.clear()
        self.counters.spec_tokens = self.counters.spec_steps = 0
        return True

    def spec_fields(self, job: Job) -> dict[str, Any]:
        """Per-request speculation counters under SGLang's names; empty without speculation."""
        if not self.algorithm or self.knobs.omit_spec_fields or not job.verify_steps:
            return {}
        drafts = int(self.flags.get("speculative-num-draft-tokens", 4))
        proposed = job.verify_steps * (drafts - 1)
        correct = max(0, job.sent - 1 - job.verify_steps)
        return {
            "spec_accept_rate": correct / proposed if proposed else 0.0,
            "spec_accept_length": job.sent / job.verify_steps,
            "spec_num_correct_drafts": correct,
            "spec_num_proposed_drafts": proposed,
            "spec_verify_ct": job.verify_steps,
            "spec_correct_drafts_histogram": [],
        }


async def sleep_until(deadline: float) -> None:
    """Sleep to an absolute monotonic time: late steps do not push the later ones."""
    delay = deadline - time.monotonic()
    await asyncio.sleep(max(0.0, delay))
