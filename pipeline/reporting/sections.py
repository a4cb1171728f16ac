"""A report as an ordered list of sections; every rendering walks this list."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pipeline.anatomy import Anatomy, WhatIf
from pipeline.profile import StepProfile, busy_shares, doubts
from pipeline.reporting.model import Cost, Crossover, LoadAdvice, Point, Report, Row
from pipeline.reporting.readable import change, figure, spread, times


@dataclass(frozen=True)
class Table:
    """Rows of text. `strong` names rows to set off; numbers align right where a column is in `numeric`."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
    strong: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Section:
    """A heading, then sentences, tables and commands. `figures` names the plots that go with it."""

    title: str
    text: tuple[str, ...] = ()
    table: Table | None = None
    code: str | None = None
    figures: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def sections(report: Report) -> tuple[Section, ...]:
    """All sections that have something to say, in reading order."""
    made = (
        _launch(report),
        _ranking(report),
        _levels(report),
        _effects(report),
        _anatomy(report),
        _what_if(report),
        _simulated(report),
        _collectives(report),
        _screen(report),
        _profiles(report),
        _load(report),
        _parallel(report),
        _failures(report),
        _comparison(report),
        _cost(report),
    )
    return tuple(section for section in made if section is not None)


def _launch(report: Report) -> Section | None:
    if not report.verdict.command:
        return None
    return Section("Launch it", code=report.verdict.command)


def _ranking(report: Report) -> Section | None:
    if not report.ranking:
        return None
    rows = tuple(
        (str(r.rank or "–"), r.name, spread(r.value), times(r.speedup), figure(r.accept_length), _marks(r))
        for r in report.ranking
    )
    columns = ("#", "configuration", report.unit, "vs baseline", "accept length", "")
    strong = frozenset(i for i, r in enumerate(report.ranking) if r.is_winner or r.is_baseline)
    noise = report.verdict.noise_floor
    floor = f"Differences below {noise:.1%} are noise on this machine. " if noise is not None else ""
    return Section(
        "Ranking",
        text=(floor + _SPREADS, *((report.front,) if report.front else ())),
        table=Table(columns, rows, frozenset({0, 2, 3, 4}), strong),
        after=report.claims,
        figures=("throughput_latency",),
    )


_SPREADS = "± is half the 95 % interval over launches; of two launches both are given; a figure alone is one launch."


def _marks(row: Row) -> str:
    names = (("winner", row.is_winner), ("baseline", row.is_baseline), ("Pareto front", row.on_front))
    return ", ".join([name for name, on in names if on] + ([row.note] if row.note else []))


def _levels(report: Report) -> Section | None:
    """Winner and baseline at every load level."""
    chosen = {"winner": report.verdict.winner_id} if report.verdict.winner_id else {}
    base = next((r.config_id for r in report.ranking if r.is_baseline), None)
    chosen |= {"baseline": base} if base not in (None, report.verdict.winner_id) else {}
    points = {(p.config_id, p.level): p for p in report.points}
    levels = dict.fromkeys(p.level for p in report.points)
    rows = tuple(
        (level, label, *_level_cells(points[cid, level]))
        for level in levels
        for label, cid in chosen.items()
        if (cid, level) in points
    )
    if not rows:
        return None
    columns = ("load", "which", "tok/s", "vs baseline", "accept length", "TTFT ms", "TPOT ms", "p95 TPOT ms")
    return Section("At each load", table=Table(columns, rows, frozenset(range(2, 8))))


def _level_cells(p: Point) -> tuple[str, ...]:
    return (
        spread(p.tok_per_s),
        times(p.speedup),
        figure(p.accept_length),
        *map(figure, (p.mean_ttft_ms, p.mean_tpot_ms, p.p95_tpot_ms)),
    )


def _effects(report: Report) -> Section | None:
    if not report.effects:
        return None
    rows = tuple((e.setting, e.value, change(e.gain), e.reason) for e in report.effects)
    return Section(
        "What each setting is worth",
        text=("The winner with one setting undone at a time.",),
        table=Table(("setting", "value", "gain", "verdict"), rows, frozenset({2})),
    )


def _anatomy(report: Report) -> Section | None:
    if not report.anatomies:
        return None
    shown = telling(report)
    loads = any(a.level for a in shown)
    columns = ("plain step ms", "cycle ms", "accept length", "break-even", "speed-up", "perfect drafter tok/s")
    columns = (*(("load",) if loads else ()), "configuration", *columns)
    rows = tuple((*((a.level or "–",) if loads else ()), a.name, *_anatomy_cells(a)) for a in shown)
    return Section(
        "Anatomy of the verify step",
        text=(
            "Speculation pays where the accept length is above the break-even: the cycle (draft and verify) "
            "divided by a plain step.",
        ),
        table=Table(columns, rows, frozenset(range(len(columns) - 6, len(columns)))),
        after=(_sentence(report.subject),) if report.subject else (),
        figures=("break_even", "cycle"),
    )


def _anatomy_cells(a: Anatomy) -> tuple[str, ...]:
    return (
        figure(a.plain_step_ms),
        figure(a.cycle_ms),
        f"{a.accept_length:.2f}",
        f"{a.break_even_accept_length:.2f}",
        times(a.speedup),
        figure(a.ceiling_tok_per_s),
    )


def telling(report: Report) -> list[Anatomy]:
    """At each load the winner's dissection and the best of each algorithm, which comes first in the list."""
    algorithms = {row.name: row.algorithm for row in report.ranking}
    chosen: dict[tuple[str | None, str], Anatomy] = {}
    for a in report.anatomies:
        winner = a.name == report.verdict.winner
        if winner or (a.level, algorithms.get(a.name, a.name)) not in chosen:
            chosen[a.level, algorithms.get(a.name, a.name)] = a
    levels = list(dict.fromkeys([p.level for p in report.points]))
    return sorted(chosen.values(), key=lambda a: (levels.index(a.level) if a.level in levels else 0, -a.speedup))


def _sentence(a: Anatomy) -> str:
    at = f" At a verify step of {a.verify_ms:g} ms" if a.verify_ms else ""
    verify = f"{at}: break-even {a.break_even_at_verify:.1f}" if a.break_even_at_verify else ""
    if a.ceiling_at_verify_tok_per_s and a.max_accept_length:
        drafts = a.max_accept_length - 1
        verify += f", ceiling of a perfect {drafts}-token draft {a.ceiling_at_verify_tok_per_s:.0f} tok/s"
    return (
        f"{a.name}: plain step {a.plain_step_ms:.1f} ms, cycle {figure(a.cycle_ms, 2)} ms, "
        f"break-even accept length {a.break_even_accept_length:.1f}.{verify + '.' if verify else ''} {a.advice}"
    )


_CYCLES = {"now": "cycle now", "plain step": "as a plain step", "75%": "75 % of it", "50%": "50 % of it"}


def _what_if(report: Report) -> Section | None:
    table, subject = report.what_if, report.subject
    if table is None or subject is None:
        return None
    columns = ("accept length", *(f"{_CYCLES.get(name, name)} ({figure(ms)} ms)" for name, ms in _columns(table)))
    rows = tuple(
        (f"{length:g}", *(figure(v) + (" ✓" if v > table.plain_tok_per_s else "") for v in values))
        for length, values in zip(table.accept_lengths, table.tok_per_s, strict=True)
    )
    where = f"{subject.name}, {subject.level}" if subject.level else subject.name
    plain = f"✓ beats plain decoding ({figure(table.plain_tok_per_s)})"
    return Section(
        "What if",
        text=(f"{where}: tok/s by accept length and cycle; {plain}.",),
        table=Table(columns, rows, frozenset(range(len(columns)))),
    )


def _simulated(report: Report) -> Section | None:
    if not report.simulated:
        return None
    rows = tuple(
        (
            s.name, s.level, f"{s.asked:g}", f"{s.accept_length:.2f}", figure(s.predicted_tok_per_s),
            spread(s.measured), change(s.error),
        )
        for s in report.simulated
    )  # fmt: skip
    columns = ("configuration", "load", "asked", "accept length", "predicted tok/s", "measured tok/s", "off by")
    worst = max((s.error for s in report.simulated), key=abs)
    return Section(
        "What if, on the engine",
        text=(
            "The engine made the accept length up and did the rest of the work: predicted is accept length divided by "
            "the study's cycle. The text is garbage, so these launches are no trials and rank nowhere.",
        ),
        table=Table(columns, rows, frozenset(range(2, 7))),
        after=(f"The prediction is off by {change(worst)} at most.",),
    )


def _columns(table: WhatIf) -> list[tuple[str, float]]:
    return list(zip(table.cycle_names, table.cycles_ms, strict=True))


def _collectives(report: Report) -> Section | None:
    share = report.collectives
    text: tuple[str, ...] = ()
    if share is not None:
        taken = f"{share.collectives_ms:g} of {share.verify_ms:g} ms"
        text = (f"{share.all_reduces} all-reduces take {taken} of a verify step: {share.share:.0%}.",)
    if not text and not report.misfits:
        return None
    return Section("What does not fit" if report.misfits else "Collectives", text=text + report.misfits)


def _screen(report: Report) -> Section | None:
    if report.screen is None:
        return None
    left, unreached = report.screen.left, report.screen.unreached
    return Section(
        "Collective settings screened out",
        text=(report.screen.summary,),
        table=Table(("setting", "why it left"), left) if left else None,
        after=(unreached,) if unreached else (),
    )


def _profiles(report: Report) -> Section | None:
    if not report.profiles:
        return None
    columns = (
        "configuration", "rank", "step ms", *(f"{part} ms" for part in report.profiles[0].parts_ms), "profiled ms",
        "reduces + gathers",
    )  # fmt: skip
    rows = tuple(_profile_row(p) for p in report.profiles)
    return Section(
        "Where the milliseconds go",
        text=(
            "One decode step, on the GPU's own clock. The step was timed without the profiler; idle is what the work "
            "on the GPU leaves of it: launches, gaps, waiting for other ranks. Profiled is the step slowed by it.",
        ),
        table=Table(columns, rows, frozenset(range(2, 9))),
        after=(*busy_shares(report.profiles), *doubts(report.profiles)),
        figures=("step_time",),
    )


def _profile_row(p: StepProfile) -> tuple[str, ...]:
    parts = tuple(f"{ms:.2f}" for ms in p.parts_ms.values())
    measured = f"{p.measured_step_ms:.2f}" if p.measured_step_ms is not None else "–"
    slowed = f" ({p.overhead:+.0%})" if p.overhead is not None else ""
    draft = f"; draft {p.draft_all_reduces:g} + {p.draft_all_gathers:g}" if p.draft_all_reduces else ""
    counts = f"{p.all_reduces:g} + {p.all_gathers:g}{draft}"
    return (p.label, p.rank, measured, *parts, f"{p.step_ms:.2f}{slowed}", counts)


def _load(report: Report) -> Section | None:
    load = report.load
    if load is None:
        return None
    rows = tuple((workload, str(c), name, times(speedup)) for workload, c, name, speedup in load.best)
    static = f"One static choice for all of them: {load.static}." if load.static else ""
    return Section(
        "By workload and load",
        text=_crossover_lines(load),
        table=Table(("workload", "streams", "fastest", "vs baseline"), rows, frozenset({1, 3})),
        after=tuple(said for said in (load.adaptive_note, static) if said),
        code=_lines(load.adaptive) if load.adaptive else None,
    )


def _lines(value: dict[str, Any]) -> str:
    """JSON with one key a line."""
    body = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items())
    return f"{{\n{body}\n}}"


def _crossover_lines(load: LoadAdvice) -> tuple[str, ...]:
    if not load.crossovers:
        alone = len({name for _, _, name, _ in load.best}) == 1
        return ("One configuration is the fastest everywhere." if alone else "The fastest differs by workload.",)
    return tuple(map(_crossover, load.crossovers))


def _crossover(c: Crossover) -> str:
    few = f"{c.below} stream{'' if c.below == 1 else 's'}"
    doubt = " (a difference inside noise)" if c.inside_noise else ""
    return f"{c.workload}: at {few} {c.best_below} leads, at {c.above} {c.best_above}{doubt}."


def _parallel(report: Report) -> Section | None:
    if len(report.ranking) < 3:
        return None
    return Section("Settings against speed", figures=("parallel",))


def _failures(report: Report) -> Section | None:
    if not report.failures:
        return None
    rows = tuple((f.failure_class, str(f.count), f.example, f.cause) for f in report.failures)
    return Section("Failures", table=Table(("class", "trials", "first seen with", "cause"), rows, frozenset({1})))


def _comparison(report: Report) -> Section | None:
    if report.compared_with is None:
        return None
    rows = tuple((c.name, spread(c.there), spread(c.here), change(c.change), c.verdict) for c in report.comparison)
    columns = ("configuration", report.compared_with, report.title, "change", "")
    return Section(f"Against {report.compared_with}", table=Table(columns, rows, frozenset({1, 2, 3})))


def _cost(report: Report) -> Section | None:
    cost = report.cost
    if cost is None:
        return None
    return Section(
        "What it took", text=(_cost_line(cost),), table=_phases(cost) if cost.phases_s else None, figures=("timeline",)
    )


def _cost_line(cost: Cost) -> str:
    gpu = f", {cost.gpu_hours:.2f} GPU-hours" if cost.gpu_hours is not None else ""
    spared = [f"{n} {word}" for n, word in ((cost.reused, "reused"), (cost.pruned, "pruned")) if n]
    saved = f"; {' and '.join(spared)} without a launch" if spared else ""
    return f"{cost.launches} launches, {cost.failed} of them failed, {cost.hours:.2f} hours{gpu}{saved}."


def _phases(cost: Cost) -> Table:
    total = sum(cost.phases_s.values()) or 1.0
    rows = tuple((name, f"{seconds:,.1f}", f"{seconds / total:.0%}") for name, seconds in cost.phases_s.items())
    return Table(("phase", "seconds", "share"), rows, frozenset({1, 2}))
