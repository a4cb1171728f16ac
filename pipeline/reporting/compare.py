"""Two studies side by side: the same configuration in both, and what changed."""

from __future__ import annotations

from pipeline.reporting.model import Comparison, Report, Row


def compare(report: Report, other: Report) -> Report:
    """`report` with a comparison against `other`: configurations in both first, by the change."""
    here = {row.config_id: row for row in report.ranking}
    there = {row.config_id: row for row in other.ranking}
    noise = max((v for v in (report.verdict.noise_floor, other.verdict.noise_floor) if v is not None), default=None)
    more_is_better = report.metric.endswith("_per_s")
    rows = [_compared(here.get(cid), there.get(cid), noise, more_is_better) for cid in dict.fromkeys((*here, *there))]
    rows.sort(key=lambda row: (row.change is None, -(row.change or 0.0)))
    return report.model_copy(update={"compared_with": other.title, "comparison": tuple(rows)})


def _compared(here: Row | None, there: Row | None, noise: float | None, more_is_better: bool) -> Comparison:
    name = next(row.name for row in (here, there) if row is not None)
    ours, theirs = here.value if here else None, there.value if there else None
    change = ours.value / theirs.value - 1 if ours and theirs and theirs.value else None
    verdict = _words(here, there, change if change is None or more_is_better else -change, noise)
    return Comparison(name=name, here=ours, there=theirs, change=change, verdict=verdict)


def _words(here: Row | None, there: Row | None, gained: float | None, noise: float | None) -> str:
    if here is None or there is None:
        return "only in the other study" if here is None else "only in this study"
    if gained is None:
        return "no figure in one of them"
    if noise is not None and abs(gained) <= 2 * noise:  # the floor is one sigma of two launches
        return "within noise"
    return "better here" if gained > 0 else "worse here"
