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
from pipeline.profile import StepProfile, busy_shares, doubts, parse
from pipeline.store import Study
from pipeline.trace import gpu_work, kind_of, learn, load_trace
from tests.fakes.fake_study import WINNER, full_study
from tests.fakes.fake_trace import LAYERS, FakeTrace


def speculative(steps: int = 6, gap: float = 100.0) -> FakeTrace:
    trace = FakeTrace()
    for _ in range(steps):
        trace.speculative_step(gap=gap)
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


def test_parts_add_up_to_the_step_that_was_timed_without_the_profiler() -> None:
    profiled = parse(speculative().events)
    assert sum(profiled.parts_ms.values()) == pytest.approx(profiled.step_ms)
    measured = profiled.model_copy(update={"measured_step_ms": profiled.busy_ms + 0.05})
    assert sum(measured.parts_ms.values()) == pytest.approx(measured.measured_step_ms)
    assert measured.parts_ms["idle"] == pytest.approx(0.05)  # the profiled step idles for 0.2
    assert measured.overhead is not None and measured.overhead > 0.03
    assert doubts([measured]) == ()
    share = measured.busy_ms / (measured.busy_ms + 0.05)
    assert busy_shares([measured]) == (f": the GPU works for {share:.0%} of a step.",)
    assert busy_shares([profiled]) == ()


def test_work_that_is_longer_than_the_step_is_said() -> None:
    profiled = parse(speculative().events)
    short = profiled.model_copy(update={"measured_step_ms": profiled.busy_ms * 0.9})
    assert short.idle_ms is None
    assert "do not read the parts" in doubts([short])[0]


def test_parts_that_hold_more_than_all_kernels_are_said() -> None:
    profile = parse(speculative().events)
    assert profile.work_ms == pytest.approx(profile.busy_ms)  # one stream: nothing overlaps
    assert doubts([profile]) == ()
    assert "counted twice" in doubts([profile.model_copy(update={"draft_ms": 2 * profile.draft_ms})])[0]


def test_ranks_that_disagree_are_said() -> None:
    one = parse(speculative().events)
    more = one.compute_ms / 2
    changed = {"rank": "TP-1", "compute_ms": one.compute_ms + more, "work_ms": (one.work_ms or 0.0) + more}
    other = one.model_copy(update=changed)
    assert "TP-1 worked for" in doubts([one, other])[0]
    assert doubts([one, other.model_copy(update={"label": "another"})]) == ()


def test_a_collective_that_waits_for_another_rank_is_no_work() -> None:
    plain, late = FakeTrace(), FakeTrace()
    for _ in range(6):
        plain.plain_step()
        late.plain_step()
    first = next(e for e in late.events if "AllReduce" in e["name"] and e["ts"] > late.lag + 3000)
    for event in late.events:  # this all-reduce and all that follows it on the GPU come 700 µs later
        if event["cat"] == "kernel" and event["ts"] > first["ts"]:
            event["ts"] += 700
    first["dur"] += 700
    found, usual = parse(late.events), parse(plain.events)
    assert found.waiting_ms == pytest.approx(0.7 / found.steps)
    assert found.busy_ms == pytest.approx(usual.busy_ms)
    assert found.collectives_ms == pytest.approx(usual.collectives_ms)


def test_a_kernel_launched_before_its_forerunner_ended_does_not_hide_it() -> None:
    trace = FakeTrace()
    for _ in range(5):
        trace.plain_step()
    usual = parse(trace.events)
    for event in trace.events:  # programmatic dependent launch: it starts early and waits
        if event["name"] == "sm90_xmma_gemm_bf16":
            event["ts"], event["dur"] = event["ts"] - 8, event["dur"] + 8
    found = parse(trace.events)
    assert found.collectives_ms == pytest.approx(usual.collectives_ms)
    assert found.compute_ms == pytest.approx(usual.compute_ms)


def test_a_trace_of_gpu_activity_alone_is_read_by_what_was_learned_from_one_with_spans() -> None:
    labelled, trace = speculative(8), speculative(4)
    trace.prefill()
    for _ in range(4):
        trace.speculative_step(gap=20.0)
    shapes = learn(gpu_work(labelled.events))
    found, usual = parse(trace.gpu_only(), shapes=shapes), parse(labelled.events)
    assert found.parts_ms | {"idle": 0} == pytest.approx(usual.parts_ms | {"idle": 0})
    assert (found.all_reduces, found.draft_all_reduces) == (usual.all_reduces, usual.draft_all_reduces)
    assert found.gaps_ms < usual.gaps_ms
    with pytest.raises(MeasurementError):
        parse(trace.gpu_only())


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
def profiling_server(
    *, writes: bool = True, tokens_a_step: int = 1, lighter_gap: float = 20.0
) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
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
                    spans = "CPU" in body["activities"]
                    path = Path(body["output_dir"]) / f"1764-TP-{rank}.trace.json.gz"
                    speculative(gap=100.0 if spans else lighter_gap).write(path, spans=spans)
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


@pytest.mark.parametrize("lighter_gap", [20.0, 300.0])
def test_capture_profiles_every_rank_and_takes_the_trace_that_slowed_it_less(
    tmp_path: Path, lighter_gap: float
) -> None:
    with profiling_server(lighter_gap=lighter_gap) as (url, asked):
        found = profile_engine(url, tmp_path / "p", busy, label="EAGLE3", ranks=2, num_steps=7, measured_step_ms=3.5)
    assert [p.rank for p in found] == ["TP-0", "TP-1"]
    assert [body["activities"] for path, body in asked if path == "/start_profile"] == [["CPU", "GPU"], ["GPU"]]
    assert asked[0][1]["num_steps"] == 7
    stored = [StepProfile(**p) for p in json.loads((tmp_path / "p" / "profile.json").read_text())]
    assert (stored[1].label, stored[1].measured_step_ms) == ("EAGLE3", 3.5)
    lighter = lighter_gap < 100
    assert (stored[0].spans_step_ms is not None) == lighter
    assert stored[0].gaps_ms == pytest.approx(0.04 if lighter else 0.2)


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
    ("trace", "target", "draft", "measured"),
    [("baseline-nvlink.TP-0", (61, 1), (0, 0), 1.98), ("eagle3-pcie.TP-0", (61, 1), (9, 3), 3.64)],
)
def test_real_traces_of_two_gpus_hold_what_the_model_must_send(
    trace: str, target: tuple[float, float], draft: tuple[float, float], measured: float
) -> None:
    """30 layers: two all-reduces each, one for the embedding, one all-gather of the logits; a draft sends its own."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu2" / "traces" / f"{trace}.trace.json.gz"
    events = load_trace(path)
    profile = parse(events).model_copy(update={"measured_step_ms": measured})
    assert (profile.all_reduces, profile.all_gathers) == target
    assert (profile.draft_all_reduces, profile.draft_all_gathers) == draft
    assert sum(profile.parts_ms.values()) == pytest.approx(measured)
    assert doubts([profile]) == ()
    assert profile.waiting_ms is not None and profile.waiting_ms > 0.3  # the profiler set the ranks apart
    gpu = [event for event in events if event.get("cat") != "user_annotation"]
    alone = parse(gpu, shapes=learn(gpu_work(events)))
    assert alone.busy_ms == pytest.approx(profile.busy_ms, rel=0.01)
    assert alone.compute_ms == pytest.approx(profile.compute_ms, rel=0.01)
