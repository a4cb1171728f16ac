"""Where the milliseconds of a decode step go, from SGLang's own torch profiler.

`parse` turns one rank's Chrome trace into a `StepProfile`; `pipeline.capture` takes the traces. GPU work
is tied to the pass that launched it through CUPTI's correlation ids: a kernel, also one inside a replayed
CUDA graph, carries the id of the call that launched it, and that call lies inside the spans SGLang writes
(`step[TARGET_VERIFY bs=8]`, `draft`, `draft_extend`). So it holds under overlapped scheduling, where the
CPU runs a step ahead of the GPU.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from pydantic import Field

from pipeline.config import Frozen
from pipeline.errors import MeasurementError

Pass = Literal["prefill", "draft", "target", "other"]
Kind = Literal["all_reduce", "all_gather", "collective", "compute"]

# Read in SGLang 0.5.17: profile_utils.build_step_span_name, spec_utils.spec_stage_span. First match wins,
# over all spans around a launch: a draft's own forward is `step[DECODE …]` inside `draft`.
PASSES: tuple[tuple[re.Pattern[str], Pass], ...] = (
    (re.compile(r"^step\[(EXTEND|MIXED|SPLIT_PREFILL)"), "prefill"),
    (re.compile(r"^(draft|draft_extend)$|^step\[DRAFT"), "draft"),
    (re.compile(r"^step\[(DECODE|TARGET_VERIFY)"), "target"),
)
# Kernel names of NCCL, SGLang's custom all-reduce (1- and 2-stage, JIT), FlashInfer and TRT-LLM fusion,
# mscclpp and torch symmetric memory. A fused kernel (all-reduce + norm) counts as its all-reduce.
KERNELS: tuple[tuple[re.Pattern[str], Kind], ...] = (
    (re.compile(r"all_?gather", re.I), "all_gather"),
    (re.compile(r"all_?reduce|cross_device_reduce|(one|two)_?shot|multimem", re.I), "all_reduce"),
    (re.compile(r"^nccl|reduce_?scatter", re.I), "collective"),
)
_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_STALL = 3.0  # a cycle this many times the median held something else: a prefill, a pause


class StepProfile(Frozen):
    """One rank's mean decode step. The parts, exposed times in ms, add up to `step_ms`.

    A collective that runs beside compute costs nothing and is not counted as collective time. Counts are
    per target pass (`all_reduces`, `all_gathers`) and per cycle for the draft's passes together.
    """

    rank: str
    label: str = ""
    steps: int
    step_ms: float
    collectives_ms: float
    compute_ms: float
    draft_ms: float  # the draft's passes, compute and collectives
    draft_collectives_ms: float
    other_ms: float  # sampling, acceptance, copies
    gaps_ms: float  # no work on the GPU
    all_reduces: float
    all_gathers: float
    draft_all_reduces: float
    draft_all_gathers: float
    kernels: dict[str, int] = Field(default_factory=dict)  # collective kernels of the target, by name
    measured_step_ms: float | None = None  # by the ruler, without the profiler

    @property
    def overhead(self) -> float | None:
        """Share by which the profiled step is longer than the measured one."""
        return self.step_ms / self.measured_step_ms - 1 if self.measured_step_ms else None

    @property
    def parts_ms(self) -> dict[str, float]:
        """The parts in the order in which a bar shows them."""
        return {
            "collectives": self.collectives_ms,
            "compute": self.compute_ms,
            "draft": self.draft_ms,
            "other": self.other_ms,
            "gaps": self.gaps_ms,
        }


@dataclass(frozen=True, slots=True)
class _Span:
    thread: tuple[Any, Any]
    start: float
    end: float
    name: str


@dataclass(frozen=True, slots=True)
class _Work:
    start: float  # µs, as all times of a trace
    end: float
    kind: Kind
    which: Pass
    step: float | None  # start of the CPU span of the target pass that launched it
    name: str


def load_trace(path: Path) -> list[dict[str, Any]]:
    """Events of a Chrome trace, plain or gzipped.

    Raises:
        MeasurementError: the file is no whole trace.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        events: list[dict[str, Any]] = json.loads(raw)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise MeasurementError(f"{path} is no whole Chrome trace: {error}") from error
    return events


def parse(events: Iterable[dict[str, Any]], *, rank: str = "TP-0", label: str = "") -> StepProfile:
    """Mean decode step of one rank.

    A step is the time from the first kernel of a target pass to that of the next. Steps with a prefill or a
    stall in them are left out.

    Raises:
        MeasurementError: the trace holds fewer than two decode steps, or no SGLang spans.
    """
    work = sorted(_work(list(events)), key=lambda item: item.start)
    cycles = _steady(list(_cycles(work)))
    if not cycles:
        raise MeasurementError(f"no whole decode step in the trace of {rank}: profile more steps under load")
    return _profile(cycles, rank, label)


def _work(events: list[dict[str, Any]]) -> Iterator[_Work]:
    timed = [e for e in events if e.get("ph") == "X" and "ts" in e and "dur" in e]
    spans = _spans(timed)
    launches = {
        e["args"]["correlation"]: e
        for e in timed
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    labels: dict[Any, tuple[Pass, float | None]] = {}
    for event in timed:
        if event.get("cat") not in _GPU:
            continue
        correlation = event.get("args", {}).get("correlation")
        if correlation not in labels:
            labels[correlation] = _pass_of(launches.get(correlation), spans)
        which, step = labels[correlation]
        start = float(event["ts"])
        name = str(event["name"])
        yield _Work(start, start + float(event["dur"]), kind_of(name), which, step, name)


def _spans(timed: Iterable[dict[str, Any]]) -> dict[tuple[Any, Any], list[_Span]]:
    spans: dict[tuple[Any, Any], list[_Span]] = defaultdict(list)
    for event in timed:
        name = str(event["name"])
        if event.get("cat") == "user_annotation" and any(pattern.search(name) for pattern, _ in PASSES):
            thread, start = (event.get("pid"), event.get("tid")), float(event["ts"])
            spans[thread].append(_Span(thread, start, start + float(event["dur"]), name))
    return spans


def _pass_of(launch: dict[str, Any] | None, spans: dict[tuple[Any, Any], list[_Span]]) -> tuple[Pass, float | None]:
    """The pass that made a launch, and where that target pass began on the CPU."""
    if launch is None:
        return "other", None
    at = float(launch["ts"])
    around = [s for s in spans[(launch.get("pid"), launch.get("tid"))] if s.start <= at < s.end]
    for pattern, which in PASSES:
        for span in around:
            if pattern.search(span.name):
                return which, span.start if which == "target" else None
    return "other", None


def kind_of(kernel: str) -> Kind:
    """What a kernel is, by its name."""
    return next((kind for pattern, kind in KERNELS if pattern.search(kernel)), "compute")


def _cycles(work: list[_Work]) -> Iterator[list[_Work]]:
    """GPU work from one target pass's first kernel to the next one's; cycles with prefill are left out."""
    first: dict[float, float] = {}
    for item in work:
        if item.step is not None:
            first.setdefault(item.step, item.start)
    starts, marks = [w.start for w in work], sorted(first.values())
    for begin, end in pairwise(marks):
        inside = work[bisect_right(starts, begin) - 1 : bisect_right(starts, end) - 1]
        if not any(item.which == "prefill" for item in inside):
            yield [*inside, _Work(end, end, "compute", "other", None, "")]


def _steady(cycles: list[list[_Work]]) -> list[list[_Work]]:
    lengths = [cycle[-1].start - cycle[0].start for cycle in cycles]
    limit = _STALL * median(lengths) if lengths else 0.0
    return [cycle for cycle, length in zip(cycles, lengths, strict=True) if length <= limit]


def _profile(cycles: list[list[_Work]], rank: str, label: str) -> StepProfile:
    shares = [_exposed(cycle) for cycle in cycles]
    counts = Counter((item.which, item.kind) for cycle in cycles for item in cycle[:-1])
    names = Counter(
        item.name for cycle in cycles for item in cycle if item.which == "target" and item.kind != "compute"
    )

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
        gaps_ms=ms("gap"),
        all_reduces=each("target", "all_reduce"),
        all_gathers=each("target", "all_gather"),
        draft_all_reduces=each("draft", "all_reduce"),
        draft_all_gathers=each("draft", "all_gather"),
        kernels=dict(names),
    )


def _exposed(cycle: list[_Work]) -> dict[str, float]:
    """Microseconds of a cycle by what ran: compute over collectives, the target over draft over other."""
    begin, end = cycle[0].start, cycle[-1].start
    edges = sorted({begin, end, *(t for w in cycle for t in (w.start, w.end) if begin < t < end)})
    totals: dict[str, float] = defaultdict(float)
    active: list[_Work] = []
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


def _lane(item: _Work) -> tuple[int, str]:
    kind = "compute" if item.kind == "compute" else "collective"
    return (10 if kind == "collective" else 0) + _RANK[item.which], f"{item.which} {kind}"
