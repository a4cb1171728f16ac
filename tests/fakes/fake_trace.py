"""A Chrome trace as SGLang's torch profiler writes one: spans and launches on the CPU, kernels on the GPU.

The CPU runs one step ahead of the GPU, as with overlapped scheduling: kernels can be told apart only by
correlation ids. Times are microseconds.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAYERS = 30


@dataclass
class FakeTrace:
    """Adds passes one after another; the GPU clock runs `lag` behind the CPU clock."""

    all_reduce: str = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    lag: float = 5000.0
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cpu, self._gpu, self._correlation = 0.0, self.lag, 0

    def _add(self, cat: str, name: str, ts: float, dur: float, tid: object, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 100, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    def span(self, name: str, start: float) -> None:
        """Close a span that began at `start` on the scheduler's thread."""
        self._add("user_annotation", name, start, self._cpu - start, 100)

    def graph(self, kernels: list[tuple[str, float]], gap: float = 0.0) -> None:
        """One graph launch and its kernels, (name, µs), in a row after a pause of `gap` µs."""
        self._correlation += 1
        self._add("cuda_runtime", "cudaGraphLaunch", self._cpu, 20.0, 100, correlation=self._correlation)
        self._cpu += 25.0
        self._gpu += gap
        for name, length in kernels:
            self._add("kernel", name, self._gpu, length, 7, correlation=self._correlation, stream=7)
            self._gpu += length

    def forward(self, layers: int, collective_us: float, compute_us: float) -> list[tuple[str, float]]:
        """Two all-reduces a layer, one after the embedding, and the logits' all-gather."""
        layer = [("sm90_xmma_gemm_bf16", compute_us / 2), (self.all_reduce, collective_us)]
        gather = ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", collective_us)
        return [(self.all_reduce, collective_us), *(layer * 2 * layers), gather]

    def plain_step(self, collective_us: float = 10.0, compute_us: float = 40.0, gap: float = 100.0) -> None:
        """A decode step."""
        start = self._cpu
        self.graph(self.forward(LAYERS, collective_us, compute_us), gap)
        self.span("step[DECODE bs=1]", start)
        self.graph([("sampling_kernel", 30.0)])

    def speculative_step(self, collective_us: float = 12.0, compute_us: float = 44.0, gap: float = 100.0) -> None:
        """Draft, verify, sample, extend the draft: as EAGLE3's worker does."""
        start = self._cpu
        inner = self._cpu
        self.graph(self.forward(1, collective_us, compute_us), gap)
        self.span("step[DECODE bs=1]", inner)  # the draft's own forward has the name of a plain step
        self.span("draft", start)
        start = self._cpu
        self.graph(self.forward(LAYERS, collective_us, compute_us), gap)
        self.span("step[TARGET_VERIFY bs=1]", start)
        self.graph([("verify_tree_greedy_kernel", 25.0)])
        start = self._cpu
        self.graph(self.forward(1, collective_us, compute_us))
        self.span("step[DRAFT_EXTEND_V2 bs=1]", start)
        self.span("draft_extend", start)

    def prefill(self, length: float = 9000.0) -> None:
        """A prompt comes in between."""
        start = self._cpu
        self.graph([("flash_fwd_kernel", length), (self.all_reduce, 400.0)])
        self.span("step[EXTEND bs=1 toks=512]", start)

    def gpu_only(self) -> list[dict[str, Any]]:
        """The events of a profiler that was asked for GPU activity alone: no spans."""
        return [event for event in self.events if event["cat"] != "user_annotation"]

    def pause(self, length: float) -> None:
        """Nothing runs."""
        self._gpu += length

    def write(self, path: Path, *, spans: bool = True) -> Path:
        """Write as SGLang does, gzipped."""
        events = self.events if spans else self.gpu_only()
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
        return path
