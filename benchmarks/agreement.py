"""This ruler against load tools that others trust: one server, the same prompts and load, in turns.

    python -m benchmarks.agreement [--servers fake embedded] [--tools bench_serving guidellm] [--rounds 3]
    python -m benchmarks.agreement --url http://127.0.0.1:30000 --tokenizer FOLDER   # a running server

Definitions, and how the others' figures are converted to ours:

- output throughput: usage tokens ÷ time. Ours and guidellm's end at the last byte, bench_serving's clock
  also holds its own set-up and wind-down; its figure is used as it prints it.
- TTFT: send to first content, in all three. guidellm starts its clock after taking the request off its
  own queue, as we do.
- TPOT: ours is (last − first content) ÷ (tokens − 1). bench_serving's is (latency − TTFT) ÷ (tokens − 1)
  with a latency that ends at the stream's last event (usage, `[DONE]`): the same but for that tail.
  guidellm's "TPOT" contains TTFT, (latency ÷ tokens); its ITL is our TPOT, and is what is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import foreign
from pipeline.errors import MeasurementError
from pipeline.load import Sending, run_level, served_model
from pipeline.metrics import level_result
from pipeline.models import resolve
from pipeline.records import LoadLevel
from pipeline.spec import WorkloadSpec
from pipeline.workload import PlannedRequest, load_prompts, plan
from tests.fakes.running import fake_server, free_port

VERDICTS = {True: "held", False: "NOT HELD", None: "tells nothing: the server wavers too much"}
Figures = dict[str, float]
NAMES = ("output_tok_per_s", "mean_ttft_ms", "mean_tpot_ms")
WITHIN = 0.02  # on the fake; elsewhere the paired spread decides
TELLS = 0.2  # a server that wavers by more between two of our own looks tells nothing about a tool


@dataclass(frozen=True)
class Case:
    """One server and the load put on it."""

    name: str
    url: str
    model: str
    tokenizer: str
    concurrency: int
    requests: int
    output_tokens: int


def ours(case: Case, requests: Sequence[PlannedRequest]) -> Figures:
    """This project's figures."""
    window = asyncio.run(run_level(Sending(case.url, case.model), requests, concurrency=case.concurrency))
    level = level_result(LoadLevel(workload="open", concurrency=case.concurrency), [window])
    if level.requests_failed or not level.ttft_ms or not level.tpot_ms:
        raise MeasurementError(f"{case.name}: {level.errors}")
    return _figures(level.output_tok_per_s.value, level.ttft_ms.mean, level.tpot_ms.mean)


def bench_serving(case: Case, requests: Sequence[PlannedRequest]) -> Figures:
    """sglang.bench_serving's figures."""
    result = ask_bench_serving(case, requests)
    if result["completed"] != len(requests):
        raise MeasurementError(f"bench_serving completed {result['completed']} of {len(requests)}")
    return _figures(result["output_throughput"], result["mean_ttft_ms"], result["mean_tpot_ms"])


def ask_bench_serving(case: Case, requests: Sequence[PlannedRequest]) -> dict[str, Any]:
    """Run sglang.bench_serving; what its own output file says."""
    with tempfile.TemporaryDirectory() as folder:
        prompts, out = Path(folder) / "prompts.json", Path(folder) / "out.jsonl"
        prompts.write_text(json.dumps([_sharegpt(i, text) for i, text in enumerate(_texts(requests))]))
        _run(
            [foreign.bench_serving(), "-m", "sglang.bench_serving"],
            backend="sglang-oai-chat",
            base_url=case.url,
            model=case.model,
            tokenizer=case.tokenizer,
            dataset_name="sharegpt",
            dataset_path=prompts,
            sharegpt_output_len=case.output_tokens,
            num_prompts=len(requests),
            max_concurrency=case.concurrency,
            warmup_requests=0,
            output_file=out,
        )
        found: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return found


def guidellm(case: Case, requests: Sequence[PlannedRequest]) -> Figures:
    """guidellm's figures; its ITL is our TPOT."""
    found = ask_guidellm(case, requests)
    if found["request_totals"]["successful"] != len(requests):
        raise MeasurementError(f"guidellm: {found['request_totals']}")
    mean: Callable[[str], float] = lambda name: found[name]["successful"]["mean"]  # noqa: E731
    return _figures(mean("output_tokens_per_second"), mean("time_to_first_token_ms"), mean("inter_token_latency_ms"))


def ask_guidellm(case: Case, requests: Sequence[PlannedRequest]) -> dict[str, Any]:
    """Run guidellm; the metrics in its own output file."""
    with tempfile.TemporaryDirectory() as folder:
        prompts, out = Path(folder) / "prompts.jsonl", Path(folder) / "out.json"
        rows = [{"prompt": text, "output_tokens_count": case.output_tokens} for text in _texts(requests)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        profile = f"kind=concurrent,streams={case.concurrency}" if case.concurrency > 1 else "kind=synchronous"
        _run(
            [foreign.guidellm().with_name("guidellm"), "run", "--disable-console-interactive"],
            backend=f"kind=openai_http,target={case.url},model={case.model}",
            profile=profile,
            constraint=f"kind=max_requests,count={len(requests)}",
            tokenizer=f"kind=hf_auto,model={case.tokenizer}",
            data=f"kind=json_file,path={prompts}",
            output=f"kind=json,path={out}",
        )
        (benchmark,) = json.loads(out.read_text())["benchmarks"]
    found: dict[str, Any] = benchmark["metrics"]
    return found


TOOLS = {"bench_serving": bench_serving, "guidellm": guidellm}


def _figures(*values: float | None) -> Figures:
    if any(value is None for value in values):
        raise MeasurementError(f"a figure is missing: {values}")
    return dict(zip(NAMES, (float(value or 0) for value in values), strict=True))


def _texts(requests: Sequence[PlannedRequest]) -> list[str]:
    return [request.messages[-1]["content"] for request in requests]


def _sharegpt(index: int, text: str) -> dict[str, Any]:
    answer = "An answer that is long enough for the row to be kept."
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": answer}]
    return {"id": str(index), "conversations": turns}


def _run(command: Sequence[object], **options: object) -> None:
    words = [str(word) for word in command]
    words += [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=env)
    if done.returncode:
        raise MeasurementError(f"{words[:4]} ended with {done.returncode}: {done.stderr[-800:]}")


def compare(case: Case, tools: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Rounds of ours, tool, ours: each tool's figure ÷ the mean of ours around it.

    The limit is the largest change between two of our own measurements around a tool's: what the server
    does between two looks at it cannot be told from a difference between the tools.
    """
    seen: dict[str, list[tuple[Figures, Figures, Figures]]] = {tool: [] for tool in tools}
    _measure(ours, case, "warm up")
    for number in range(rounds):
        for tool in tools:
            before = _measure(ours, case, f"{number} {tool} before")
            theirs = _measure(TOOLS[tool], case, f"{number} {tool}")
            seen[tool].append((before, theirs, _measure(ours, case, f"{number} {tool} after")))
    every = [turn for turns in seen.values() for turn in turns]
    spreads = {name: max(abs(before[name] / after[name] - 1) for before, _, after in every) for name in NAMES}
    return [_row(case, tool, name, seen[tool], spreads[name]) for tool in tools for name in NAMES]


def _measure(how: Callable[[Case, Sequence[PlannedRequest]], Figures], case: Case, turn: str) -> Figures:
    """The same prompts for everyone; only the tag in front differs by turn, so that no cache helps."""
    level = LoadLevel(workload="open", concurrency=case.concurrency)
    workload = WorkloadSpec(output_tokens=case.output_tokens)
    planned = plan(level, workload, load_prompts("open"), 0, "agreement", count=case.requests)
    retagged = [_retagged(request, turn) for request in planned]
    print(f"{case.name}: {turn}", file=sys.stderr)
    return how(case, retagged)


def _retagged(request: PlannedRequest, turn: str) -> PlannedRequest:
    text = request.messages[-1]["content"]
    return replace(request, messages=({"role": "user", "content": f"({turn}) {text}"},))


def _row(
    case: Case, tool: str, name: str, rounds: Sequence[tuple[Figures, Figures, Figures]], spread: float
) -> dict[str, Any]:
    means = [(before[name] + after[name]) / 2 for before, _, after in rounds]
    ratios = [theirs[name] / mean for (_, theirs, _), mean in zip(rounds, means, strict=True)]
    off = statistics.median(ratios) - 1
    limit = WITHIN if case.name == "fake" else max(WITHIN, spread)
    return {
        "server": case.name,
        "tool": tool,
        "figure": name,
        "ours": statistics.median(means),
        "theirs": statistics.median(theirs[name] for _, theirs, _ in rounds),
        "difference": off,
        "own_paired_spread": spread,
        "limit": limit,
        "held": abs(off) <= limit if limit <= TELLS else None,
        "ratios": ratios,
        "machine_load": os.getloadavg()[0],
    }


def _cases(names: Sequence[str], url: str | None, tokenizer: str | None, load: Sequence[int]) -> Iterator[Case]:
    folder = tokenizer or str(resolve("smollm2-135m"))
    if url:
        model = asyncio.run(served_model(url)) or "model"
        yield Case("running", url, model, folder, *load)
        return
    if "fake" in names:
        with fake_server(["--max-running-requests", "8"], ttft_ms=250, step_ms=20) as fake:
            yield Case("fake", fake, "fake-model", folder, concurrency=8, requests=48, output_tokens=64)
    if "embedded" in names:
        with _embedded(folder) as embedded:
            yield Case("embedded", embedded, "smollm2-135m", folder, concurrency=1, requests=4, output_tokens=32)


@contextmanager
def _embedded(folder: str) -> Iterator[str]:
    port = free_port()
    argv = [sys.executable, "-m", "serve.embedded.server", "--model", folder, "--served-model-name", "smollm2-135m"]
    process = subprocess.Popen([*argv, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > end:
                raise MeasurementError("the embedded engine did not start")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows; those of servers and tools that were not looked at this time stay."""
    seen = {(row["server"], row["tool"]) for row in rows}
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    every = [row for row in before if (row["server"], row["tool"]) not in seen] + list(rows)
    path.write_text(json.dumps({"rows": every, "held": all(row["held"] for row in every)}, indent=2) + "\n")


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", nargs="*", default=["fake", "embedded"], choices=["fake", "embedded"])
    parser.add_argument("--tools", nargs="*", default=["bench_serving"], choices=list(TOOLS))
    parser.add_argument("--url", help="a running server instead")
    parser.add_argument("--tokenizer", help="its tokenizer's folder")
    shape = ("STREAMS", "REQUESTS", "TOKENS")
    parser.add_argument("--load", type=int, nargs=3, metavar=shape, default=[8, 64, 128], help="on the running server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "agreement.json")
    options = parser.parse_args()
    rows = [
        row
        for case in _cases(options.servers, options.url, options.tokenizer, options.load)
        for row in compare(case, options.tools, options.rounds)
    ]
    _write(options.out, rows)
    for row in rows:
        figures = f"ours {row['ours']:9.3f}  theirs {row['theirs']:9.3f}  {row['difference']:+.2%}"
        verdict = f"(limit {row['limit']:.2%}) {VERDICTS[row['held']]}"
        print(f"{row['server']:9} {row['tool']:14} {row['figure']:17} {figures} {verdict}")


if __name__ == "__main__":
    main()
