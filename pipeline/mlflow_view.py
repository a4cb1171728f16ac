"""How a study looks in MLflow's run table and charts: a saved view, as data.

MLflow opens a view by a link, `#/experiments/ID/runs?viewStateShareKey=KEY`; the view itself is JSON in the
experiment's tag `mlflow.sharedViewState.KEY`. This is what its own Share button writes (read in 3.17).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from pipeline.config import EngineConfig
from pipeline.records import TrialRecord
from pipeline.reporting.facts import accept_length
from pipeline.reporting.model import Report
from pipeline.reporting.text import verdict_lines
from pipeline.selection import Selection

TAG = "mlflow.sharedViewState."
# Which and why, in reading order; what a study lacks stays empty.
METRICS = ("objective", "speedup_vs_baseline", "accept_length", "break_even_accept_length")
TAGS = ("role", "status", "failure_class", "lossless")


def summary_metrics(record: TrialRecord, baseline: TrialRecord | None) -> dict[str, float]:
    """One figure a trial for the table: over all its load levels, beside the baseline's launch.

    `speedup_vs_baseline` is of throughput, mixed harmonically over the levels that both measured;
    `break_even_accept_length` is the accept length that would have given a speed-up of 1.
    """
    found: dict[str, float] = {}
    ours, plain = _rates(record), _rates(baseline)
    shared = ours.keys() & plain.keys()
    if shared and all(ours[key] > 0 and plain[key] > 0 for key in shared):
        found["speedup_vs_baseline"] = sum(1 / plain[key] for key in shared) / sum(1 / ours[key] for key in shared)
    length = accept_length(record.measurement.levels) if record.measurement else None
    if length is not None:
        found["accept_length"] = length
        if "speedup_vs_baseline" in found:
            found["break_even_accept_length"] = length / found["speedup_vs_baseline"]
    return {name: round(value, 3) for name, value in found.items()}  # MLflow shows every digit there is


def summary_params(config: EngineConfig, resolved: Mapping[str, Any] | None = None) -> dict[str, str]:
    """A configuration under a few names that every trial has: parallel coordinates leave out runs that lack a value.

    Draft steps and tokens are always numbers, since MLflow's parallel coordinates leave out runs whose value is of
    another kind than most: as stated, else as the server resolved them; what is unknown is left out.
    """
    steps, tokens = _drafts(config, resolved or {})
    collectives = config.collectives.model_dump(exclude_none=True)
    own = config.collectives.custom_all_reduce
    found = {
        "draft_steps": steps,
        "draft_tokens": tokens,
        "own_all_reduce": "default" if own is None else "on" if own else "off",
        "fusion": collectives.get("flashinfer_fusion", "default"),
        "nccl_algo": collectives.get("nccl_algo", "default"),
        "nccl_proto": collectives.get("nccl_proto", "default"),
        "attention": config.attention_backend or "default",
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def _drafts(config: EngineConfig, resolved: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Draft steps and draft tokens of a verify step; n-gram and block drafts are one chain of their tokens."""
    if config.speculation.algorithm == "none":
        return 0, 0
    stated = config.speculation.model_dump(exclude_none=True)
    tokens = stated.get("num_draft_tokens", stated.get("block_size", resolved.get("speculative_num_draft_tokens")))
    if "num_steps" not in type(config.speculation).model_fields:
        return tokens, tokens
    return stated.get("num_steps", resolved.get("speculative_num_steps")), tokens


def _rates(record: TrialRecord | None) -> dict[str, float]:
    levels = record.measurement.levels if record is not None and record.measurement else ()
    return {level.level.key: level.output_tok_per_s.value for level in levels}


def view_key(study: str) -> str:
    """The key of a study's view."""
    return f"fastverify-{study}"


def view_tag(study: str, records: Iterable[TrialRecord]) -> tuple[str, str]:
    """The experiment tag (key, value) that holds a study's view: its trials, columns, and charts."""
    tried = list(records)
    drawn = [record for record in tried if record.measurement is not None]
    common = _varying(
        {"algorithm": r.config.speculation.algorithm, **summary_params(r.config, r.resolved)} for r in drawn
    )
    params = dict.fromkeys((*common, *_varying(record.params for record in tried)))
    columns = [_column("metrics", name) for name in METRICS]
    columns += [_column("params", name) for name in params]
    columns += [_column("tags", name) for name in TAGS]
    state = {
        "searchFilter": f"tags.`fastverify.study` = '{study}' and tags.`fastverify.trial` != 'study'",
        "orderByKey": _column("metrics", "objective"),
        "orderByAsc": False,
        "selectedColumns": columns,
        "runsExpanded": {},
        "runsHiddenMode": "SHOW_ALL",
        "hideEmptyCharts": True,
        "isAccordionReordered": True,  # keeps this section before those that MLflow adds
        "compareRunCharts": _charts(common),
        "compareRunSections": [
            {"uuid": "which", "name": "Which and why", "display": True, "isReordered": False, "columns": 1},
            {"uuid": "why", "name": "Trial by trial", "display": True, "isReordered": False, "columns": 2},
        ],
    }
    return TAG + view_key(study), json.dumps(state)


def view_url(base_url: str, experiment_id: str, study: str, mode: str = "TABLE") -> str:
    """The link to a study's view: mode `TABLE` or `CHART`."""
    return (
        f"{base_url}/#/experiments/{experiment_id}/runs"
        f"?viewStateShareKey={quote(view_key(study))}&compareRunsMode={mode}"
    )


def compare_url(base_url: str, experiment_id: str, run_ids: Sequence[str]) -> str:
    """The link to MLflow's compare page of some runs."""
    runs, experiments = quote(json.dumps(list(run_ids))), quote(json.dumps([experiment_id]))
    return f"{base_url}/#/compare-runs?runs={runs}&experiments={experiments}"


def _column(kind: str, name: str) -> str:
    return f"{kind}.`{name}`"


def _varying(points: Iterable[Mapping[str, Any]]) -> list[str]:
    """The parameters that took more than one value."""
    seen: dict[str, set[str]] = {}
    for point in points:
        for name, value in point.items():
            seen.setdefault(name, set()).add(str(value))
    return [name for name, values in seen.items() if len(values) > 1]


def _charts(params: Sequence[str]) -> list[dict[str, Any]]:
    shown = {"deleted": False, "isGenerated": False}
    bars = [
        {
            "type": "BAR", "uuid": name, "metricKey": name, "displayName": name, "runsCountToCompare": 20,
            "metricSectionId": "why", **shown,
        }
        for name in METRICS[:3]
    ]  # fmt: skip
    parallel = {
        "type": "PARALLEL",
        "uuid": "parallel",
        "selectedParams": list(params),
        "selectedMetrics": ["speedup_vs_baseline"],
        "runsCountToCompare": 100,
        "metricSectionId": "which",
        **shown,
    }
    scatter = {
        "type": "SCATTER",
        "uuid": "scatter",
        "xaxis": {"key": "accept_length", "type": "METRIC"},
        "yaxis": {"key": "speedup_vs_baseline", "type": "METRIC"},
        "runsCountToCompare": 100,
        "metricSectionId": "why",
        **shown,
    }
    return [parallel, scatter, *bars]


def study_note(report: Report) -> str:
    """What a person sees first on the study's own page: the report's first screen, and where the rest is."""
    verdict = report.verdict
    lines = [f"### {verdict.headline}", ""]
    lines += [f"- **{name}**: {value}" for name, value in verdict_lines(verdict, report.unit)]
    lines += ["", "All of it, with plots: `report.html` under *Artifacts*."]
    if verdict.command:
        lines += ["", "```", verdict.command, "```"]
    return "\n".join(lines)


def outcome(selection: Selection, report: Report) -> dict[str, Any]:
    """What the study's own run says: numbers become metrics, the rest tags."""
    winner = selection.winner
    return {
        "mlflow.note.content": study_note(report),
        "winner": winner.words if winner else None,
        "why": selection.reason,
        "noise_floor": selection.noise_floor,
        "gain_over_baseline": winner.gain if winner else None,
    }
