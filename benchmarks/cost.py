"""What a confirmed winner costs: launches and GPU-hours ÷ the full grid, and ÷ one launch per load level.

    python -m benchmarks.cost [--seeds 10] [--trials 40] [--out benchmarks/results/cost.json]

A whole study by the real proposer: search, early stop, ablation, confirmation. The grid is every distinct
configuration that the rules let through, each launched once and never confirmed, which flatters the grid.

One launch per load level is the very same study, early stops included, by a tool that starts the engine anew for each
level that was measured: a launch of n levels costs it n starts and the same measurements, a failed one a single
failure. So no search, however clever, gets below (start + levels) ÷ (n starts + levels), which is `least_possible` for
the fastest configuration; what moves it is how long the measurements take. `unstopped` grants that tool no early stop:
it measures every launched configuration at every level.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import typer

from benchmarks.loglinear import LaunchFailsError
from benchmarks.search import surfaces
from benchmarks.surfaces import RESULTS, Surface
from pipeline.config import EngineConfig
from pipeline.goals import launched
from pipeline.proposer import Proposal, Proposer
from pipeline.records import LevelResult, TrialRecord
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
    return {
        "launches": len(launches),
        "seconds": sum(sum(record.phases_s.values()) for record in launches),
        "launches_apart": sum(max(1, len(_levels(record))) for record in launches),
        "seconds_apart": sum(max(1, len(_levels(r))) * r.phases_s["launch"] + _measuring(r) for r in launches),
        "seconds_unstopped": sum(unstopped(surface, record) for record in launches),
        "confirm_launches": sum(record.role == "confirm" for record in launches),
        "stopped_launches": sum(record.status == "stopped" for record in launches),
        "failed_launches": sum(record.status == "failed" for record in launches),
        "measuring_share": sum(map(_measuring, launches)) / sum(sum(r.phases_s.values()) for r in launches),
        "confirm_share": sum(sum(r.phases_s.values()) for r in launches if r.role == "confirm")
        / sum(sum(r.phases_s.values()) for r in launches),
        "share_of_best": truth / surface.best if truth else None,
        "confirmed": found.confirmed,
    }


def unstopped(surface: Surface, record: TrialRecord) -> float:
    """Seconds of a tool with a start per level and no early stop; levels to come take their fewest repeats."""
    done = _levels(record)
    if not done:
        return record.phases_s["launch"]
    rest = surface.levels[len(done) :]
    windows = [surface.window_s(level, surface.speed(record.config, level)) for level in rest]
    repeats = surface.space.load.min_repeats
    return len(surface.levels) * record.phases_s["launch"] + _measuring(record) + repeats * sum(windows)


def _levels(record: TrialRecord) -> Sequence[LevelResult]:
    return record.measurement.levels if record.measurement else ()


def _measuring(record: TrialRecord) -> float:
    return record.phases_s.get("measure", 0.0)


def grid_seconds(surface: Surface) -> float:
    """Seconds of the grid: each configuration launched once, each level with its fewest repeats."""
    return sum(_whole_launch(surface, config) for config in surface.configurations.values())


def _whole_launch(surface: Surface, config: EngineConfig) -> float:
    try:
        windows = [surface.window_s(level, surface.speed(config, level)) for level in surface.levels]
    except LaunchFailsError:
        return surface.failed_s
    return surface.launch_s + surface.space.load.min_repeats * sum(windows)


def row(surface: Surface, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the seeds, and the ratios."""
    middle = {
        key: statistics.median(f[key] for f in found) for key in found[0] if key not in ("confirmed", "share_of_best")
    }
    grid, launches_of_grid, hour = grid_seconds(surface), len(surface.configurations), 3600 / surface.topology.gpu_count
    fastest = max(surface.configurations.values(), key=lambda config: surface.truth(config) or 0.0)
    whole, starts = _whole_launch(surface, fastest), (len(surface.levels) - 1) * surface.launch_s
    return {
        "studies": len(found),
        "confirmed": sum(f["confirmed"] for f in found),
        "share_of_best": round(statistics.median(f["share_of_best"] or 0.0 for f in found), 4),
        "launches": middle["launches"],
        **{key: middle[f"{key}_launches"] for key in ("confirm", "stopped", "failed")},
        "gpu_hours": round(middle["seconds"] / hour, 2),
        "measuring_share": round(middle["measuring_share"], 3),
        "confirm_share": round(middle["confirm_share"], 3),
        "grid_launches": launches_of_grid,
        "grid_gpu_hours": round(grid / hour, 1),
        "launches_to_grid": round(middle["launches"] / launches_of_grid, 4),
        "gpu_hours_to_grid": round(middle["seconds"] / grid, 4),
        "launches_to_one_per_level": round(middle["launches"] / middle["launches_apart"], 3),
        "gpu_hours_to_one_per_level": round(middle["seconds"] / middle["seconds_apart"], 3),
        "least_possible": round(whole / (whole + starts), 3),
        "gpu_hours_to_unstopped": round(middle["seconds"] / middle["seconds_unstopped"], 3),
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
