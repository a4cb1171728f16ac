"""One launch -> figures: warm-up, flush, load levels with repeats, greedy outputs. The same for every server.

Order of a measurement: warm up at the busiest level, then per load (busiest first) repeats in turns
over the workloads, so that drift hits them alike, each window after a confirmed flush. A load is done
when the objective's metric is known well enough, or its budget is out.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from pipeline.config import Frozen
from pipeline.errors import MeasurementError
from pipeline.greedy import greedy_outputs
from pipeline.load import Sending, flush, run_level, served_model, server_info
from pipeline.lossless import GreedyOutput
from pipeline.metrics import FEWEST, Window, chunk_gaps_ms, close_enough, distribution, level_result, spread
from pipeline.records import LevelResult, LoadLevel
from pipeline.sanity import CLIENT_CPU
from pipeline.spec import Limits, LoadSpec, MetricName, ObjectiveSpec, WorkloadSpec
from pipeline.stream import CountTokens
from pipeline.workload import Prompt, load_prompts, plan

Watch = Callable[[], None]
OnPhase = Callable[[str], None]
StopEarly = Callable[[tuple[LevelResult, ...]], str | None]
T = TypeVar("T")

# A client whose own timer is this late, and by so much of the time between chunks, stamps them late too.
LOOP_LAG_MS, LOOP_LAG_SHARE = 10.0, 0.5
DYING_S = 5.0  # from a closed socket to a known end
BUSY_CPU = 0.5  # late and this busy is saturated; late and idle is starved by others, which is noted


class SpaceLike(Protocol):
    """What a plan takes from an engine's space."""

    @property
    def workload(self) -> WorkloadSpec: ...
    @property
    def load(self) -> LoadSpec: ...
    @property
    def objective(self) -> ObjectiveSpec: ...
    @property
    def limits(self) -> Limits: ...


class MeasurePlan(Frozen):
    """What is measured, the same for all trials of a study.

    `salt` makes the study's prompts its own: equal salts give equal requests.
    """

    workload: WorkloadSpec = WorkloadSpec()
    load: LoadSpec
    objective: ObjectiveSpec = ObjectiveSpec()
    limits: Limits = Limits()
    salt: str = ""

    @classmethod
    def from_space(cls, space: SpaceLike, *, salt: str = "") -> MeasurePlan:
        """Take a study's plan from one engine's space; `salt` is the study's name."""
        return cls(workload=space.workload, load=space.load, objective=space.objective, limits=space.limits, salt=salt)

    @property
    def levels(self) -> tuple[LoadLevel, ...]:
        """Every level, busiest first, the workloads of one load side by side."""
        return self.load.levels(tuple(self.workload.prompts))

    def requests(self, level: LoadLevel) -> int:
        """Requests in one window: four waves, and enough over the repeats for the percentiles in demand."""
        count = self.load.requests_per_level or max(8, 4 * (level.concurrency or 0))
        wanted: list[str] = [goal.metric for goal in self.objective.goals]
        wanted += [name for name, limit in self.objective.constraints if limit is not None]
        if any(name.startswith("p95") for name in wanted):
            count = max(count, math.ceil(FEWEST[95] / self.load.min_repeats))
        return count

    def metric(self, level: LoadLevel) -> MetricName:
        """The metric whose interval decides how often a level is repeated."""
        goals = [goal for goal in self.objective.goals if goal.concurrency in (None, level.concurrency)]
        return (goals or self.objective.goals)[0].metric


@dataclass(frozen=True)
class Measured:
    """One launch, measured. `windows` holds the raw traces per level key, in order of the repeats."""

    levels: tuple[LevelResult, ...]
    windows: dict[str, tuple[Window, ...]]
    greedy: tuple[GreedyOutput, ...] = ()
    notes: tuple[str, ...] = ()
    server: dict[str, Any] | None = None


def _unwatched() -> None:
    """The watch of a server that somebody else runs."""


@dataclass(frozen=True)
class Ruler:
    """Measures launches by one plan.

    Args:
        plan: what to measure.
        count_tokens: retokenises answers as a check on `usage`, None to leave it out.
        api_key: for servers that want one.
    """

    plan: MeasurePlan
    count_tokens: CountTokens | None = None
    api_key: str | None = None

    def measure(
        self,
        base_url: str,
        *,
        model: str | None = None,
        watch: Watch = _unwatched,
        on_phase: OnPhase = lambda _: None,
        stop_early: StopEarly | None = None,
        held_out: bool = False,
        baseline: bool = False,
        greedy: bool = True,
    ) -> Measured:
        """Measure the server at `base_url`.

        Args:
            model: the served name; None asks the server.
            watch: raises EngineError when the engine is dead, silent or mute; called every second.
            on_phase: told what is going on, for the live table.
            stop_early: given the levels so far, a reason to stop or None.
            held_out: use the prompts kept apart for confirmation and promotion.
            baseline: collect the lossless reference too: greedy answers alone, with margins.
            greedy: collect greedy answers for the lossless check.

        Raises:
            EngineError: from `watch`, or streams that all went silent.
            MeasurementError: no figures, or figures that must not be trusted (a saturated client).
        """
        run = _Run(self, base_url.rstrip("/"), watch, on_phase, held_out)
        try:
            return asyncio.run(run.all(model, stop_early, greedy=greedy, baseline=baseline))
        except MeasurementError:
            if watch is not _unwatched:
                _dead_engine_first(run.base_url, watch)
            raise


class _Run:
    """One measurement under way."""

    def __init__(self, ruler: Ruler, base_url: str, watch: Watch, on_phase: OnPhase, held_out: bool) -> None:
        self.ruler, self.plan = ruler, ruler.plan
        self.base_url, self.watch, self.on_phase = base_url, watch, on_phase
        self.prompts = {w: load_prompts(s, held_out=held_out) for w, s in self.plan.workload.prompts.items()}
        self.salt = f"{self.plan.salt}|held out" if held_out else self.plan.salt
        self.windows: dict[str, list[Window]] = {}
        self.notes: list[str] = []

    async def all(self, model: str | None, stop_early: StopEarly | None, *, greedy: bool, baseline: bool) -> Measured:
        server = await server_info(self.base_url, api_key=self.ruler.api_key)
        name = model or await served_model(self.base_url, api_key=self.ruler.api_key)
        if name is None:
            raise MeasurementError(f"{self.base_url} lists no model; name one")
        self.sending = Sending(
            base_url=self.base_url,
            model=name,
            extras=server is not None,
            request_s=self.plan.limits.request_s,
            silence_s=self.plan.limits.silence_s,
            api_key=self.ruler.api_key,
            count_tokens=self.ruler.count_tokens,
        )
        await self._warm_up()
        levels = await self._levels(stop_early)
        answers = await self._greedy(baseline) if greedy and len(levels) == len(self.plan.levels) else ()
        windows = {key: tuple(found) for key, found in self.windows.items()}
        return Measured(levels, windows, answers, tuple(self.notes), server)

    async def _warm_up(self) -> None:
        busiest = self.plan.levels[0]
        self.on_phase("warm up")
        count = self.plan.load.warmup_requests or busiest.concurrency or 4
        level = LoadLevel(workload=busiest.workload, concurrency=busiest.concurrency or count)
        window = await self._window(level, 0, count, f"{self.salt}|warm up")
        if not window.ok:
            raise MeasurementError(f"no warm-up request succeeded: {next((t.error for t in window.traces), None)}")

    async def _levels(self, stop_early: StopEarly | None) -> tuple[LevelResult, ...]:
        results: list[LevelResult] = []
        for _, group in groupby(self.plan.levels, key=lambda level: level.model_copy(update={"workload": ""})):
            results += await self._repeat(list(group))
            unfinished = len(results) < len(self.plan.levels)
            if unfinished and stop_early is not None and (reason := stop_early(tuple(results))):
                self.notes.append(f"stopped early: {reason}")
                break
        return tuple(results)

    async def _repeat(self, levels: Sequence[LoadLevel]) -> list[LevelResult]:
        """Repeat the workloads of one load in turns until all are known well enough or the budget is out."""
        load, began = self.plan.load, time.monotonic()
        budget = load.level_budget_s * len(levels)
        for repeat in range(load.max_repeats):
            for level in levels:
                self.on_phase(f"{level.key} {repeat + 1}/{load.max_repeats}")
                left = budget - (time.monotonic() - began)
                window = await self._window(level, repeat, self.plan.requests(level), self.salt, left)
                self.windows.setdefault(level.key, []).append(window)
            known = self._known(levels)
            if known and repeat + 1 >= load.min_repeats:
                break
            if (time.monotonic() - began) * (repeat + 2) / (repeat + 1) > budget:  # one more would not fit
                self.notes += [] if known else [f"{levels[0].key}: the budget ended the repeats at {repeat + 1}"]
                break
        return [level_result(level, self.windows[level.key]) for level in levels]

    def _known(self, levels: Sequence[LoadLevel]) -> bool:
        found = [spread(self.windows[level.key], self.plan.metric(level)) for level in levels]
        return close_enough(found, self.plan.load.ci_width)

    async def _window(self, level: LoadLevel, repeat: int, count: int, salt: str, left_s: float = math.inf) -> Window:
        """Flush, then send one window under watch, and refuse it when the client was saturated."""
        flushed = await flush(self.base_url, api_key=self.ruler.api_key)
        self._note(None if flushed else "the server has no cache flush")
        prompts: Sequence[Prompt] = self.prompts[level.workload]
        planned = plan(level, self.plan.workload, prompts, repeat, salt, count=count)
        sending = replace(self.sending, budget_s=max(left_s, 1.0))
        window = await watched(run_level(sending, planned, concurrency=level.concurrency), self.watch)
        if window.ok:  # where every request failed, that is what there is to say
            self._note(refuse_saturated(level.key, window))
        return window

    def _note(self, note: str | None) -> None:
        self.notes += [note] if note and note not in self.notes else []

    async def _greedy(self, baseline: bool) -> tuple[GreedyOutput, ...]:
        self.on_phase("greedy")
        spec = self.plan.workload
        return await watched(greedy_outputs(self.sending, self.prompts, spec, margins=baseline), self.watch)


def refuse_saturated(key: str, window: Window) -> str | None:
    """Raise MeasurementError when the client could not keep up: its stamps are its own delays.

    Returns:
        A note when its timers were late though it had little to do: the machine is busy with other work.
    """
    cpu = window.client_cpu or 0.0
    if cpu > CLIENT_CPU:
        raise MeasurementError(f"{key}: the load generator was saturated ({cpu:.0%} of a core)")
    gaps = distribution(gap for trace in window.traces for gap in chunk_gaps_ms(trace))
    limit = max(LOOP_LAG_MS, LOOP_LAG_SHARE * ((gaps.p50 if gaps else None) or 0.0))
    if window.loop_lag_ms is None or window.loop_lag_ms <= limit:
        return None
    if cpu > BUSY_CPU:
        raise MeasurementError(f"{key}: the load generator was saturated (timers {window.loop_lag_ms:.0f} ms late)")
    return f"{key}: this machine is busy with other work: times may be {window.loop_lag_ms:.0f} ms late"


def _dead_engine_first(base_url: str, watch: Watch) -> None:
    """Let `watch` raise why the engine ended, which explains better than a request that went wrong.

    An engine's socket closes a moment before its end is known: a server that is gone is given that moment.
    """
    until = time.monotonic() + DYING_S
    watch()
    while time.monotonic() < until and not _listens(base_url):
        time.sleep(0.1)
        watch()


def _listens(base_url: str) -> bool:
    url = urlsplit(base_url)
    try:
        socket.create_connection((url.hostname or "127.0.0.1", url.port or 80), timeout=1.0).close()
    except OSError:
        return False
    return True


async def watched(work: Awaitable[T], watch: Watch, every_s: float = 1.0) -> T:
    """Await `work`, calling `watch` every second and once at the end; its error ends the work at once."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=every_s))[0]:
            await asyncio.to_thread(watch)
        await asyncio.to_thread(watch)  # a dead engine explains failed requests better than they do
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=10.0)
