"""Names of configurations, without the settings that all of them share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.records import TrialRecord
from pipeline.reporting.facts import named
from pipeline.reporting.model import Report


def shortened(report: Report, records: Sequence[TrialRecord]) -> Report:
    """`report` with settings that all configurations of the study share said once, and not in every name."""
    words = {record.config_id: record.config.words() for record in records}
    shared = set.intersection(*(_settings(text) for text in words.values())) if len(words) > 1 else set()
    if not shared:
        return report
    short: dict[str, str] = {}
    for text in words.values():
        left = " ".join(word for word in text.split() if word not in shared)
        short |= {text: named(left), named(text): named(left)}
    by_length = sorted(short.items(), key=lambda pair: -len(pair[0]))
    told = Report.model_validate(_replaced(report.model_dump(), by_length))
    common = " ".join(word for word in next(iter(words.values())).split() if word in shared)
    return told.model_copy(update={"facts": (*told.facts, ("in all configurations", common))})


def _settings(words: str) -> set[str]:
    return {word for word in words.split() if "=" in word}


def _replaced(value: Any, names: list[tuple[str, str]]) -> Any:
    """`value` with names replaced in all its texts, the longest first."""
    if isinstance(value, dict):
        return {key: _replaced(inside, names) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_replaced(inside, names) for inside in value)
    if isinstance(value, str):
        for full, short in names:
            value = value.replace(full, short)
    return value
