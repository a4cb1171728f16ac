"""A trial's record in MLflow's words: metrics, parameters, tags; pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from pipeline.mlflow_view import summary_params
from pipeline.records import Distribution, LevelResult, TrialRecord
from pipeline.reporting.command import pasteable

STUDY_TAG = "fastverify.study"


def key(name: str) -> str:
    """A name that MLflow accepts: letters, digits, `_ - . /` and space."""
    return re.sub(r"[^\w./ -]", "_", name)


def trial_metrics(record: TrialRecord) -> Iterator[tuple[str, float, int]]:
    """(key, value, step) of every finite figure; the step is the level's concurrency."""
    # The first metric is the one that MLflow's compare page plots.
    if record.measurement is not None and record.measurement.objective is not None:
        yield "objective", record.measurement.objective.value, 0
        if record.measurement.objective.std is not None:
            yield "objective_std", record.measurement.objective.std, 0
    for name, seconds in record.phases_s.items():
        yield f"phase/{name}_s", seconds, 0
    for level in record.measurement.levels if record.measurement is not None else ():
        step = level.level.concurrency or 0
        for name, value in _level_figures(level).items():
            if value is not None and math.isfinite(value):
                yield key(f"{level.level.workload}/{name}"), float(value), step


def _level_figures(level: LevelResult) -> dict[str, float | None]:
    """A level's figures under the names that all reports use."""
    figures: dict[str, float | None] = {
        "output_tok_per_s": level.output_tok_per_s.value,
        "output_tok_per_s_std": level.output_tok_per_s.std,
        "requests_per_s": level.requests_per_s.value if level.requests_per_s else None,
        "accept_length": level.accept_length,
        "accept_rate": level.accept_rate,
        "verify_steps": level.verify_steps,
        "requests_ok": level.requests_ok,
        "requests_failed": level.requests_failed,
        "requests_cut_off": level.requests_cut_off,
        "client_cpu": level.client_cpu,
    }
    for name in ("ttft_ms", "tpot_ms", "e2e_latency_ms"):
        figures |= _statistics(name, getattr(level, name))
    return figures


def _statistics(name: str, values: Distribution | None) -> dict[str, float | None]:
    if values is None:
        return {}
    return {f"{statistic}_{name}": getattr(values, statistic) for statistic in ("mean", "p50", "p95", "p99")}


def trial_params(record: TrialRecord) -> dict[str, str]:
    """The sampler's point and what every trial has, flat, as text."""
    common = {
        "model": record.config.model,
        "tensor_parallel_size": record.config.tensor_parallel_size,
        "max_running_requests": record.config.max_running_requests,
        "algorithm": record.config.speculation.algorithm,
    }
    every = {**common, **summary_params(record.config, record.resolved), **record.params}
    return {key(name): str(value) for name, value in every.items()}


def trial_tags(record: TrialRecord, study: str) -> dict[str, str]:
    """What a person filters by: role, status, failure class, engine, machine, lossless."""
    tags: dict[str, Any] = {
        STUDY_TAG: study,
        "config_id": record.config_id,  # no parameter: the compare page would plot it before those that say something
        "role": record.role,
        "status": record.status,
        "engine": record.config.engine,
        "engine_version": record.engine_version,
        "failure_class": record.failure.failure_class if record.failure else None,
        "reason": record.reason,
        "reused_from": record.reused_from,
        "lossless": record.lossless.passed if record.lossless else None,
        "sanity": ", ".join(rule.rule for rule in record.broken) or "ok",
        "degraded": ", ".join(record.degraded) or None,
        "asked_not_got": ", ".join(record.asked_not_got) or None,
        "host": record.topology.hostname,
        "gpu": record.topology.gpu_model,
        "gpu_count": record.topology.gpu_count,
        "git_commit": record.git_commit,
        "mlflow.note.content": note(record),
        **{f"version.{name}": version for name, version in record.versions.items()},
    }
    return {name: str(value)[:5000] for name, value in tags.items() if value is not None}


def note(record: TrialRecord) -> str:
    """What a person sees first on the run's page: what happened and how to launch it again."""
    lines = [f"**{record.role}** `{record.config.words()}`: {record.status}"]
    if record.reason:
        lines.append(f"\n{record.reason}")
    if record.launch is not None:
        lines.append(f"\n```\n{pasteable(record.launch)}\n```")
    return "\n".join(lines)
