"""Clients that others wrote, unchanged, through the endpoint: what each asked, and what it got.

    python -m benchmarks.clients [--clients curl openai langchain guidellm bench_serving]

The endpoint is `python -m serve` as a person starts it: on loopback, HAProxy in front of one replica, the fake engine
behind it. Every client says for itself how many requests succeeded and how many tokens came; the engine's own
counters, read through the endpoint's /metrics before and after, say it too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai

from benchmarks import foreign
from benchmarks.agreement import Case, ask_bench_serving, ask_guidellm
from pipeline.config import EngineConfig
from pipeline.models import resolve
from pipeline.records import LoadLevel
from pipeline.spec import Limits, WorkloadSpec
from pipeline.workload import PlannedRequest, load_prompts, plan
from serve.service import ChampionSpec, Service
from tests.fakes.running import SERVER, serving

TOKENS = 32
CONCURRENCY = 8
MESSAGES: Any = [{"role": "user", "content": "Name three colours."}]
TOO_LONG: Any = [{"role": "user", "content": "word " * 9000}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True)
class Got:
    """What a client reports; `refused` requests are those that should be, and are in no other count."""

    version: str
    asked: str
    requests: int
    failed: int
    tokens_asked: int
    tokens_got: int
    refused: int = 0


def curl(url: str, load: int) -> Got:
    """`curl -N`: streams that arrive as they are written, and an error body."""
    tokens = sum(_curl_stream(url) for _ in range(load))
    refused = json.loads(_curl(url, {"model": "m", "messages": TOO_LONG}))
    assert "context length" in refused["message"], refused  # the engine's own body, untouched
    first = subprocess.run(["curl", "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    asked = "chat, streamed with -N; one prompt beyond the context"
    return Got(first.split()[1], asked, load, 0, load * TOKENS, tokens, refused=1)


def _curl(url: str, body: dict[str, Any]) -> str:
    argv = ["curl", "-sN", "--max-time", "60", "-H", "content-type: application/json", "-d", json.dumps(body)]
    argv.append(f"{url}/v1/chat/completions")
    return subprocess.run(argv, capture_output=True, text=True, timeout=70, check=True).stdout


def _curl_stream(url: str) -> int:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    lines = _curl(url, {"model": "m", "messages": MESSAGES, "max_tokens": TOKENS, **usage}).split("\n\n")
    *events, done, rest = lines
    assert (done, rest) == ("data: [DONE]", ""), lines[-2:]
    return int(json.loads(events[-1].removeprefix("data: "))["usage"]["completion_tokens"])


def openai_sdk(url: str, load: int) -> Got:
    """The `openai` package: models, chat, stream, completions, logprobs, tools, and its own error class."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        model = client.models.list().data[0].id
        ask: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": TOKENS}
        chat = client.chat.completions.create
        answers = [chat(**ask), chat(**ask, logprobs=True, top_logprobs=2), chat(**ask, tools=[WEATHER])]
        answers += [client.completions.create(model=model, prompt="One, two,", max_tokens=TOKENS)]
        for _ in range(load):
            *_, last = chat(**ask, stream=True, stream_options={"include_usage": True})
            answers.append(last)
        try:
            chat(model=model, messages=TOO_LONG)
            raise AssertionError("a prompt beyond the context was taken")
        except openai.BadRequestError:
            pass
    tokens = sum(answer.usage.completion_tokens for answer in answers)
    what = "models, chat, logprobs, tools, completions, streams; one prompt beyond the context"
    return Got(version("openai"), what, len(answers), 0, len(answers) * TOKENS, tokens, refused=1)


def langchain(url: str, load: int) -> Got:
    """LangChain's ChatOpenAI: invoke, stream, batch."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="m", max_tokens=TOKENS, stream_usage=True, max_retries=0, timeout=60
    )
    answers = [chat.invoke("Name three colours."), *chat.batch(["Count."] * load)]
    whole = None
    for piece in chat.stream("Name three colours."):
        whole = piece if whole is None else whole + piece
    answers.append(whole)
    tokens = sum(answer.usage_metadata["output_tokens"] for answer in answers)
    asked = f"invoke, stream, a batch of {load}"
    return Got(version("langchain_openai"), asked, len(answers), 0, len(answers) * TOKENS, tokens)


def guidellm(url: str, load: int) -> Got:
    """guidellm: closed loop over given prompts."""
    case = _case(url, load)
    found = ask_guidellm(case, _prompts(case))
    totals, tokens = found["request_totals"], round(found["output_token_count"]["successful"]["total_sum"])
    failed = totals["errored"] + totals["incomplete"]
    asked = f"chat, streamed, {CONCURRENCY} at a time"
    release = foreign.release(foreign.guidellm(), "guidellm")
    return Got(release, asked, totals["total"], failed, case.requests * TOKENS, tokens)


def bench_serving(url: str, load: int) -> Got:
    """sglang.bench_serving: closed loop over given prompts."""
    case = _case(url, load)
    found = ask_bench_serving(case, _prompts(case))
    failed = case.requests - found["completed"]
    asked = f"chat, streamed, {CONCURRENCY} at a time"
    release = foreign.release(foreign.bench_serving(), "sglang")
    return Got(release, asked, case.requests, failed, case.requests * TOKENS, found["total_output_tokens"])


CLIENTS: dict[str, Callable[[str, int], Got]] = {
    "curl": curl,
    "openai": openai_sdk,
    "langchain": langchain,
    "guidellm": guidellm,
    "bench_serving": bench_serving,
}


def _case(url: str, load: int) -> Case:
    folder = str(resolve("smollm2-135m"))
    return Case("endpoint", url, "fake-model", folder, CONCURRENCY, load * CONCURRENCY, TOKENS)


def _prompts(case: Case) -> Sequence[PlannedRequest]:
    level = LoadLevel(workload="open", concurrency=case.concurrency)
    workload = WorkloadSpec(output_tokens=case.output_tokens)
    return plan(level, workload, load_prompts("open"), 0, "clients", count=case.requests)


def visit(name: str, url: str, load: int) -> dict[str, Any]:
    """Let one client do its work; its own account, the engine's, and whether they agree."""
    print(name, file=sys.stderr)
    before, began = _engine_counts(url), time.monotonic()
    got = CLIENTS[name](url, load)
    seconds = time.monotonic() - began
    engine = {key: value - before[key] for key, value in _engine_counts(url).items()}
    held = got.failed == 0 and got.tokens_asked == got.tokens_got and engine["tokens"] >= got.tokens_got
    return {"client": name, **asdict(got), "engine": engine, "seconds": round(seconds, 1), "held": held}


def _engine_counts(url: str) -> dict[str, int]:
    """Requests and output tokens that the engine has counted so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        text = page.read().decode()
    names = {"requests": "num_requests_total", "tokens": "generation_tokens_total"}
    found = {key: re.search(rf"^sglang:{name}\S* ([\d.]+)$", text, re.MULTILINE) for key, name in names.items()}
    return {key: int(float(match[1])) if match else 0 for key, match in found.items()}


@contextmanager
def endpoint() -> Iterator[str]:
    """A champion's file as promotion writes it, served by the command that a person types."""
    knobs = json.dumps({"children": False, "start_ms": 0, "ttft_ms": 20, "step_ms": 5})
    config = EngineConfig(
        engine="sglang", model="fake-model", max_running_requests=64, env=(("FAKE_SGLANG_KNOBS", knobs),)
    )
    stated = {
        "FASTVERIFY_TOPOLOGY": json.dumps({"gpu_count": 1, "gpu_model": "none", "sm": 90}),
        "FASTVERIFY_SGLANG_COMMAND": f"{sys.executable} {SERVER}",
    }
    with tempfile.TemporaryDirectory() as folder:
        spec = ChampionSpec(config=config, limits=Limits(start_s=60, stop_s=5, proof_s=10), folder=folder, drain_s=2)
        Service(spec=spec).write(Path(folder) / "champion.json")
        with serving(Path(folder) / "champion.json", os.environ | stated) as url:
            yield url


def main() -> None:
    """Let every client visit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="*", default=list(CLIENTS), choices=list(CLIENTS))
    parser.add_argument("--load", type=int, default=8, help="Streams of a client; rounds of a load tool")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "clients.json")
    options = parser.parse_args()
    with endpoint() as url:
        rows = [visit(name, url, options.load) for name in options.clients]
    options.out.write_text(json.dumps({"rows": rows, "held": all(row["held"] for row in rows)}, indent=2) + "\n")
    for row in rows:
        figures = f"{row['requests']:4} requests, {row['failed']} failed, {row['refused']} refused as they should be"
        tokens = f"{row['tokens_got']}/{row['tokens_asked']} tokens, engine {row['engine']['tokens']}"
        print(f"{row['client']:14} {row['version']:8} {figures}, {tokens}, {'held' if row['held'] else 'NOT HELD'}")
    sys.exit(not all(row["held"] for row in rows))


if __name__ == "__main__":
    main()
