"""The day that started this project, from its published figures, through the same report."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from pipeline.anatomy import Anatomy, collective_share, dissect, what_if
from pipeline.config import Frozen
from pipeline.records import Estimate
from pipeline.reporting.model import Report, Row, Verdict

STORY = Path(__file__).parent.parent / "data" / "story.json"


class StoryVerify(Frozen):
    """What was published of the verify step."""

    step_ms: float
    all_reduces: int
    collectives_ms: float


class StorySpeculation(Frozen):
    """One speculative run: accept length as one figure, or as a range."""

    name: str
    tok_per_s: float
    accept_length: tuple[float, ...] = Field(min_length=1, max_length=2)
    draft_tokens: int | None = None


class Story(Frozen):
    """`data/story.json`."""

    title: str
    model: str
    tensor_parallel_size: int
    plain_tok_per_s: float
    verify: StoryVerify
    speculation: tuple[StorySpeculation, ...]


def load_story(path: Path = STORY) -> Story:
    """Read the published figures."""
    return Story.model_validate_json(path.read_text())


def story_report(story: Story) -> Report:
    """What the published figures allow to be said, and what does not fit in them."""
    dissected = tuple(a for run in story.speculation for a in _dissect(run, story))
    best = dissected[0]
    share = collective_share(
        story.verify.all_reduces, story.verify.collectives_ms, story.verify.step_ms, best.plain_step_ms
    )
    return Report(
        title=story.title,
        facts=(("model", story.model), ("tensor parallel", str(story.tensor_parallel_size))),
        verdict=_verdict(story, dissected),
        ranking=_rows(story),
        anatomies=dissected,
        what_if=what_if(best),
        subject=best,
        collectives=share,
        misfits=tuple(_misfits(story, dissected)) + (() if share.fits else (share.verdict,)),
    )


def _dissect(run: StorySpeculation, story: Story) -> list[Anatomy]:
    return [
        dissect(
            run.name if len(run.accept_length) == 1 else f"{run.name} at {length:g}",
            plain=story.plain_tok_per_s,
            speculative=run.tok_per_s,
            accept_length=length,
            max_accepted=run.draft_tokens + 1 if run.draft_tokens else None,
            verify_ms=story.verify.step_ms,
        )
        for length in run.accept_length
    ]


def _verdict(story: Story, dissected: tuple[Anatomy, ...]) -> Verdict:
    best = max(dissected, key=lambda a: a.tok_per_s)
    plain = f"{story.plain_tok_per_s:g} tok/s"
    return Verdict(
        headline=f"Plain decoding wins: {plain}; the best speculation gives {best.tok_per_s:g}.",
        reason=best.advice,
        winner="no speculation",
        value=Estimate(value=story.plain_tok_per_s),
        baseline=Estimate(value=story.plain_tok_per_s),
        speedup=1.0,
    )


def _rows(story: Story) -> tuple[Row, ...]:
    runs = sorted(story.speculation, key=lambda run: -run.tok_per_s)
    plain = Row(
        rank=1, config_id="plain", name="no speculation", algorithm="none", trials=(), is_baseline=True,
        is_winner=True, value=Estimate(value=story.plain_tok_per_s), speedup=1.0,
    )  # fmt: skip
    return (plain, *(_row(rank, run, story.plain_tok_per_s) for rank, run in enumerate(runs, start=2)))


def _row(rank: int, run: StorySpeculation, plain: float) -> Row:
    lengths = "–".join(f"{length:g}" for length in run.accept_length)
    return Row(
        rank=rank, config_id=run.name, name=run.name, algorithm=run.name, trials=(),
        value=Estimate(value=run.tok_per_s), speedup=run.tok_per_s / plain,
        note=f"accept length {lengths}" if len(run.accept_length) > 1 else "",
        accept_length=run.accept_length[0] if len(run.accept_length) == 1 else None,
    )  # fmt: skip


def _misfits(story: Story, dissected: tuple[Anatomy, ...]) -> list[str]:
    """Cycles shorter than the verify step inside them."""
    return [
        f"{a.name}: accept length {a.accept_length:g} at {a.tok_per_s:g} tok/s makes a cycle of {a.cycle_ms:.1f} ms, "
        f"shorter than the {story.verify.step_ms:g} ms verify step inside it: one of the three is rounded."
        for a in dissected
        if a.cycle_ms < story.verify.step_ms
    ]
