"""The one thread that runs the model, and the bounded queue before it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from serve.embedded.records import Ask, Outcome, Step, Tally
from serve.embedded.telemetry import Telemetry

log = logging.getLogger(__name__)

Event = Step | Outcome | Exception


class Generator(Protocol):
    """What the worker asks of an engine."""

    def generate(self, ask: Ask, emit: Callable[[Step], None], cancelled: Callable[[], bool]) -> Outcome:
        """Answer one request."""
        ...


class QueueFullError(Exception):
    """No more requests may wait."""


@dataclass(eq=False)
class Job:
    """One request on its way. `send` gets its steps, then its outcome or the error that ended it."""

    ask: Ask
    send: Callable[[Event], None]
    cancelled: threading.Event = field(default_factory=threading.Event)


class Worker:
    """Runs one job at a time. `idle` is set while nothing runs or waits."""

    def __init__(self, engine: Generator, telemetry: Telemetry, *, max_queued: int) -> None:
        self._engine, self._telemetry = engine, telemetry
        self._waiting: queue.Queue[Job | None] = queue.Queue()
        self._max_queued = max_queued
        self._pending = 0  # running and waiting
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """1 while a request runs, else 0."""
        return min(self._pending, 1)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return max(self._pending - 1, 0)

    def submit(self, job: Job) -> None:
        """Put a job in the queue.

        Raises:
            QueueFullError: as many requests wait as may.
        """
        with self._changed:
            if self.queued >= self._max_queued:
                raise QueueFullError(f"{self._max_queued} requests are waiting already")
            self._pending += 1
        self._waiting.put(job)

    def drain(self, limit_s: float) -> bool:
        """Wait until nothing is left, then end the thread; False when the limit came first."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._pending == 0, timeout=limit_s)
        self._waiting.put(None)
        if done:
            self._thread.join(timeout=limit_s)
        return done

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            try:
                if not job.cancelled.is_set():
                    job.send(self._answer(job))
            finally:
                with self._changed:
                    self._pending -= 1
                    self._changed.notify_all()

    def _answer(self, job: Job) -> Event:
        """The outcome, or whatever went wrong: a request's error must not end the server."""
        progress = _Progress(job, self._telemetry, lambda: self.queued)
        try:
            outcome = self._engine.generate(job.ask, progress.step, job.cancelled.is_set)
        except Exception as error:
            log.exception("A request failed")
            self._telemetry.finished(progress.tally, aborted=True)
            return error
        self._telemetry.finished(outcome.tally, aborted=outcome.finish_reason == "abort")
        return outcome


class _Progress:
    """Counts and logs the steps of one job on their way to its sender."""

    def __init__(self, job: Job, telemetry: Telemetry, queued: Callable[[], int]) -> None:
        self._job, self._telemetry, self._queued = job, telemetry, queued
        self._began = time.monotonic()
        self.tally = Tally(len(job.ask.prompt_ids))

    def step(self, step: Step) -> None:
        """Take one step from the engine."""
        if self.tally.completion_tokens == 0:
            log.info(self._telemetry.prefilled(len(self._job.ask.prompt_ids), self._seconds(), self._queued()))
        if line := self._telemetry.decoded(self.tally, step.tally, self._queued()):
            log.info(line)
        self.tally = step.tally
        self._job.send(step)

    def _seconds(self) -> float:
        return max(time.monotonic() - self._began, 1e-9)
