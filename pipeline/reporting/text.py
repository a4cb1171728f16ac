"""A report for a terminal or a log: plain text, no escape codes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from pipeline.reporting.model import Report, Verdict
from pipeline.reporting.readable import spread, times
from pipeline.reporting.sections import Section, Table, sections

_WIDTH = 110


def render(report: Report) -> str:
    """The whole report, 110 columns where tables allow."""
    blocks = [_first_screen(report), *(_section(s) for s in sections(report) if s.text or s.table or s.code)]
    return "\n\n".join(blocks) + "\n"


def _first_screen(report: Report) -> str:
    facts = " · ".join(f"{name} {value}" for name, value in report.facts)
    lines = [report.title, *_wrap(facts), "", *_wrap(report.verdict.headline), ""]
    width = max((len(name) for name, _ in verdict_lines(report.verdict, report.unit)), default=0)
    for name, value in verdict_lines(report.verdict, report.unit):
        indent = " " * (width + 4)
        lines += textwrap.wrap(f"  {name:<{width}}  {value}", _WIDTH, subsequent_indent=indent)
    return "\n".join(lines)


def verdict_lines(verdict: Verdict, unit: str) -> tuple[tuple[str, str], ...]:
    """What the first screen answers, as (name, words); missing parts are left out."""
    interval = ""
    if verdict.speedup_low is not None and verdict.speedup_high is not None:
        interval = f" ({times(verdict.speedup_low)} to {times(verdict.speedup_high)})"
    lines = (
        ("winner", verdict.winner),
        ("measured", f"{spread(verdict.value)} {unit}" if verdict.value else None),
        ("baseline", f"{spread(verdict.baseline)} {unit}" if verdict.baseline else None),
        ("speed-up", f"{times(verdict.speedup)}{interval}" if verdict.speedup is not None else None),
        ("noise floor", f"{verdict.noise_floor:.1%}" if verdict.noise_floor is not None else None),
        ("why", " ".join(part for part in (verdict.reason, verdict.explanation) if part)),
        ("by workload", verdict.by_workload),
        ("lossless", verdict.lossless),
    )
    return tuple((name, value) for name, value in lines if value)


def _section(section: Section) -> str:
    parts = ["\n".join([section.title, "─" * len(section.title)])]
    parts += ["\n".join(_wrap(text)) for text in section.text]
    parts += [table(section.table)] if section.table else []
    parts += [textwrap.indent(section.code, "  ")] if section.code else []
    parts += ["\n".join(_wrap(text)) for text in section.after]
    return "\n".join(parts[:1]) + "\n" + "\n\n".join(parts[1:])


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False)


def table(found: Table) -> str:
    """Columns aligned by two spaces; the last column may wrap."""
    rows = [found.columns, *found.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(found.columns))]
    return "\n".join(line.rstrip() for row in rows for line in _lines(row, widths, found.numeric))


def _lines(row: Iterable[str], widths: list[int], numeric: frozenset[int]) -> Iterator[str]:
    cells = list(row)
    head = "  ".join(
        cell.rjust(width) if i in numeric else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells[:-1], widths[:-1], strict=True))
    )
    last = len(cells) - 1
    room = max(24, _WIDTH - len(head) - 4)
    text = cells[-1].rjust(widths[-1]) if last in numeric else cells[-1]
    pieces = textwrap.wrap(text, room, drop_whitespace=last not in numeric) or [""]
    yield f"  {head}  {pieces[0]}"
    for piece in pieces[1:]:
        yield f"  {' ' * len(head)}  {piece}"
