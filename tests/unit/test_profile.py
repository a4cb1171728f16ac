"""Step profiles from synthetic traces, and the capture against a server that behaves like SGLang's."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import MeasurementError
from pipeline.profile import capture, kind_of, load_trace, parse, profile_engine, rank_of
from tests.fakes.fake_trace import LAYERS, FakeTrace


def speculative(steps: int = 6) -> FakeTrace:
    trace = FakeTrace()
    for _ in range(steps):
        trace.speculative_step()
    return trace


def test_counts_all_reduces_of_a_plain_step() -> None:
    trace = FakeTrace()
    for _ in range(5):
        trace.plain_step()
    found = parse(trace.events)
    assert (found.all_reduces, found.all_gathers, found.draft_ms) == (2 * LAYERS + 1, 1, 0)
    assert found.steps == 4
    assert found.collectives_ms == pytest.approx((2 * LAYERS + 2) * 10 / 1e3)
    assert found.compute_ms == pytest.approx(LAYERS * 40 / 1e3)
    assert found.other_ms == pytest.approx(0.03)
    assert found.gaps_ms == pytest.approx(0.1)


def test_draft_passes_are_told_from_the_verify_pass() -> None:
    found = parse(speculative().events)
    assert (found.all_reduces, found.all_gathers) == (2 * LAYERS + 1, 1)
    assert (found.draft_all_reduces, found.draft_all_gathers) == (6, 2)
    assert found.draft_collectives_ms == pytest.approx(8 * 12 / 1e3)
    assert found.draft_ms == pytest.approx((2 * 44 + 8 * 12) / 1e3)


def test_parts_add_up_to_the_step() -> None:
    found = parse(speculative().events)
    assert sum(found.parts_ms.values()) == pytest.approx(found.step_ms)


def test_steps_with_a_prefill_or_a_stall_are_left_out() -> None:
    clean = parse(speculative(8).events)
    trace = speculative(4)
    trace.prefill()
    for _ in range(2):
        trace.speculative_step()
    trace.pause(50_000)
    for _ in range(3):
        trace.speculative_step()
    found = parse(trace.events)
    assert found.step_ms == pytest.approx(clean.step_ms)
    assert found.steps == 6


def test_collectives_hidden_by_compute_cost_nothing() -> None:
    trace = FakeTrace()
    for _ in range(3):
        trace.plain_step()
    hidden = [dict(e, name="elementwise_kernel", tid=9) for e in trace.events if "AllReduce" in e["name"]]
    found = parse([*trace.events, *hidden])
    assert found.all_reduces == 2 * LAYERS + 1
    assert found.collectives_ms == pytest.approx(0.01)  # only the all-gather is exposed


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL128(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16", "all_reduce"),
        ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 2>(RankData*, RankSignals)", "all_reduce"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8>", "all_reduce"),
        ("two_shot_all_reduce_kernel", "all_reduce"),
        ("void (anonymous namespace)::all_reduce_kernel<2, 1>(AllReduceParams<2>)", "all_reduce"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "collective"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "compute"),
        ("void at::native::reduce_kernel<512, 1>", "compute"),
    ],
)
def test_kernels_by_name(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_a_trace_without_decode_steps_is_refused() -> None:
    trace = FakeTrace()
    trace.prefill()
    with pytest.raises(MeasurementError, match="no whole decode step"):
        parse(trace.events)


def test_a_torn_trace_is_refused(tmp_path: Path) -> None:
    whole = speculative().write(tmp_path / "a-TP-1.trace.json.gz")
    whole.write_bytes(whole.read_bytes()[:-200])
    with pytest.raises(MeasurementError, match="no whole Chrome trace"):
        load_trace(whole)


def test_ranks_from_file_names() -> None:
    assert rank_of(Path("1764-TP-1.trace.json.gz")) == "TP-1"
    assert rank_of(Path("1764-TP-1-DP-0-EP-2.trace.json.gz")) == "TP-1-DP-0-EP-2"


@contextmanager
def profiling_server(write_at: str | None) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Answers like SGLang; writes two ranks' traces when `write_at` is asked for."""
    asked: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            if self.path == write_at:
                folder = Path(asked[0][1]["output_dir"])
                for rank in range(2):
                    speculative().write(folder / f"1764-TP-{rank}.trace.json.gz")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def test_capture_profiles_every_rank(tmp_path: Path) -> None:
    with profiling_server("/start_profile") as (url, asked):
        found = profile_engine(url, tmp_path / "p", lambda: None, label="EAGLE3", num_steps=7)
    assert [p.rank for p in found] == ["TP-0", "TP-1"]
    assert asked[0][1]["num_steps"] == 7
    assert json.loads((tmp_path / "p" / "profile.json").read_text())[1]["label"] == "EAGLE3"


def test_a_load_that_ends_early_still_gives_its_trace(tmp_path: Path) -> None:
    with profiling_server("/stop_profile") as (url, asked):
        found = capture(url, tmp_path / "p", lambda: None, settle_s=0.01, timeout_s=20)
    assert len(found) == 2
    assert [path for path, _ in asked] == ["/start_profile", "/stop_profile"]


def test_a_profiler_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    with profiling_server(None) as (url, _), pytest.raises(MeasurementError, match="no trace appeared"):
        capture(url, tmp_path / "p", lambda: None, settle_s=0.01, timeout_s=1)
