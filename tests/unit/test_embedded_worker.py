"""The queue: one at a time, bounded, and no request can end another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from serve.embedded.records import Ask, Outcome, Step, Tally
from serve.embedded.telemetry import Telemetry
from serve.embedded.worker import Job, QueueFullError, Worker

WAIT_S = 5.0


class FakeEngine:
    """Emits one token, then waits for `gate`; a request of one prompt token fails."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.at_once = self.most_at_once = 0

    def generate(self, ask: Ask, emit: Callable[[Step], None], cancelled: Callable[[], bool]) -> Outcome:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if len(ask.prompt_ids) == 1:
                raise RuntimeError("no room")
            tally = Tally(len(ask.prompt_ids), 1)
            emit(Step("x", (), tally))
            assert self.gate.wait(WAIT_S)
            return Outcome("abort" if cancelled() else "length", None, "", tally)
        finally:
            self.at_once -= 1


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry(model_name="m", speculative=False, context_length=100, log_interval=40)


@pytest.fixture
def worker(engine: FakeEngine, telemetry: Telemetry) -> Iterator[Worker]:
    worker = Worker(engine, telemetry, max_queued=2)
    yield worker
    engine.gate.set()
    assert worker.drain(WAIT_S)


def submit(worker: Worker, prompt: int = 2) -> tuple[Job, queue.Queue[Any]]:
    events: queue.Queue[Any] = queue.Queue()
    job = Job(Ask(prompt_ids=(1,) * prompt, max_tokens=1), events.put)
    worker.submit(job)
    return job, events


def test_requests_run_one_at_a_time_and_each_gets_its_own_answer(worker: Worker, engine: FakeEngine) -> None:
    jobs = [submit(worker)[1] for _ in range(3)]
    assert isinstance(jobs[0].get(timeout=WAIT_S), Step)
    assert (worker.running, worker.queued) == (1, 2)
    engine.gate.set()
    assert all(isinstance(events.get(timeout=WAIT_S), (Step, Outcome)) for events in jobs)
    assert worker.drain(WAIT_S)
    assert engine.most_at_once == 1
    assert (worker.running, worker.queued) == (0, 0)


def test_one_request_too_many_is_refused_and_leaves_no_trace(worker: Worker) -> None:
    for _ in range(3):
        submit(worker)
    with pytest.raises(QueueFullError, match="2 requests"):
        submit(worker)
    assert worker.queued == 2


def test_a_failing_request_gets_its_error_and_the_next_one_its_answer(
    worker: Worker, engine: FakeEngine, telemetry: Telemetry
) -> None:
    _, failing = submit(worker, prompt=1)
    error = failing.get(timeout=WAIT_S)
    assert isinstance(error, RuntimeError) and str(error) == "no room"
    engine.gate.set()
    _, fine = submit(worker)
    assert isinstance(fine.get(timeout=WAIT_S), Step)
    assert isinstance(fine.get(timeout=WAIT_S), Outcome)
    assert (telemetry.requests, telemetry.aborted) == (2, 1)


def test_a_request_cancelled_in_the_queue_never_runs(worker: Worker, engine: FakeEngine, telemetry: Telemetry) -> None:
    _, first = submit(worker)
    waiting, events = submit(worker)
    waiting.cancelled.set()
    engine.gate.set()
    assert worker.drain(WAIT_S)
    assert events.empty() and first.qsize() == 2
    assert telemetry.requests == 1


def test_draining_has_a_limit(worker: Worker) -> None:
    submit(worker)
    assert not worker.drain(0.05)
