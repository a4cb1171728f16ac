"""What the server counts, and how it says it: SGLang's log lines and Prometheus names.

The worker thread writes, the event loop reads; each field is replaced whole, so no lock is needed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from serve.embedded.records import Tally


@dataclass(slots=True)
class _Window:
    """Decode steps since the last log line; `seconds` leaves out prefills and idle time."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    correct: int = 0
    proposed: int = 0


class Telemetry:
    """Counters of the server's life, and the window of the decode log."""

    def __init__(self, *, model_name: str, speculative: bool, context_length: int, log_interval: int) -> None:
        self._model_name, self._speculative = model_name, speculative
        self._context_length, self._log_interval = context_length, log_interval
        self.prompt_tokens = self.generation_tokens = self.requests = self.aborted = 0
        self.verify_steps = 0
        self.gen_throughput: float | None = None
        self._accept_length: float | None = None
        self._accept_rate: float | None = None
        self._flushed_verify = self._flushed_tokens = 0
        self._window = _Window()
        self._last_step = time.monotonic()

    def prefilled(self, prompt_tokens: int, seconds: float, queued: int) -> str:
        """The log line of a prefill."""
        self._last_step = time.monotonic()
        return (
            f"Prefill batch, #new-seq: 1, #new-token: {prompt_tokens}, #cached-token: 0, token usage: 0.00, "
            f"#running-req: 0, #queue-req: {queued}, #pending-token: 0, cuda graph: False, "
            f"input throughput (token/s): {prompt_tokens / seconds:.2f}"
        )

    def decoded(self, before: Tally, after: Tally, queued: int) -> str | None:
        """Count one decode step; every so many steps, return a log line."""
        window, now = self._window, time.monotonic()
        window.seconds += now - self._last_step
        self._last_step = now
        window.steps += 1
        window.tokens += after.completion_tokens - before.completion_tokens
        window.correct += (after.correct_drafts or 0) - (before.correct_drafts or 0)
        window.proposed += (after.proposed_drafts or 0) - (before.proposed_drafts or 0)
        return self._line(window, after, queued) if window.steps == self._log_interval else None

    def _line(self, window: _Window, tally: Tally, queued: int) -> str:
        self.gen_throughput = window.tokens / max(window.seconds, 1e-9)
        spec = ""
        if self._speculative:
            self._accept_length = window.tokens / window.steps
            self._accept_rate = window.correct / window.proposed if window.proposed else 0.0
            spec = f"accept len: {self._accept_length:.2f}, accept rate: {self._accept_rate:.2f}, "
        self._window = _Window()
        held = tally.prompt_tokens + tally.completion_tokens
        return (
            f"Decode batch, #running-req: 1, #token: {held}, token usage: {held / self._context_length:.2f}, {spec}"
            f"cuda graph: False, gen throughput (token/s): {self.gen_throughput:.2f}, #queue-req: {queued}"
        )

    def finished(self, tally: Tally, *, aborted: bool) -> None:
        """Add a request that has ended, whole or not."""
        self.requests += 1
        self.aborted += aborted
        self.prompt_tokens += tally.prompt_tokens
        self.generation_tokens += tally.completion_tokens
        self.verify_steps += tally.verify_steps or 0

    def flush(self) -> None:
        """Start the mean accept length anew, as SGLang's `/flush_cache` does."""
        self._flushed_verify, self._flushed_tokens = self.verify_steps, self.generation_tokens

    def internal_state(self) -> dict[str, Any]:
        """The element of `/server_info`'s `internal_states`; what is not known yet is left out."""
        state: dict[str, Any] = {"effective_max_running_requests_per_dp": 1}
        if self.gen_throughput is not None:
            state["last_gen_throughput"] = self.gen_throughput
        if steps := self.verify_steps - self._flushed_verify:
            state["avg_spec_accept_length"] = (self.generation_tokens - self._flushed_tokens) / steps
        return state

    def prometheus(self, *, running: int, queued: int) -> str:
        """The metrics page: SGLang's names, text exposition format 0.0.4."""
        gauges: dict[str, float | None] = {
            "num_running_reqs": running,
            "num_queue_reqs": queued,
            "gen_throughput": self.gen_throughput,
            "context_len": self._context_length,
        }
        counters = {
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generation_tokens,
            "cached_tokens_total": 0,
            "num_requests_total": self.requests,
            "num_aborted_requests_total": self.aborted,
        }
        if self._speculative:
            gauges |= {"spec_accept_length": self._accept_length, "spec_accept_rate": self._accept_rate}
            counters["spec_verify_calls_total"] = self.verify_steps
        lines = [self._sample(name, "gauge", value) for name, value in gauges.items() if value is not None]
        lines += [self._sample(name, "counter", value) for name, value in counters.items()]
        return "".join(lines)

    def _sample(self, name: str, kind: str, value: float) -> str:
        label = self._model_name.replace("\\", r"\\").replace('"', r"\"")
        return f'# TYPE sglang:{name} {kind}\nsglang:{name}{{model_name="{label}"}} {float(value)}\n'
