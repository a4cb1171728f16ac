"""Step profiles from synthetic traces, and the capture against a server that behaves like SGLang's."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline.capture import capture, decode_step_ms, profile_engine, rank_of, targets
from pipeline.errors import MeasurementError
from pipeline.profile import kind_of, load_trace, parse
from pipeline.store import Study
from tests.fakes.fake_study import WINNER, full_study
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
def profiling_server(*, writes: bool = True, tokens_a_step: int = 1) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Answers like SGLang: /generate takes 20 ms and 0.2 ms a step; /start_profile writes two ranks' traces."""
    asked: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            answer = b"Start profiling."
            if self.path == "/generate":
                answer = json.dumps({"text": "", "meta_info": self.decode(body)}).encode()
            elif writes:
                for rank in range(2):
                    speculative().write(Path(body["output_dir"]) / f"1764-TP-{rank}.trace.json.gz")
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def decode(self, body: dict[str, Any]) -> dict[str, int]:
            tokens = body["sampling_params"]["max_new_tokens"]
            steps = tokens // tokens_a_step if tokens_a_step > 1 else tokens - 1
            time.sleep(0.02 + 2e-4 * steps)
            return {"completion_tokens": tokens} | ({"spec_verify_ct": steps} if tokens_a_step > 1 else {})

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def busy() -> None:
    time.sleep(0.02)


def test_capture_profiles_every_rank(tmp_path: Path) -> None:
    with profiling_server() as (url, asked):
        found = profile_engine(url, tmp_path / "p", busy, label="EAGLE3", num_steps=7, measured_step_ms=3.5)
    assert [p.rank for p in found] == ["TP-0", "TP-1"]
    assert asked[0][0] == "/start_profile" and asked[0][1]["num_steps"] == 7
    stored = json.loads((tmp_path / "p" / "profile.json").read_text())
    assert (stored[1]["label"], stored[1]["measured_step_ms"]) == ("EAGLE3", 3.5)


def test_a_profiler_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    with profiling_server(writes=False) as (url, _), pytest.raises(MeasurementError, match="0 of 1 traces"):
        capture(url, tmp_path / "p", busy, settle_s=0.01, timeout_s=1)


def test_a_missing_rank_and_stale_traces_are_no_profile(tmp_path: Path) -> None:
    speculative().write(tmp_path / "old-TP-2.trace.json.gz")
    with profiling_server() as (url, _), pytest.raises(MeasurementError, match="2 of 3 traces"):
        capture(url, tmp_path, busy, ranks=3, settle_s=0.01, timeout_s=3)


def test_a_server_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="start_profile"):
        capture("http://127.0.0.1:9", tmp_path / "p", busy, settle_s=0.01, timeout_s=1)


@pytest.mark.parametrize("tokens_a_step", [1, 2])
def test_the_decode_step_is_timed_without_prefill(tokens_a_step: int) -> None:
    with profiling_server(tokens_a_step=tokens_a_step) as (url, _):
        assert decode_step_ms(url, streams=2) == pytest.approx(0.2, rel=0.5)


def test_baseline_winner_and_the_best_of_each_algorithm_are_profiled(tmp_path: Path) -> None:
    chosen = targets(Study.open(full_study().write(tmp_path)))
    assert {r.config.speculation.algorithm for r in chosen} == {"none", "NGRAM", "EAGLE3", "STANDALONE"}
    assert any(r.role == "baseline" for r in chosen)
    assert WINNER.config in {r.config for r in chosen}
    assert len({r.config_id for r in chosen}) == len(chosen) <= 6


@pytest.mark.parametrize(
    ("trace", "target", "draft"),
    [("baseline-nvlink.TP-0", (61, 1), (0, 0)), ("eagle3-pcie.TP-0", (61, 1), (9, 3))],
)
def test_real_traces_of_two_gpus_hold_what_the_model_must_send(
    trace: str, target: tuple[int, int], draft: tuple[int, int]
) -> None:
    """30 layers: two all-reduces each, one for the embedding, one all-gather of the logits; a draft sends its own."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu2" / "traces" / f"{trace}.trace.json.gz"
    profile = parse(load_trace(path), rank="TP-0")
    assert (profile.all_reduces, profile.all_gathers) == target
    assert (profile.draft_all_reduces, profile.draft_all_gathers) == draft
    assert sum(profile.parts_ms.values()) == pytest.approx(profile.step_ms, rel=0.01)
