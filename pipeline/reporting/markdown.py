"""A report as GitHub-flavoured Markdown."""

from __future__ import annotations

from pipeline.reporting.model import Report
from pipeline.reporting.sections import Section, Table, sections
from pipeline.reporting.text import verdict_lines


def render(report: Report) -> str:
    """The whole report."""
    facts = " · ".join(f"{name} {_escape(value)}" for name, value in report.facts)
    answers = "\n".join(f"- **{name}**: {_escape(value)}" for name, value in verdict_lines(report.verdict, report.unit))
    head = [f"# {_escape(report.title)}", facts, f"## {_escape(report.verdict.headline)}", answers]
    return (
        "\n\n".join(
            [*(part for part in head if part), *(_section(s) for s in sections(report) if s.text or s.table or s.code)]
        )
        + "\n"
    )


def _section(section: Section) -> str:
    parts = [f"## {section.title}", *map(_escape, section.text)]
    parts += [_table(section.table)] if section.table else []
    parts += [f"```\n{section.code}\n```"] if section.code else []
    return "\n\n".join([*parts, *map(_escape, section.after)])


def _table(table: Table) -> str:
    rules = ("---:" if i in table.numeric else "---" for i in range(len(table.columns)))
    rows = [table.columns, tuple(rules), *(_cells(table, i) for i in range(len(table.rows)))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(table: Table, index: int) -> tuple[str, ...]:
    cells = tuple(_escape(cell) for cell in table.rows[index])
    return tuple(f"**{cell}**" if cell else cell for cell in cells) if index in table.strong else cells


def _escape(text: str) -> str:
    for character in "\\|*_`<":
        text = text.replace(character, f"\\{character}")
    return text.replace("\n", " ")
