"""A report as one HTML file that opens offline: the plotting library is inside."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from string import Template

from pipeline.records import Estimate
from pipeline.reporting.figures import figures
from pipeline.reporting.model import Report, Verdict
from pipeline.reporting.readable import spread, times
from pipeline.reporting.sections import Section, Table, sections

PAGE = Path(__file__).parent.parent / "data" / "report.html"
_CAPTIONS = {
    "throughput_latency": "Throughput against time per token: up and to the left is better. A point is a load level, "
    "a line one configuration from few streams to many.",
    "break_even": "Above the dashed line speculation pays. A ray is one cycle time: move along it with the drafter, "
    "to a steeper one with a faster step.",
    "cycle": "A verify cycle that takes longer than its accept length allows loses to plain decoding.",
    "step_time": "One decode step without the profiler, by what the GPU did in it.",
    "parallel": "Each line is a configuration, the brighter the faster. Drag along an axis to select.",
    "timeline": "Trials in time, by phase.",
}


def render(report: Report) -> str:
    """The whole page. It reads nothing from the network."""
    from plotly.offline import get_plotlyjs

    drawn = figures(report)
    facts = " · ".join(f"{escape(name)} <b>{escape(value)}</b>" for name, value in report.facts)
    return Template(PAGE.read_text(encoding="utf-8")).substitute(
        title=escape(f"{report.title}: {report.verdict.headline}"),
        facts=f"<b>{escape(report.title)}</b>{' · ' if facts else ''}{facts}",
        headline=escape(report.verdict.headline),
        answers=_answers(report.verdict, report.unit),
        sections="\n".join(_section(section, drawn) for section in sections(report)),
        footer="Made by fastverify. The same facts as data: <code>python -m pipeline.report STUDY --json</code>",
        plotly=get_plotlyjs(),
        figures=json.dumps(drawn).replace("</", "<\\/"),
    )


def _answers(verdict: Verdict, unit: str) -> str:
    interval = ""
    if verdict.speedup_low is not None and verdict.speedup_high is not None:
        interval = f"{times(verdict.speedup_low)} to {times(verdict.speedup_high)}"
    noise = f"{verdict.noise_floor:.1%}" if verdict.noise_floor is not None else None
    cards = (
        ("winner", *_measured(verdict.value if verdict.winner else None, unit)),
        ("baseline", *_measured(verdict.baseline, unit)),
        ("speed-up", times(verdict.speedup) if verdict.speedup is not None else None, interval),
        ("noise floor", noise, "smaller differences are noise"),
    )
    grid = "".join(_card(name, value, small) for name, value, small in cards if value)
    gain = " gain" if (verdict.speedup or 0.0) > 1 else ""
    lines = "".join(
        f'<p class="say"><b>{name}</b><span>{escape(text)}</span></p>'
        for name, text in (
            ("Why", " ".join(part for part in (verdict.reason, verdict.explanation) if part)),
            ("By workload", verdict.by_workload),
            ("Lossless", verdict.lossless),
        )
        if text
    )
    return f'<dl class="answers{gain}">{grid}</dl>{lines}'


def _measured(value: Estimate | None, unit: str) -> tuple[str | None, str]:
    """A card's figure, and below it the unit; a range goes there too, since a card is narrow."""
    if value is None:
        return None, unit
    figure, _, both = spread(value).partition(" (")
    return figure, f"{unit}, {both.rstrip(')')}" if both else unit


def _card(name: str, value: str, small: str) -> str:
    note = f"<small>{escape(small)}</small>" if small else ""
    return f'<div class="{name.replace(" ", "-")}"><dt>{name}</dt><dd>{escape(value)}{note}</dd></div>'


def _section(section: Section, drawn: dict[str, dict[str, object]]) -> str:
    plots = [_plot(name) for name in section.figures if name in drawn]
    if not (section.text or section.table or section.code or plots):
        return ""
    parts = [f"<h2>{escape(section.title)}</h2>", *map(_paragraph, section.text)]
    parts += [_table(section.table)] if section.table else []
    parts += [_code(section.code)] if section.code else []
    return "\n".join(["<section>", *parts, *map(_paragraph, section.after), *plots, "</section>"])


def _plot(name: str) -> str:
    return f'<figure><div data-figure="{name}"></div><figcaption>{escape(_CAPTIONS[name])}</figcaption></figure>'


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _code(code: str) -> str:
    return f'<div class="code"><pre>{escape(code)}</pre><button type="button">Copy</button></div>'


def _table(table: Table) -> str:
    wide = {i for i in range(len(table.columns)) if any(len(row[i]) > 24 for row in table.rows)}
    kinds = ["n" if i in table.numeric else "w" if i in wide else "" for i in range(len(table.columns))]
    head = "".join(_cell("th", name, kind) for name, kind in zip(table.columns, kinds, strict=True))
    body = "".join(_row(row, kinds, i in table.strong) for i, row in enumerate(table.rows))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(row: tuple[str, ...], kinds: list[str], strong: bool) -> str:
    cells = "".join(_cell("td", cell, kind) for cell, kind in zip(row, kinds, strict=True))
    return f'<tr class="strong">{cells}</tr>' if strong else f"<tr>{cells}</tr>"


def _cell(tag: str, text: str, kind: str) -> str:
    return f'<{tag} class="{kind}">{escape(text)}</{tag}>' if kind else f"<{tag}>{escape(text)}</{tag}>"
