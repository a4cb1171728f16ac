"""How a study looks in MLflow's run table and charts: a saved view, as data.

MLflow opens a view by a link, `#/experiments/ID/runs?viewStateShareKey=KEY`; the view itself is JSON in the
experiment's tag `mlflow.sharedViewState.KEY`. This is what its own Share button writes (read in 3.17).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from pipeline.records import TrialRecord
from pipeline.reporting.facts import accept_length

TAG = "mlflow.sharedViewState."
# Which and why, in reading order; what a study lacks stays empty.
METRICS = ("objective", "speedup_vs_baseline", "accept_length", "break_even_accept_length")
TAGS = ("role", "status", "failure_class", "lossless")
_LEAD_PARAMS = ("algorithm",)


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
    return found


def _rates(record: TrialRecord | None) -> dict[str, float]:
    levels = record.measurement.levels if record is not None and record.measurement else ()
    return {level.level.key: level.output_tok_per_s.value for level in levels}


def view_key(study: str) -> str:
    """The key of a study's view."""
    return f"fastverify-{study}"


def view_tag(study: str, records: Iterable[TrialRecord]) -> tuple[str, str]:
    """The experiment tag (key, value) that holds a study's view: its trials, columns, and charts."""
    settings = _varying(records)
    params = [*_LEAD_PARAMS, *settings]
    columns = [_column("metrics", name) for name in METRICS]
    columns += [_column("params", name) for name in params] + [_column("tags", name) for name in TAGS]
    state = {
        "searchFilter": f"tags.`fastverify.study` = '{study}' and attributes.status = 'FINISHED'",
        "orderByKey": _column("metrics", "objective"),
        "orderByAsc": False,
        "selectedColumns": columns,
        "runsExpanded": {},
        "runsHiddenMode": "SHOW_ALL",
        "hideEmptyCharts": True,
        "compareRunCharts": _charts(params),
        "compareRunSections": [{"uuid": "why", "name": "Which and why", "display": True, "isReordered": False}],
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


def _varying(records: Iterable[TrialRecord]) -> list[str]:
    """The sampler's parameters that took more than one value."""
    seen: dict[str, set[str]] = {}
    for record in records:
        for name, value in record.params.items():
            seen.setdefault(name, set()).add(str(value))
    return [name for name, values in seen.items() if len(values) > 1]


def _charts(params: Sequence[str]) -> list[dict[str, Any]]:
    shown = {"metricSectionId": "why", "deleted": False, "isGenerated": False}
    bars = [
        {"type": "BAR", "uuid": name, "metricKey": name, "displayName": name, "runsCountToCompare": 20, **shown}
        for name in METRICS[:3]
    ]
    parallel = {
        "type": "PARALLEL",
        "uuid": "parallel",
        "selectedParams": list(params),
        "selectedMetrics": ["objective"],
        "runsCountToCompare": 100,
        **shown,
    }
    scatter = {
        "type": "SCATTER",
        "uuid": "scatter",
        "xaxis": {"key": "accept_length", "type": "METRIC"},
        "yaxis": {"key": "speedup_vs_baseline", "type": "METRIC"},
        "runsCountToCompare": 100,
        **shown,
    }
    return [parallel, scatter, *bars]
