"""What the embedded engine costs over plain `generate()`, and what speculation buys on it.

    python benchmarks/embedded.py [--prompts 6] [--tokens 64] [--out benchmarks/results/embedded.json]

Two parts, both on SmolLM2-135M in float32, greedy, with a fixed output length:

- the whole server (HTTP, queue, text, counters; client included) against `generate()` on the same model
  object in the same process: aim >= 0.95 of its tokens a second;
- each speculation against none on the shipped extractive and open prompts: aim >= 1.5 for the best on
  the extractive ones, and below 1 on the open ones.

Runs of a pair follow each other and change places every time, since the machine's speed drifts. A ratio
is the median over pairs; its interval is a 95 % bootstrap of that median. CPU seconds are
compared as well, since other work on the machine disturbs them less. Outputs must be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the engine has it, before torch is loaded

import aiohttp
import torch
import transformers
from aiohttp import web

from pipeline.models import resolve
from serve.embedded.engine import Engine
from serve.embedded.flags import parse
from serve.embedded.records import Ask, Tally
from serve.embedded.server import Server

HERE = Path(__file__).resolve().parent
PROMPTS = HERE.parent / "pipeline" / "prompts"
MODEL, DRAFT = "smollm2-135m", "smollm2-student"
LOOKUP = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens"]
STUDENT = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", DRAFT]
SPECULATIONS = {
    "NGRAM draft=4": [*LOOKUP, "4"],
    "NGRAM draft=8": [*LOOKUP, "8"],
    "NGRAM draft=16": [*LOOKUP, "16"],
    "STANDALONE steps=2": [*STUDENT, "--speculative-num-steps", "2"],
    "STANDALONE steps=4": [*STUDENT, "--speculative-num-steps", "4"],
}
REQUEST_S = 300.0

Timed = tuple[float, float, list[int]]  # seconds, CPU seconds of this process, output tokens


def load(flags: Sequence[str] = ()) -> Engine:
    """The real model, loaded for these flags."""
    args = parse(["--model", MODEL, *flags])
    return Engine(resolve(MODEL), args, resolve(DRAFT) if args.speculative_draft_model_path else None)


def prompts(name: str, count: int, engine: Engine) -> list[tuple[int, ...]]:
    """The first prompts of a shipped set, through the chat template."""
    lines = (PROMPTS / f"{name}.jsonl").read_text().splitlines()[:count]
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": True}
    return [tuple(engine.tokenizer.apply_chat_template(chat, **options)["input_ids"]) for chat in chats]


def ask(prompt: tuple[int, ...], tokens: int) -> Ask:
    """Greedy, of a fixed length."""
    return Ask(prompt_ids=prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True)


def run_engine(engine: Engine, prompt: tuple[int, ...], tokens: int) -> tuple[Timed, Tally]:
    """One request straight to the engine."""
    steps: list[Any] = []
    began, cpu = time.perf_counter(), time.process_time()
    outcome = engine.generate(ask(prompt, tokens), steps.append, lambda: False)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return (seconds, cpu, [token.id for step in steps for token in step.tokens]), outcome.tally


def run_plain(engine: Engine, prompt: tuple[int, ...], tokens: int) -> Timed:
    """`generate()` itself, with nothing around it."""
    ids = torch.tensor([prompt])
    config = engine._generation_config(ask(prompt, tokens))
    began, cpu = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        output = engine._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return seconds, cpu, output[0, len(prompt) :].tolist()


async def run_served(session: aiohttp.ClientSession, prompt: tuple[int, ...], tokens: int) -> Timed:
    """One streamed request over HTTP, until the last byte."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    began, cpu = time.perf_counter(), time.process_time()
    last = b""
    async with session.post(
        "/generate", json={"input_ids": prompt, "sampling_params": sampling, "stream": True}
    ) as got:
        async for line in got.content:
            last = line if line.startswith(b"data: {") else last
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return seconds, cpu, json.loads(last.removeprefix(b"data: "))["output_ids"]


async def overhead(engine: Engine, asked: Sequence[tuple[int, ...]], tokens: int) -> dict[str, Any]:
    """The server against plain `generate()`, prompt by prompt."""
    server = Server(engine, parse(["--model", MODEL]), "benchmarks/embedded.py")
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    pairs: list[tuple[Timed, Timed]] = []
    async with aiohttp.ClientSession("http://{}:{}".format(*runner.addresses[0][:2]), timeout=timeout) as session:
        for index, prompt in enumerate(asked):
            plain_first = index % 2 == 0
            plain = await asyncio.to_thread(run_plain, engine, prompt, tokens) if plain_first else None
            served = await run_served(session, prompt, tokens)
            plain = plain or await asyncio.to_thread(run_plain, engine, prompt, tokens)
            if plain[2] != served[2]:
                raise SystemExit(f"prompt {index}: the server's output differs from generate()'s")
            pairs.append((plain, served))
    await server.drain()
    await runner.cleanup()
    return spread(pairs)


def gain(plain: Engine, other: Engine, asked: Sequence[tuple[int, ...]], tokens: int) -> dict[str, Any]:
    """One speculation against none, prompt by prompt."""
    pairs: list[tuple[Timed, Timed]] = []
    tallies: list[Tally] = []
    for index, prompt in enumerate(asked):
        runs: list[Callable[[], tuple[Timed, Tally]]] = [
            lambda prompt=prompt: run_engine(plain, prompt, tokens),
            lambda prompt=prompt: run_engine(other, prompt, tokens),
        ]
        order = (0, 1) if index % 2 == 0 else (1, 0)
        done = {which: runs[which]() for which in order}
        pairs.append((done[0][0], done[1][0]))
        tallies.append(done[1][1])
    steps = sum(tally.verify_steps or 0 for tally in tallies)
    length = sum(tally.completion_tokens for tally in tallies) / steps
    equal = sum(base[2] == other[2] for base, other in pairs)
    return spread(pairs) | {"accept_length": round(length, 3), "equal_outputs": equal}


def spread(pairs: Sequence[tuple[Timed, Timed]]) -> dict[str, Any]:
    """How much faster the second of each pair is: the median ratio, its bootstrap interval, the ratios.

    `cpu_ratio` is the same in CPU seconds, which other work on the machine disturbs less.
    """
    ratios = [base[0] / other[0] for base, other in pairs]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "ratio": round(statistics.median(ratios), 3),
        "low": round(medians[50], 3),
        "high": round(medians[-51], 3),
        "cpu_ratio": round(statistics.median(base[1] / other[1] for base, other in pairs), 3),
        "pairs": len(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def speculation(plain: Engine, count: int, tokens: int) -> dict[str, dict[str, Any]]:
    """Every speculation on both kinds of prompts."""
    table: dict[str, dict[str, Any]] = {"extract": {}, "open": {}}
    asked = {kind: prompts(kind, count, plain) for kind in table}
    for name, flags in SPECULATIONS.items():
        other = load(flags)
        run_engine(other, asked["open"][0], 4)
        for kind, row in table.items():
            row[name] = gain(plain, other, asked[kind], tokens)
            said = "ratio {ratio:.2f}, CPU {cpu_ratio:.2f}, accept length {accept_length}".format(**row[name])
            print(f"{kind:8}{name:20}{said}", flush=True)
    return table


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="The embedded engine's overhead and gains.")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "embedded.json")
    args = parser.parse_args()
    plain = load()
    both = [prompt for kind in ("extract", "open") for prompt in prompts(kind, args.prompts, plain)]
    run_plain(plain, both[0], 4)
    served = asyncio.run(overhead(plain, both, args.tokens))
    print(f"server / generate(): {served['ratio']} ({served['low']} to {served['high']}), CPU {served['cpu_ratio']}")
    table = speculation(plain, args.prompts, args.tokens)
    best = max(table["extract"], key=lambda name: table["extract"][name]["ratio"])
    result = {
        "model": MODEL,
        "dtype": "float32",
        "output_tokens": args.tokens,
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "load_average": os.getloadavg()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "server_over_generate": served,
        "speculation_over_none": table,
        "best_on_extract": best,
        "aims": {
            "server_over_generate_at_least_0.95": served["ratio"] >= 0.95,
            "best_on_extract_at_least_1.5": table["extract"][best]["ratio"] >= 1.5,
            "the_same_on_open_below_1": table["open"][best]["ratio"] < 1,
            "all_outputs_equal": all(
                row["equal_outputs"] == row["pairs"] for k in table.values() for row in k.values()
            ),
        },
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["aims"], indent=2))


if __name__ == "__main__":
    main()
