"""Where the milliseconds of a decode step go.

A profiler tells truly how long kernels run on the GPU, and hardly anything else: it slows the CPU, which leaves
the GPU idle for longer and lets one rank wait for another. So the work on the GPU is taken from the trace, and what
is left of the step from a run without the profiler. `pipeline.capture` takes both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from pydantic import Field

from pipeline.config import Frozen
from pipeline.errors import MeasurementError
from pipeline.trace import Kind, Pass, Shapes, Work, gpu_work

_STALL = 3.0  # a cycle this many times the median held something else: a prefill, a pause
_FITS = 1.02  # work over what must hold it: two per cent more is the clock's
_ALIKE = 1.1  # ranks of one launch do the same work


class StepProfile(Frozen):
    """One rank's mean decode step: exposed times in ms, of the trace unless said otherwise.

    Exposed: a collective that runs beside compute on another stream costs nothing and is not counted. Counts are
    per target pass (`all_reduces`, `all_gathers`) and per cycle for the draft's passes together.
    """

    rank: str
    label: str = ""
    steps: int
    step_ms: float  # under the profiler
    collectives_ms: float  # moving data; waiting for another rank is apart
    compute_ms: float
    draft_ms: float  # the draft's passes, compute and collectives
    draft_collectives_ms: float
    other_ms: float  # sampling, acceptance, copies
    waiting_ms: float | None = None  # in collectives, for another rank; None where it was not told apart
    gaps_ms: float  # no work on the GPU
    work_ms: float | None = None  # all work, streams added up: more than the busy time where streams overlap
    all_reduces: float
    all_gathers: float
    draft_all_reduces: float
    draft_all_gathers: float
    kernels: dict[str, int] = Field(default_factory=dict)  # collective kernels of the target, by name
    measured_step_ms: float | None = None  # by the ruler, without the profiler
    spans_step_ms: float | None = None  # with CPU activity, where these times are of GPU activity alone

    @property
    def busy_ms(self) -> float:
        """Time in which the GPU did work, the union over its streams, waiting excluded."""
        return self.collectives_ms + self.compute_ms + self.draft_ms + self.other_ms

    @property
    def overhead(self) -> float | None:
        """Share by which the profiled step is longer than the measured one."""
        return self.step_ms / self.measured_step_ms - 1 if self.measured_step_ms else None

    @property
    def idle_ms(self) -> float | None:
        """Launches, gaps and waiting of the measured step: what its work leaves. None where the work does not fit."""
        if self.measured_step_ms is None or self.busy_ms > self.measured_step_ms * _FITS:
            return None
        return max(0.0, self.measured_step_ms - self.busy_ms)

    @property
    def parts_ms(self) -> dict[str, float]:
        """The parts in the order in which a bar shows them: of the measured step, else of the profiled one."""
        work = {
            "collectives": self.collectives_ms,
            "compute": self.compute_ms,
            "draft": self.draft_ms,
            "other": self.other_ms,
        }
        idle = self.idle_ms
        return work | {"idle": self.gaps_ms + (self.waiting_ms or 0.0) if idle is None else idle}


def doubts(profiles: Sequence[StepProfile]) -> tuple[str, ...]:
    """What speaks against profiles, in words: work longer than the step or than its kernels, ranks that disagree."""
    found = [
        f"{p.label} {p.rank}: the GPU worked for {p.busy_ms:.2f} ms a step under the profiler, but a step without it "
        f"takes {p.measured_step_ms:.2f} ms. The two were not the same step; do not read the parts."
        for p in profiles
        if p.measured_step_ms is not None and p.idle_ms is None
    ]
    found += [
        f"{p.label} {p.rank}: the parts add up to {p.busy_ms:.2f} ms of work, all kernels together to {p.work_ms:.2f}. "
        "Something is counted twice."
        for p in profiles
        if p.work_ms is not None and p.busy_ms > p.work_ms * _FITS
    ]
    ranks: dict[str, list[StepProfile]] = defaultdict(list)
    for profile in profiles:
        ranks[profile.label].append(profile)
    for label, same in ranks.items():
        least, most = (pick(same, key=lambda p: p.busy_ms) for pick in (min, max))
        if most.busy_ms > least.busy_ms * _ALIKE:
            found.append(
                f"{label}: {most.rank} worked for {most.busy_ms:.2f} ms a step, {least.rank} for {least.busy_ms:.2f}. "
                "Ranks do the same work, so waiting is counted as work in the longer one."
            )
    return tuple(found)


def busy_shares(profiles: Sequence[StepProfile]) -> tuple[str, ...]:
    """In words, how much of its step each configuration's first rank works."""
    first = {p.label: p for p in reversed(profiles) if p.measured_step_ms and p.idle_ms is not None}
    shares = {label: p.busy_ms / (p.measured_step_ms or p.step_ms) for label, p in first.items()}
    return tuple(f"{label}: the GPU works for {shares[label]:.0%} of a step." for label in sorted(shares))


def parse(
    events: Iterable[dict[str, Any]], *, rank: str = "TP-0", label: str = "", shapes: Shapes | None = None
) -> StepProfile:
    """Mean decode step of one rank.

    A step is the time from the first kernel of a target pass to that of the next. Steps with a prefill or a
    stall in them are left out.

    Args:
        events: of the rank's trace.
        rank: its name.
        label: the configuration in words.
        shapes: for a trace of GPU activity alone, what `learn` found in one with SGLang's spans.

    Raises:
        MeasurementError: the trace holds fewer than two decode steps, or none that can be told.
    """
    cycles = _steady(list(_cycles(gpu_work(list(events), shapes))))
    if not cycles:
        raise MeasurementError(f"no whole decode step in the trace of {rank}: profile more steps under load")
    return _profile(cycles, rank, label)


def _cycles(work: list[Work]) -> Iterator[list[Work]]:
    """GPU work from one target pass's first kernel to the next one's; cycles with prefill are left out."""
    first: dict[float, float] = {}
    for item in work:
        if item.step is not None:
            first.setdefault(item.step, item.start)
    starts, marks = [w.start for w in work], sorted(first.values())
    for begin, end in pairwise(marks):
        inside = work[bisect_right(starts, begin) - 1 : bisect_right(starts, end) - 1]
        if not any(item.which == "prefill" for item in inside):
            yield [*inside, Work(end, end, "compute", "other", None, "", None, None)]


def _steady(cycles: list[list[Work]]) -> list[list[Work]]:
    lengths = [cycle[-1].start - cycle[0].start for cycle in cycles]
    limit = _STALL * median(lengths) if lengths else 0.0
    return [cycle for cycle, length in zip(cycles, lengths, strict=True) if length <= limit]


def _profile(cycles: list[list[Work]], rank: str, label: str) -> StepProfile:
    shares = [_exposed(cycle) for cycle in cycles]
    work = [item for cycle in cycles for item in cycle[:-1] if item.kind != "waiting"]
    counts = Counter((item.which, item.kind) for item in work)
    names = Counter(item.name for item in work if item.which == "target" and item.kind != "compute")

    def ms(*parts: str) -> float:
        return fmean(sum(share.get(part, 0.0) for part in parts) for share in shares) / 1e3

    def each(which: Pass, kind: Kind) -> float:
        return counts[(which, kind)] / len(cycles)

    return StepProfile(
        rank=rank,
        label=label,
        steps=len(cycles),
        step_ms=fmean(cycle[-1].start - cycle[0].start for cycle in cycles) / 1e3,
        collectives_ms=ms("target collective"),
        compute_ms=ms("target compute"),
        draft_ms=ms("draft compute", "draft collective"),
        draft_collectives_ms=ms("draft collective"),
        other_ms=ms("other compute", "other collective"),
        waiting_ms=ms("waiting"),
        gaps_ms=ms("gap"),
        work_ms=sum(item.end - item.start for item in work) / len(cycles) / 1e3,
        all_reduces=each("target", "all_reduce"),
        all_gathers=each("target", "all_gather"),
        draft_all_reduces=each("draft", "all_reduce"),
        draft_all_gathers=each("draft", "all_gather"),
        kernels=dict(names),
    )


def _exposed(cycle: list[Work]) -> dict[str, float]:
    """Microseconds of a cycle by what ran: compute over collectives over waiting, target over draft over other."""
    begin, end = cycle[0].start, cycle[-1].start
    edges = sorted({begin, end, *(t for w in cycle for t in (w.start, w.end) if begin < t < end)})
    totals: dict[str, float] = defaultdict(float)
    active: list[Work] = []
    pending = iter(cycle)
    upcoming = next(pending, None)
    for left, right in pairwise(edges):
        active = [item for item in active if item.end > left]
        while upcoming is not None and upcoming.start <= left:
            if upcoming.end > left:
                active.append(upcoming)
            upcoming = next(pending, None)
        totals[min(map(_lane, active))[1] if active else "gap"] += right - left
    return totals


_RANK = {"target": 0, "draft": 1, "prefill": 2, "other": 3}


def _lane(item: Work) -> tuple[int, str]:
    if item.kind == "waiting":
        return 20, "waiting"
    kind = "compute" if item.kind == "compute" else "collective"
    return (10 if kind == "collective" else 0) + _RANK[item.which], f"{item.which} {kind}"
