"""What a confirmed winner costs: launches and GPU-hours ÷ the full grid, and ÷ one launch per load level.

    python -m benchmarks.cost [--seeds 10] [--trials 40] [--out benchmarks/results/cost.json]

A whole study by the real proposer: search, early stop, ablation, confirmation. The grid is every distinct
configuration that the rules let through, each launched once and never confirmed, which flatters the grid. One launch
per load level is the same study by a tool that starts the engine anew for each level.
"""

from __future__ import annotations

import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import typer

from benchmarks.search import surfaces
from benchmarks.surfaces import RESULTS, Surface
from pipeline.goals import launched
from pipeline.proposer import Proposal, Proposer
from pipeline.records import TrialRecord
from pipeline.selection import select
from pipeline.spec import Budget, SearchSpec

AIM_GRID, AIM_LEVELS = 0.1, 0.3
app = typer.Typer(add_completion=False)


def study(surface: Surface, seed: int, trials: int) -> list[TrialRecord]:
    """The ledger of a whole study."""
    search = SearchSpec(seed=seed, budget=Budget(trials=trials))
    proposer = Proposer(
        surface.space, search, surface.objective, check=surface.check, canonical=surface.canonical, study=surface.name
    )
    ledger: list[TrialRecord] = []
    while isinstance(proposal := proposer.propose(), Proposal):
        ledger.extend(proposer.drain())
        ledger.append(surface.measure(proposal, seed))
        proposer.observe(ledger[-1])
    return ledger


def one(name: str, seed: int, trials: int) -> dict[str, Any]:
    """Costs and outcome of one study."""
    surface = surfaces()[name]
    launches = [record for record in study(surface, seed, trials) if launched(record)]
    found = select(launches, surface.objective)
    config = next((r.config for r in launches if found.winner and r.config_id == found.winner.config_id), None)
    truth = surface.truth(config) if config is not None else None
    measured = [len(record.measurement.levels) if record.measurement else 0 for record in launches]
    # Started anew for each level, a failing configuration fails once.
    apart = [max(1, levels) * surface.launch_s + levels * surface.level_s for levels in measured]
    return {
        "launches": len(launches),
        "seconds": sum(sum(record.phases_s.values()) for record in launches),
        "launches_apart": sum(max(1, levels) for levels in measured),
        "seconds_apart": sum(apart),
        "share_of_best": truth / surface.best if truth else None,
        "confirmed": found.confirmed,
    }


def row(surface: Surface, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the seeds, and the ratios."""
    truths = [surface.truth(config) for config in surface.configurations.values()]
    whole = surface.launch_s + surface.level_s * len(surface.levels)
    grid_seconds = sum(surface.failed_s if value is None else whole for value in truths)
    middle = {
        key: statistics.median(f[key] for f in found) for key in found[0] if key not in ("confirmed", "share_of_best")
    }
    gpus = surface.topology.gpu_count
    return {
        "studies": len(found),
        "confirmed": sum(f["confirmed"] for f in found),
        "share_of_best": round(statistics.median(f["share_of_best"] or 0.0 for f in found), 4),
        "launches": middle["launches"],
        "gpu_hours": round(middle["seconds"] * gpus / 3600, 1),
        "grid_launches": len(truths),
        "grid_gpu_hours": round(grid_seconds * gpus / 3600, 1),
        "launches_to_grid": round(middle["launches"] / len(truths), 4),
        "gpu_hours_to_grid": round(middle["seconds"] / grid_seconds, 4),
        "launches_to_one_per_level": round(middle["launches"] / middle["launches_apart"], 3),
        "gpu_hours_to_one_per_level": round(middle["seconds"] / middle["seconds_apart"], 3),
    }


@app.command()
def main(seeds: int = 10, trials: int = 40, workers: int = 2, out: Path = RESULTS / "cost.json") -> None:
    """Whole studies on every surface."""
    began, rows = time.monotonic(), {}
    with ProcessPoolExecutor(workers) as pool:
        for name, surface in surfaces().items():
            jobs = [pool.submit(one, name, seed, trials) for seed in range(seeds)]
            rows[name] = row(surface, [job.result() for job in jobs])
            print(name, rows[name], flush=True)
    aims = {"to_grid": AIM_GRID, "to_one_per_level": AIM_LEVELS}
    missed = {
        name: {
            key: value for key, value in found.items() if any(key.endswith(k) and value > a for k, a in aims.items())
        }
        for name, found in rows.items()
    }
    report = {
        "search": SearchSpec(budget=Budget(trials=trials)).model_dump(mode="json"),
        "aims": aims,
        "aims_missed": {name: found for name, found in missed.items() if found},
        "surfaces": rows,
        "seconds": round(time.monotonic() - began),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["aims_missed"], indent=1))


if __name__ == "__main__":
    app()
