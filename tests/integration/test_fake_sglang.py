"""The fake itself: its stamps are the truth that the load generator is judged by, so they are judged first."""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import DraftModelSpeculation, EngineConfig
from serve import watch
from serve.process import EngineProcess
from tests.fakes.fake_costs import costs
from tests.fakes.launching import LIMITS, fake_launch

PLAIN = EngineConfig(engine="sglang", model="m", max_running_requests=64)
EAGLE3 = PLAIN.model_copy(
    update={
        "speculation": DraftModelSpeculation(
            algorithm="EAGLE3", draft_model="d", num_steps=3, eagle_topk=1, num_draft_tokens=4
        )
    }
)


class Server:
    """A running fake and its stamps."""

    def __init__(self, engine: EngineProcess, stamps: Path) -> None:
        self.url, self._stamps = engine.launch.base_url, stamps

    def post(self, path: str, **body: Any) -> Any:
        return json.loads(watch.request(self.url, path, body, 30))

    def stream(self, path: str, **body: Any) -> list[Any]:
        text = watch.request(self.url, path, body | {"stream": True}, 30).decode()
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    def stamps(self) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self._stamps.read_text().splitlines()]
        return [row for row in rows if row["rid"].startswith("r")]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    running: list[EngineProcess] = []

    def start(config: EngineConfig = PLAIN, **knobs: Any) -> Server:
        stamps = tmp_path / "stamps.jsonl"
        launch = fake_launch({"stamps": str(stamps), "start_ms": 20} | knobs, tmp_path / "engine.log", config)
        engine = EngineProcess(launch, LIMITS, engine="sglang")
        running.append(engine)
        engine.start()
        engine.wait_ready()
        return Server(engine, stamps)

    yield start
    for engine in running:
        assert engine.stop().proven


def generate(server: Server, prompt: str, tokens: int, **more: Any) -> Any:
    params = {"max_new_tokens": tokens, "ignore_eos": True}
    return server.post("/generate", text=prompt, sampling_params=params, **more)


def test_writes_keep_their_deadlines_with_many_streams(serve: Any) -> None:
    server = serve(ttft_ms=200, step_ms=20, tokens_per_step=2.5)
    streams = [
        threading.Thread(
            target=server.stream, args=("/v1/completions",),
            kwargs={"prompt": f"p {i}", "max_tokens": 60, "ignore_eos": True, "rid": f"r{i}"},
        )
        for i in range(32)
    ]  # fmt: skip
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.join(20)
    rows = server.stamps()
    late = [1e3 * (t - row["received"]) - 200 - 20 * i for row in rows for i, (t, _) in enumerate(row["writes"])]
    assert len(rows) == 32 and all(sum(n for _, n in row["writes"]) == 60 for row in rows)
    assert min(late) >= 0
    assert statistics.median(late) < 5  # 0.6 ms on a quiet machine; the stamps, not the knobs, are the truth


def test_the_batch_limit_makes_requests_wait(serve: Any) -> None:
    server = serve(PLAIN.model_copy(update={"max_running_requests": 1}), ttft_ms=50, step_ms=10)
    threads = [threading.Thread(target=generate, args=(server, f"p{i}", 10), kwargs={"rid": f"r{i}"}) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    rows = sorted(server.stamps(), key=lambda row: row["admitted"])
    assert all(b["admitted"] >= a["finished"] - 0.01 for a, b in pairwise(rows))


def test_text_depends_on_the_prompt_alone(serve: Any) -> None:
    plain = generate(serve(), "a prompt", 20)["text"]
    assert generate(serve(EAGLE3), "a prompt", 20)["text"] == plain
    assert generate(serve(), "another prompt", 20)["text"] != plain
    wrong = serve(EAGLE3, wrong_from=5, wrong_with_speculation=True)
    assert generate(wrong, "a prompt", 20)["text"].split()[:5] == plain.split()[:5]
    assert generate(wrong, "a prompt", 20)["text"] != plain


def test_spec_counters_agree_with_the_tokens(serve: Any) -> None:
    server = serve(EAGLE3, step_ms=1, accept_length=2.5)
    meta = generate(server, "a prompt", 101)["meta_info"]
    assert meta["completion_tokens"] == 101 and meta["spec_verify_ct"] == 40
    assert meta["spec_accept_length"] == pytest.approx(101 / 40)
    assert meta["spec_num_proposed_drafts"] == 120 and meta["spec_num_correct_drafts"] == 60
    info = json.loads(watch.request(server.url, "/server_info", None, 5))
    assert info["internal_states"][0]["avg_spec_accept_length"] == pytest.approx(2.5, abs=0.1)
    assert b"spec_verify_calls_total" in watch.request(server.url, "/metrics", None, 5)


def test_openai_streams_carry_usage_and_spec_details(serve: Any) -> None:
    server = serve(EAGLE3, step_ms=1, accept_length=2.0)
    events = server.stream(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=21,
        ignore_eos=True,
        stream_options={"include_usage": True},
        return_spec_tokens_details=True,
        logprobs=True,
        top_logprobs=2,
    )
    said = "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"])
    assert len(said.split()) == 21
    assert events[-1]["usage"]["completion_tokens"] == 21 and events[-1]["choices"] == []
    assert events[-2]["sglext"]["spec_tokens_details"]["spec_verify_ct"] == 10
    top = events[0]["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert len(top) == 2 and top[0]["logprob"] > top[1]["logprob"]


def test_flush_is_refused_while_requests_run_and_cached_tokens_are_counted(serve: Any) -> None:
    server = serve(ttft_ms=300)
    first = generate(server, "one two three", 2)
    assert first["meta_info"]["cached_tokens"] == 0
    assert generate(server, "one two three", 2)["meta_info"]["cached_tokens"] == 2
    thread = threading.Thread(target=generate, args=(server, "x", 2))
    thread.start()
    with pytest.raises(watch.NoAnswerError, match="HTTP 400"):
        for _ in range(20):
            watch.request(server.url, "/flush_cache", {}, 5)
    thread.join(10)
    watch.request(server.url, "/flush_cache", {}, 5)
    assert generate(server, "one two three", 2)["meta_info"]["cached_tokens"] == 0


def test_the_cost_model_has_an_optimum_that_is_neither_end() -> None:
    def tokens_per_ms(**more: str) -> float:
        flags = {"tp-size": "8", "disable-custom-all-reduce": "true"} | {
            k.replace("_", "-"): v for k, v in more.items()
        }
        found = costs(flags, {"NCCL_ALGO": "allreduce:tree"})
        return (found.accept_length or 1.0) / found.step_ms

    def eagle3(drafts: int) -> float:
        steps, count = str(drafts - 1), str(drafts)
        return tokens_per_ms(
            speculative_algorithm="EAGLE3", speculative_num_steps=steps, speculative_num_draft_tokens=count
        )

    rates = {drafts: eagle3(drafts) for drafts in (2, 4, 8, 16)}
    assert max(rates, key=lambda drafts: rates[drafts]) in (4, 8)
    assert max(rates.values()) > tokens_per_ms()
