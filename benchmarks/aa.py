"""Is a winner ever made up? A/A studies: configurations that are all the same, and then one that is 5 % faster.

    python -m benchmarks.aa [--studies 100] [--launch-sd 0.01] [--out benchmarks/results/aa.json]

Each study is a real one but for its clock: the proposer launches twelve configurations, ablates and confirms; every
launch is a closed loop of requests in virtual time, whose traces go through the metrics, and the records through
the selection. The noise: an offset per launch (common to all its requests), one per request, and a slow drift.
"""

from __future__ import annotations

import heapq
import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from benchmarks.surfaces import RESULTS
from pipeline.config import EngineConfig
from pipeline.metrics import Window, level_result, objective
from pipeline.proposer import Proposal, Proposer
from pipeline.records import LoadLevel, Measurement, RequestTrace, TrialRecord
from pipeline.selection import select
from pipeline.spec import Budget, ObjectiveSpec, SearchSpec

NAMES = tuple(f"same-{n:02d}" for n in range(1, 12))  # with the baseline, twelve
SPEC = ObjectiveSpec()
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class World:
    """What is assumed of the machine and the load."""

    launch_sd: float = 0.01
    request_sd: float = 0.05
    drift: float = 0.0005  # share of speed lost with every launch
    gain: float = 0.0  # of the one configuration that is faster
    streams: int = 8
    requests: int = 32
    repeats: int = 3
    tokens: int = 64
    ttft_s: float = 0.05
    step_s: float = 0.008


class TwelveSpace:
    """A baseline and eleven more names for it."""

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {"attention_backend": trial.suggest_categorical("attention_backend", list(NAMES))}

    def config(self, params: dict[str, Any]) -> EngineConfig:
        return EngineConfig(engine="sglang", model="virtual", attention_backend=params.get("attention_backend"))

    def baseline(self) -> EngineConfig:
        return self.config({})

    def seeds(self) -> Sequence[dict[str, Any]]:
        return ()

    def grid(self) -> Iterator[dict[str, Any]]:
        yield from ({"attention_backend": name} for name in NAMES)


def window(world: World, speed: float, rng: random.Random) -> Window:
    """One repeat: each stream sends its next request when the last is answered. Times are virtual seconds."""
    free = [index * 1e-3 for index in range(world.streams)]
    heapq.heapify(free)
    traces = []
    for index in range(world.requests):
        start = heapq.heappop(free)
        pace = max(0.1, 1 + world.request_sd * rng.gauss(0, 1)) / speed
        first = start + world.ttft_s * pace
        chunks = tuple(first + at * world.step_s * pace for at in range(0, world.tokens, 9))
        last = first + (world.tokens - 1) * world.step_s * pace
        heapq.heappush(free, last)
        traces.append(
            RequestTrace(
                index=index, prompt_id=f"p{index}", workload="virtual", started=start, chunk_times=(*chunks, last),
                finished=last, output_tokens=world.tokens, prompt_tokens=32,
            )
        )  # fmt: skip
    return Window(traces=tuple(traces))


def launch(world: World, proposal: Proposal, fast: str | None, rng: random.Random) -> TrialRecord:
    """One launch's record, its figures by the real metrics."""
    speed = (1 + world.launch_sd * rng.gauss(0, 1)) * (1 - world.drift) ** proposal.number
    if fast is not None and proposal.config.attention_backend == fast:
        speed *= 1 + world.gain
    level = LoadLevel(workload="virtual", concurrency=world.streams)
    result = level_result(level, [window(world, speed, rng) for _ in range(world.repeats)])
    return TrialRecord(
        study="aa", number=proposal.number, role=proposal.role, status="ok", config=proposal.config,
        config_id=proposal.config_id, params=proposal.params, phases_s={"measure": result.window_s},
        measurement=Measurement(levels=(result,), objective=objective((result,), SPEC.goals[0])), **proposal.facts,
    )  # fmt: skip


def study(world: World, rounds: int, seed: int) -> dict[str, Any]:
    """One study to its end: who won, and at what cost."""
    rng = random.Random(seed)
    fast = rng.choice(NAMES) if world.gain else None
    search = SearchSpec(sampler="grid", seed=seed, budget=Budget(trials=len(NAMES)), confirm_rounds=rounds)
    proposer = Proposer(TwelveSpace(), search, SPEC, check=lambda config: (), canonical=lambda config: config)
    ledger: list[TrialRecord] = []
    while isinstance(proposal := proposer.propose(), Proposal):
        ledger.extend(proposer.drain())
        ledger.append(launch(world, proposal, fast, rng))
        proposer.observe(ledger[-1])
    found = select(ledger, SPEC)
    winner = found.winner
    claimed = winner is not None and not winner.is_baseline and found.confirmed
    right = claimed and winner is not None and fast is not None and winner.words == f"none attn={fast}"
    return {"claimed": claimed, "right": right, "launches": sum(r.status == "ok" for r in ledger)}


def run(world: World, rounds: int, studies: int, pool: ProcessPoolExecutor, first_seed: int) -> dict[str, Any]:
    """Many studies of one world."""
    jobs = [pool.submit(study, world, rounds, first_seed + index) for index in range(studies)]
    found = [job.result() for job in jobs]
    return {
        "studies": studies,
        "claimed": sum(f["claimed"] for f in found),
        "right": sum(f["right"] for f in found),
        "mean_launches": round(sum(f["launches"] for f in found) / studies, 1),
    }


@app.command()
def main(
    studies: int = 100,
    launch_sd: float = 0.01,
    request_sd: float = 0.05,
    drift: float = 0.0005,
    gain: float = 0.05,
    rounds: list[int] = typer.Option([2, 3, 4]),  # noqa: B008 - typer's way
    first_seed: int = 0,
    workers: int = 2,
    out: Path = RESULTS / "aa.json",
) -> None:
    """False winners among identical configurations, and how often one true gain is found."""
    began = time.monotonic()
    same = World(launch_sd=launch_sd, request_sd=request_sd, drift=drift)
    faster = World(launch_sd=launch_sd, request_sd=request_sd, drift=drift, gain=gain)
    by_rounds: dict[str, Any] = {}
    with ProcessPoolExecutor(workers) as pool:
        for count in rounds:
            nothing, something = (run(world, count, studies, pool, first_seed) for world in (same, faster))
            by_rounds[str(count)] = {
                "false_winners": nothing["claimed"],
                "true_gain_found": something["right"],
                "wrong_one_claimed": something["claimed"] - something["right"],
                "studies": studies,
                "mean_launches": [nothing["mean_launches"], something["mean_launches"]],
            }
            print(count, by_rounds[str(count)], flush=True)
    default = by_rounds.get(str(SearchSpec().confirm_rounds))
    report = {
        "what": "studies of 12 identical configurations; then the same with one that is faster",
        "world": asdict(faster), "default_confirm_rounds": SearchSpec().confirm_rounds, "by_rounds": by_rounds,
        "aims": {"false_winners_at_most": 0.05 * studies, "true_gain_found_at_least": 0.9 * studies},
        "aims_hold_at_default": default is not None
        and default["false_winners"] <= 0.05 * studies
        and default["true_gain_found"] >= 0.9 * studies,
        "seconds": round(time.monotonic() - began),
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    app()
