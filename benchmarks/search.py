"""Does clever search buy anything? Trials until within 2 % of the known best, each sampler ÷ random.

    python -m benchmarks.search [--seeds 50] [--cap 60] [--cap-random 300] [--out benchmarks/results/search.json]

Every sampler goes through the real proposer with its rules, memo, seeds and early stop; random gets the same.
`unaided` is random without them: every draw is a launch. A study that does not get there within its cap counts as
the cap; `reached` says how many got there. Where random's median is its cap, the ratio is an upper bound.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import typer

from benchmarks.measured import all_surfaces
from benchmarks.surfaces import RESULTS, Surface
from pipeline.proposer import Proposal, Proposer
from pipeline.sampling import Sampler
from pipeline.spec import Budget, SamplerName, SearchSpec

NEAR = 0.98
AIM = 0.5
SAMPLERS: tuple[SamplerName, ...] = ("random", "surrogate", "gp", "tpe", "quasi-random")
Results = dict[str, dict[str, list[int | None]]]  # surface, sampler, a count per seed; None is not reached
app = typer.Typer(add_completion=False)


@cache
def surfaces() -> dict[str, Surface]:
    """By name; made once in each process."""
    return {surface.name: surface for surface in all_surfaces()}


def aided(surface: Surface, sampler: SamplerName, seed: int, cap: int) -> int | None:
    """Launches of seeds and search until one is within reach of the best; None if none is."""
    search = SearchSpec(sampler=sampler, seed=seed, budget=Budget(trials=cap), ablate=False, confirm_rounds=0)
    proposer = Proposer(
        surface.space, search, surface.objective, check=surface.check, canonical=surface.canonical, study=surface.name
    )
    launches = -1  # the baseline is not a trial of the search
    while isinstance(proposal := proposer.propose(), Proposal):
        proposer.drain()
        launches += 1
        if near(surface, proposal):
            return launches
        proposer.observe(surface.measure(proposal, seed))
    return None


def near(surface: Surface, proposal: Proposal) -> bool:
    """Judged by the truth, not by the noisy figure."""
    value = surface.truth(proposal.config)
    return value is not None and value >= NEAR * surface.best


def unaided(surface: Surface, seed: int, cap: int) -> int | None:
    """Random draws, each a launch: no rules, no memo, no seeds."""
    if (surface.truth(surface.canonical(surface.space.baseline())) or 0) >= NEAR * surface.best:
        return 0
    for launches, point in enumerate(Sampler(surface.space, "random", seed).sequence(), start=1):
        config = surface.space.config(point)
        value = None if surface.check(config) else surface.truth(surface.canonical(config))
        if value is not None and value >= NEAR * surface.best:
            return launches
        if launches >= cap:
            return None
    raise AssertionError("random draws do not end")


def one(name: str, sampler: str, seed: int, cap: int) -> int | None:
    """One study."""
    surface = surfaces()[name]
    return unaided(surface, seed, cap) if sampler == "unaided" else aided(surface, sampler, seed, cap)  # type: ignore[arg-type]


def summary(found: list[int | None], cap: int) -> dict[str, Any]:
    """Median and quartiles, a study that did not get there counted as the cap."""
    counts = [cap if value is None else value for value in found]
    low, middle, high = statistics.quantiles(counts, n=4, method="inclusive")
    reached = sum(value is not None for value in found)
    return {"median": middle, "quartiles": [low, high], "reached": reached, "of": len(found)}


def table(results: Results, settings: dict[str, int]) -> dict[str, Any]:
    """Per surface and sampler the summary, and the median's ratio to random's."""
    rows: dict[str, Any] = {}
    for name, by_sampler in results.items():
        rows[name] = {sampler: summary(found, cap_of(sampler, settings)) for sampler, found in by_sampler.items()}
        random = max(rows[name]["random"]["median"], 1)
        for row in rows[name].values():
            row["ratio_to_random"] = round(row["median"] / random, 3)
    return rows


def verdict(rows: dict[str, Any]) -> dict[str, Any]:
    """Which sampler the table supports, and where it misses the aim."""
    done = [sampler for sampler in SAMPLERS if all(sampler in row for row in rows.values())]
    mean = {s: statistics.geometric_mean([max(r[s]["ratio_to_random"], 0.01) for r in rows.values()]) for s in done}
    best = min(mean, key=lambda sampler: mean[sampler])
    missed = {name: row[best]["ratio_to_random"] for name, row in rows.items() if row[best]["ratio_to_random"] > AIM}
    return {
        "geometric_mean_ratio": {sampler: round(value, 3) for sampler, value in mean.items()},
        "supported_default": best,
        "default": SearchSpec().sampler,
        "aim": AIM,
        "aim_missed_on": missed,
    }


@app.command()
def main(
    seeds: int = 50,
    gp_seeds: int = 10,
    cap: int = 60,
    cap_random: int = 300,
    workers: int = 2,
    out: Path = RESULTS / "search.json",
) -> None:
    """Run every sampler on every surface; what an earlier, shorter run wrote to OUT is not run again."""
    settings = {"seeds": seeds, "gp_seeds": gp_seeds, "cap": cap, "cap_random": cap_random}
    earlier = json.loads(out.read_text()) if out.exists() else {}
    same = earlier.get("settings") == settings and earlier.get("surfaces") == all_facts()
    results: Results = earlier["counts"] if same else {name: {} for name in surfaces()}
    with ProcessPoolExecutor(workers) as pool:
        for sampler, name in itertools.product(("unaided", *SAMPLERS), results):
            if sampler in results[name]:
                continue
            studies, most = gp_seeds if sampler == "gp" else seeds, cap_of(sampler, settings)
            began = time.monotonic()
            jobs = [pool.submit(one, name, sampler, seed, most) for seed in range(studies)]
            results[name][sampler] = [job.result() for job in jobs]
            print(
                f"{name} {sampler}: {summary(results[name][sampler], most)} {time.monotonic() - began:.0f} s",
                flush=True,
            )
            write(out, results, settings)


def cap_of(sampler: str, settings: dict[str, int]) -> int:
    """Draws that do not learn are cheap to replay, so they get longer to arrive."""
    return settings["cap_random" if sampler in ("random", "unaided", "quasi-random") else "cap"]


def write(out: Path, results: Results, settings: dict[str, int]) -> None:
    """The report so far: the last samplers are slow, and a report of the others is better than none."""
    report: dict[str, Any] = {
        "what": f"launches of seeds and search until within {1 - NEAR:.0%} of the best by its true value",
        "settings": settings,
        "surfaces": all_facts(),
    }
    if all("random" in found for found in results.values()):
        rows = table(results, settings)
        report |= {**verdict(rows), "table": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**report, "counts": results}, indent=1) + "\n")


@cache
def all_facts() -> dict[str, dict[str, Any]]:
    """The facts of every surface."""
    return {name: facts(surface) for name, surface in surfaces().items()}


def facts(surface: Surface) -> dict[str, Any]:
    """How large and how noisy a surface is."""
    truths = [surface.truth(config) for config in surface.configurations.values()]
    return {
        "configurations": len(truths),
        "failing_or_lossy": sum(value is None for value in truths),
        "within_reach": sum(value is not None and value >= NEAR * surface.best for value in truths),
        "launch_sd": surface.launch_sd,
        "repeat_sd": round(surface.repeat_sd, 4),
        "levels": len(surface.levels),
    }


if __name__ == "__main__":
    app()
