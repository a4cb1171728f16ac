"""Surfaces made of measured records: trials on two H200s, and the collective benchmark of the same machine.

Ten trials are too few for a space of their own. `measured-pcie` puts together what was measured apart: a step is what
the trials of its algorithm left beside their collectives, plus the collectives of its setting by the benchmark. Bare
Tree fails, as it did in both. Settings that the benchmark did not reach are filled by a log-linear model of main
effects. `first-figures` is a handful of early points, filled in by such a model too.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from benchmarks.loglinear import LogLinear
from benchmarks.surfaces import RESULTS, SPACES, Surface, modelled_surfaces
from pipeline.config import Collectives, EngineConfig
from pipeline.records import LevelResult, LoadLevel, Topology, TrialRecord
from pipeline.screening import Screening, setting_key, step_pair
from pipeline.space import load_space

TWO_H200 = Topology(gpu_count=2, gpu_model="NVIDIA H200", sm=90, link="nvlink", peer_access=True)


def load_records(file: Path) -> list[TrialRecord]:
    """Every record of a ledger."""
    return [TrialRecord.model_validate_json(line) for line in file.read_text().splitlines() if line]


def repeat_sd(records: Sequence[TrialRecord]) -> float:
    """How far repeats within one launch differ, as a share; pooled over the levels of all launches."""
    found = [r.output_tok_per_s for record in records if record.measurement for r in record.measurement.levels]
    squares = [((e.n - 1), (e.std / e.value) ** 2) for e in found if e.std is not None and e.value > 0]
    return math.sqrt(sum(n * square for n, square in squares) / sum(n for n, _ in squares))


def measured_pcie() -> Surface:
    """Without peer access: 3 algorithms x 72 collective settings."""
    records = load_records(RESULTS / "gpu2" / "gpu2-pcie.jsonl")
    screening = Screening.model_validate_json((RESULTS / "gpu2" / "collectives.json").read_text())
    space = load_space(SPACES / "measured_pcie.yaml").for_engine("sglang")
    trials = [record for record in records if record.measurement]
    started = [sum(seconds for phase, seconds in r.phases_s.items() if phase != "measure") for r in records]
    return Surface(
        "measured-pcie", space, TWO_H200, assembled(trials, screening), repeat_sd=repeat_sd(trials),
        launch_s=statistics.median(started), failed_s=started[[r.status for r in records].index("failed")],
    )  # fmt: skip


def assembled(trials: Sequence[TrialRecord], screening: Screening) -> Callable[[EngineConfig, LoadLevel], float]:
    """tok/s of any algorithm of the trials under any setting of the benchmark."""
    reached = [result for result in screening.results if result.outcome != "not measured"]
    by_key = {result.key: result for result in reached}
    collective_ms = {
        message.tokens: LogLinear((_setting(r.key), r.times[at].step_ms if r.times else None) for r in reached)
        for at, message in enumerate(screening.messages)
    }

    @cache
    def beside(algorithm: str, key: str) -> tuple[float, int, float]:
        """A step's milliseconds beside its collectives, the size of its messages, and the accept length."""
        ours = [trial for trial in trials if trial.config.speculation.algorithm == algorithm]
        seen = [next(found for found in _levels(trial) if found.level.key == key) for trial in ours]
        pairs = [step_pair(by_key[setting_key(t.config)], t.config, level) for t, level in zip(ours, seen, strict=True)]
        known = [pair for pair in pairs if pair]
        rest = statistics.fmean(trial_ms - times.step_ms for times, trial_ms in known)
        return rest, known[0][0].tokens, statistics.fmean(level.accept_length or 1.0 for level in seen)

    def speed(config: EngineConfig, level: LoadLevel) -> float:
        rest, tokens, length = beside(config.speculation.algorithm, level.key)
        alone = EngineConfig(engine="sglang", model="-", collectives=config.collectives)
        return 1e3 * (level.concurrency or 1) * length / (rest + collective_ms[tokens](alone))

    return speed


def _levels(trial: TrialRecord) -> Sequence[LevelResult]:
    assert trial.measurement is not None
    return trial.measurement.levels


def _setting(key: str) -> EngineConfig:
    """The collective setting of a benchmark's result, alone."""
    return EngineConfig(engine="sglang", model="-", collectives=Collectives(**json.loads(key)[0]))


def first_figures() -> Surface:
    """The first figures of two H200s (one run each): `spaces/first_figures.json`, SmolLM2-135M, SGLang 0.5.17."""
    space = load_space(SPACES / "first_figures.yaml").for_engine("sglang")
    rows = json.loads((SPACES / "first_figures.json").read_text())["rows"]
    points = [(space.canonical(space.config(row["params"]), topology=TWO_H200).config, row) for row in rows]
    models = {key: LogLinear((config, row.get(key)) for config, row in points) for key in ("c8", "c1")}

    def speed(config: EngineConfig, level: LoadLevel) -> float:
        return models[f"c{level.concurrency}"](config)

    return Surface("first-figures", space, TWO_H200, speed, launch_s=60)


def all_surfaces() -> list[Surface]:
    """Every surface there is: modelled machines, then those made of records."""
    return [*modelled_surfaces(), first_figures(), measured_pcie()]
