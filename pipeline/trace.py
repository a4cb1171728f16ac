"""What a torch-profiler trace of SGLang holds: GPU work, the pass that launched it, and waiting told from work.

GPU work is tied to its pass through CUPTI's correlation ids: a kernel, also one inside a replayed CUDA graph,
carries the id of the call that launched it, and that call lies inside the spans SGLang writes
(`step[TARGET_VERIFY bs=8]`, `draft`, `draft_extend`). So it holds under overlapped scheduling, where the CPU
runs a step ahead of the GPU. A trace of GPU activity alone has no spans; what a launch was, `shapes` learned
from a trace that has them.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pipeline.errors import MeasurementError

Pass = Literal["prefill", "draft", "target", "other"]
Kind = Literal["all_reduce", "all_gather", "collective", "compute", "waiting"]
Shape = tuple[str, ...]  # the kernels of one launch, by name and in order

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
_WAITED = 3.0  # a collective this many times its usual length stood waiting for another rank


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel, copy or fill on one stream; times in µs, as all times of a trace."""

    start: float
    end: float
    kind: Kind
    which: Pass
    step: float | None  # what all work of one target pass has in common
    name: str
    stream: Any
    launch: Any


@dataclass(frozen=True)
class Shapes:
    """What launches of a labelled trace were, by the kernels in them, and which of them are a target's forward."""

    passes: Mapping[Shape, Pass]
    forwards: frozenset[Shape]


@dataclass(frozen=True, slots=True)
class _Span:
    start: float
    end: float
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


def gpu_work(events: Iterable[dict[str, Any]], shapes: Shapes | None = None) -> list[Work]:
    """All GPU work by start, each stream's one after another, waiting split from collectives.

    Args:
        events: of one rank's trace.
        shapes: what launches are, for a trace without SGLang's spans.
    """
    timed = [e for e in events if e.get("ph") == "X" and "ts" in e and "dur" in e]
    found = _labelled(timed) if shapes is None else _recognised(timed, shapes)
    return sorted(_split_waiting(_serial(found)), key=lambda item: item.start)


def learn(work: Sequence[Work]) -> Shapes:
    """What each launch of a labelled trace was; a target's forward is the longest launch of its pass."""
    votes: dict[Shape, Counter[Pass]] = defaultdict(Counter)
    passes: dict[float, list[Shape]] = defaultdict(list)
    for items in _launches(work).values():
        shape = tuple(item.name for item in items)
        votes[shape][items[0].which] += 1
        if items[0].step is not None:
            passes[items[0].step].append(shape)
    return Shapes(
        passes={shape: counted.most_common(1)[0][0] for shape, counted in votes.items()},
        forwards=frozenset(max(inside, key=len) for inside in passes.values()),
    )


def kind_of(kernel: str) -> Kind:
    """What a kernel is, by its name."""
    return next((kind for pattern, kind in KERNELS if pattern.search(kernel)), "compute")


def _launches(work: Iterable[Work]) -> dict[Any, list[Work]]:
    grouped: dict[Any, list[Work]] = defaultdict(list)
    for item in sorted(work, key=lambda item: item.start):
        if item.launch is not None and item.kind != "waiting":
            grouped[item.launch].append(item)
    return grouped


def _labelled(timed: Sequence[dict[str, Any]]) -> Iterator[Work]:
    """Work with its pass, by SGLang's spans around the call that launched it."""
    spans = _spans(timed)
    calls = {
        e["args"]["correlation"]: e
        for e in timed
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    labels: dict[Any, tuple[Pass, float | None]] = {}
    for item in _unlabelled(timed):
        if item.launch not in labels:
            labels[item.launch] = _pass_of(calls.get(item.launch), spans)
        which, step = labels[item.launch]
        yield replace(item, which=which, step=step)


def _unlabelled(timed: Iterable[dict[str, Any]]) -> Iterator[Work]:
    for event in timed:
        if event.get("cat") in _GPU:
            start, name = float(event["ts"]), str(event["name"])
            yield Work(
                start, start + float(event["dur"]), kind_of(name), "other", None, name,
                (event.get("pid"), event.get("tid")), event.get("args", {}).get("correlation"),
            )  # fmt: skip


def _recognised(timed: Sequence[dict[str, Any]], shapes: Shapes) -> Iterator[Work]:
    """Work with its pass, by the shape of its launch. A launch never seen is a prefill: its step is left out."""
    for items in _launches(_unlabelled(timed)).values():
        shape = tuple(item.name for item in items)
        which = shapes.passes.get(shape, "prefill")
        step = items[0].start if shape in shapes.forwards else None
        yield from (replace(item, which=which, step=step) for item in items)


def _spans(timed: Iterable[dict[str, Any]]) -> dict[Any, list[_Span]]:
    spans: dict[Any, list[_Span]] = defaultdict(list)
    for event in timed:
        name = str(event["name"])
        if event.get("cat") == "user_annotation" and any(pattern.search(name) for pattern, _ in PASSES):
            start = float(event["ts"])
            spans[event.get("pid"), event.get("tid")].append(_Span(start, start + float(event["dur"]), name))
    return spans


def _pass_of(call: dict[str, Any] | None, spans: dict[Any, list[_Span]]) -> tuple[Pass, float | None]:
    """The pass that made a launch, and where that target pass began on the CPU."""
    if call is None:
        return "other", None
    at = float(call["ts"])
    around = [s for s in spans[call.get("pid"), call.get("tid")] if s.start <= at < s.end]
    for pattern, which in PASSES:
        for span in around:
            if pattern.search(span.name):
                return which, span.start if which == "target" else None
    return "other", None


def _serial(work: Iterable[Work]) -> list[Work]:
    """Each stream's work one after another.

    Programmatic dependent launch starts a kernel while the one before it still runs; until that one ends it only
    waits. Both would count else, and a norm would seem to compute for as long as its all-reduce waits.
    """
    streams: dict[Any, float] = {}
    ordered: list[Work] = []
    for item in sorted(work, key=lambda item: (item.start, item.end)):
        start = max(item.start, streams.get(item.stream, item.start))
        streams[item.stream] = max(item.end, start)
        ordered.append(replace(item, start=start, end=streams[item.stream]))
    return ordered


def _split_waiting(work: Sequence[Work]) -> Iterator[Work]:
    """Cut off what a collective takes beyond its usual length: there it waits for another rank, and moves nothing."""
    lengths: dict[tuple[str, Pass], list[float]] = defaultdict(list)
    for item in work:
        if item.kind != "compute":
            lengths[item.name, item.which].append(item.end - item.start)
    usual = {key: median(values) for key, values in lengths.items()}
    for item in work:
        length = usual.get((item.name, item.which), 0.0)
        if item.kind == "compute" or item.end - item.start <= _WAITED * length:
            yield item
        else:
            yield replace(item, end=item.end - length, kind="waiting")
            yield replace(item, start=item.end - length)
