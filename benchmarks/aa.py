"""Is a winner ever made up? A/A studies: configurations that are all the same, and then one that is 5 % faster.

    python -m benchmarks.aa [--studies 100] [--launch-sd 0.01] [--ledger records.jsonl ...] [--first-seed 1000]

Each study is a real one but for its clock: the proposer launches twelve configurations, ablates and confirms; every
launch is a closed loop of requests in virtual time, whose traces go through the metrics, and the records through
the selection. The noise: an offset per launch (common to all its requests), one per repeat, one per request, and a
slow drift. Several launch noises say how noisy a machine may be before a true gain is missed.

A ledger gives the noise of a real study, estimated by the project's own selection: what repeats within a launch leave
on a launch's figure, and what relaunches differ by. Where a ledger has no relaunches, `--launch-sd` is assumed for what
a launch adds to its repeats, and the report says so.
"""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import typer

from benchmarks.measured import load_records
from benchmarks.surfaces import RESULTS
from pipeline.config import EngineConfig
from pipeline.metrics import Window, level_result, objective
from pipeline.proposer import Proposal, Proposer
from pipeline.records import LoadLevel, Measurement, RequestTrace, TrialRecord
from pipeline.selection import measure_noise, select
from pipeline.spec import Budget, ObjectiveSpec, SearchSpec

NAMES = tuple(f"same-{n:02d}" for n in range(1, 12))  # with the baseline, twelve
SPEC = ObjectiveSpec()
FALSE_AT_MOST, FOUND_AT_LEAST = 0.05, 0.9  # shares of the studies
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class World:
    """What is assumed of the machine and the load."""

    launch_sd: float = 0.01
    repeat_sd: float = 0.0  # beside what the requests bring
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
    speeds = [speed * max(0.1, 1 + world.repeat_sd * rng.gauss(0, 1)) for _ in range(world.repeats)]
    result = level_result(level, [window(world, repeat, rng) for repeat in speeds])
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
    """Studies of identical configurations, and as many with one that is faster."""
    worlds = [replace(world, gain=0.0), world]
    jobs = [[pool.submit(study, w, rounds, first_seed + index) for index in range(studies)] for w in worlds]
    nothing, something = ([job.result() for job in found] for found in jobs)
    return {
        "false_winners": sum(f["claimed"] for f in nothing),
        "true_gain_found": sum(f["right"] for f in something),
        "wrong_one_claimed": sum(f["claimed"] and not f["right"] for f in something),
        "studies": studies,
        "mean_launches": [round(sum(f["launches"] for f in found) / studies, 1) for found in (nothing, something)],
    }


def world_of(ledger: Path, assumed: World) -> tuple[World, dict[str, Any]]:
    """The noise of a study's own records on one launch's figure, and where each part of it comes from."""
    noise = measure_noise(load_records(ledger), SPEC.goals[0])
    # A difference of two launches is √2 as wide as one launch's own spread.
    repeats, launches = ((v / math.sqrt(2) if v is not None else None) for v in (noise.repeats, noise.relaunches))
    between = assumed.launch_sd if launches is None else math.sqrt(max(0.0, launches**2 - (repeats or 0.0) ** 2))
    found = replace(assumed, launch_sd=between, repeat_sd=(repeats or 0.0) * math.sqrt(assumed.repeats), request_sd=0.0)
    return found, {
        "ledger": ledger.name,
        "sd_from_repeats": repeats and round(repeats, 4),
        "sd_of_relaunches": launches and round(launches, 4),
        "launch_sd": f"{between:.4f}, "
        + ("assumed: the ledger has no relaunches" if launches is None else "from relaunches, repeats taken out"),
    }


def holds(found: dict[str, Any]) -> bool:
    """Both aims."""
    few = found["false_winners"] <= FALSE_AT_MOST * found["studies"]
    return bool(few and found["true_gain_found"] >= FOUND_AT_LEAST * found["studies"])


@app.command()
def main(
    studies: int = 100,
    launch_sd: float = 0.01,
    request_sd: float = 0.05,
    drift: float = 0.0005,
    gain: float = 0.05,
    rounds: list[int] = typer.Option([3, 2]),  # noqa: B008 - typer's way
    sds: list[float] = typer.Option([0.02, 0.015, 0.03], "--by-launch-sd"),  # noqa: B008
    ledger: list[Path] = typer.Option([RESULTS / "gpu2" / "gpu2.jsonl", RESULTS / "gpu2" / "gpu2-pcie.jsonl"]),  # noqa: B008
    first_seed: list[int] = typer.Option([0, 1000]),  # noqa: B008
    workers: int = 2,
    out: Path = RESULTS / "aa.json",
) -> None:
    """False winners among identical configurations, and how often one true gain is found; what OUT has is kept."""
    default, seed = SearchSpec().confirm_rounds, first_seed[0]
    world = World(launch_sd=launch_sd, request_sd=request_sd, drift=drift, gain=gain)
    seen = {file.stem: world_of(file, world) for file in ledger}
    plan = {f"launch sd {launch_sd}, seeds from {first}": (world, default, first) for first in first_seed}
    plan |= {f"ledger {name}": (found, default, seed) for name, (found, _) in seen.items()}
    plan |= {f"launch sd {sd}": (replace(world, launch_sd=sd), default, seed) for sd in sds}
    plan |= {f"at most {count} rounds": (world, count, seed) for count in rounds}
    settings = {"world": asdict(world), "studies": studies, "confirm_rounds": default}
    earlier = json.loads(out.read_text()) if out.exists() else {}
    results = earlier["results"] if earlier.get("settings") == settings else {}
    with ProcessPoolExecutor(workers) as pool:
        for label, (noisy, count, first) in plan.items():
            if label not in results:
                found = run(noisy, count, studies, pool, first)
                results[label] = {**found, "aims_hold": holds(found)}
                print(label, results[label], flush=True)
                write(out, settings, results, {name: source for name, (_, source) in seen.items()})


def write(out: Path, settings: dict[str, Any], results: dict[str, Any], ledgers: dict[str, Any]) -> None:
    """The report so far."""
    report = {
        "what": "studies of 12 identical configurations; then the same with one that is faster",
        "aims": {"false_winners_at_most": FALSE_AT_MOST, "true_gain_found_at_least": FOUND_AT_LEAST},
        "aims_hold_on": [label for label, found in results.items() if found["aims_hold"]],
        "aims_missed_on": [label for label, found in results.items() if not found["aims_hold"]],
        "settings": settings,
        "ledgers": ledgers,
        "results": results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    app()
