"""`python -m pipeline.report STUDY`: which configuration wins, by how much, and why.

`python -m pipeline.report story` shows the same for the published figures that started this project.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli import run_command

if TYPE_CHECKING:
    from pipeline.reporting.model import Report
    from pipeline.spec import ObjectiveSpec
    from pipeline.store import Study

STORY = "story"

app = typer.Typer(add_completion=False)


@app.command()
def report(
    study: Annotated[str, typer.Argument(help="A study's folder or name, `latest`, or `story`.")],
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the report as Markdown.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write one HTML file that opens offline.")] = None,
    compare: Annotated[str | None, typer.Option(help="Another study to compare with.")] = None,
) -> None:
    """Say which configuration of a study wins, by how much, and why."""
    from pipeline.errors import InputError

    if json and markdown:
        raise InputError("two formats at once", key="--json, --markdown", expected="one of them")
    found = load_report(study)
    if compare is not None:
        from pipeline.reporting.compare import compare as compared

        found = compared(found, load_report(compare))
    if html is not None:
        write_html(found, html)
    typer.echo(render(found, "json" if json else "markdown" if markdown else "text").rstrip("\n"))


def render(report: Report, form: str = "text") -> str:
    """The report as `text`, `markdown` or `json`."""
    if form == "json":
        return report.model_dump_json(indent=2)
    from pipeline.reporting import markdown, text

    return markdown.render(report) if form == "markdown" else text.render(report)


def write_html(report: Report, path: Path) -> Path:
    """Write one self-contained HTML file; return its path."""
    from pipeline.reporting import html

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html.render(report), encoding="utf-8")
    return path


def load_report(name: str) -> Report:
    """The report of a study on disk, or of the story."""
    if name == STORY:
        from pipeline.reporting.story import load_story, story_report

        return story_report(load_story())
    from pipeline.store import Study

    return study_report(Study.open(name))


def study_report(study: Study) -> Report:
    """The report of a study, finished or not."""
    from pipeline.reporting.build import build
    from pipeline.reporting.facts import profiles, screen, simulated

    folder = study.folder
    report = build(study.name, study.records(), study_objective(study), profiles(folder), simulated(folder))
    return report.model_copy(update={"screen": screen(folder)})


def study_objective(study: Study) -> ObjectiveSpec:
    """The study's goals and limits: as `study.json` recorded them, else as its space file says."""
    from pipeline.spec import ObjectiveSpec

    stated: dict[str, Any] | None = study.facts.get("objective")
    if stated is not None:
        return ObjectiveSpec.model_validate(stated)
    records = study.records()
    if not records:
        return ObjectiveSpec()
    from pipeline.space import load_space

    return load_space(study.space_file).for_engine(records[0].config.engine).objective


if __name__ == "__main__":
    run_command(app)
