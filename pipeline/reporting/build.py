"""A study -> a `Report`. Ranking, noise, winner and claims are `selection`'s; nothing is judged twice here."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline import ablation
from pipeline.anatomy import Anatomy, Simulated, what_if
from pipeline.goals import baseline_id, why_not
from pipeline.profile import StepProfile
from pipeline.records import LosslessResult, Topology, TrialRecord
from pipeline.reporting import facts, loads
from pipeline.reporting.command import pasteable
from pipeline.reporting.model import LoadAdvice, Point, Report, Row, Verdict
from pipeline.reporting.naming import shortened
from pipeline.selection import Row as Ranked
from pipeline.selection import Selection, select
from pipeline.spec import Goal, ObjectiveSpec

_UNITS = {"output_tok_per_s": "tok/s", "requests_per_s": "requests/s"}


def build(
    title: str,
    records: Sequence[TrialRecord],
    objective: ObjectiveSpec,
    profiles: tuple[StepProfile, ...] = (),
    simulated: tuple[Simulated, ...] = (),
) -> Report:
    """Everything a study's records say, finished or not.

    Args:
        title: the study's name.
        records: its ledger.
        objective: its goals and limits.
        profiles: step profiles of some of its configurations.
        simulated: launches with a made-up accept length.
    """
    selection = select(records, objective)
    grouped = facts.launches(records)
    home = baseline_id(records)
    measured = facts.points(grouped, home)
    winner = selection.winner
    dissected = facts.anatomies(grouped, measured, home)
    subject = _subject(dissected, winner)
    on_front, front = _front(selection, measured, objective)
    ranking = _ranking(selection, grouped, on_front)
    load = _load(measured, grouped, objective, selection)
    said = {"explanation": explain(ranking), "by_workload": by_workload(load, selection.noise_floor or 0.0)}
    report = Report(
        title=title,
        facts=_facts(records),
        metric=objective.goals[0].metric,
        unit=_unit(objective.goals[0]),
        verdict=_verdict(selection, grouped, objective.goals[0]).model_copy(update=said),
        ranking=ranking,
        front=front,
        points=measured,
        effects=ablation.effects(records, objective, selection.noise_floor or 0.0),
        failures=facts.failures(records),
        claims=_claims(selection),
        anatomies=dissected,
        subject=subject,
        what_if=what_if(subject) if subject else None,
        simulated=simulated,
        profiles=profiles,
        load=load,
        timeline=facts.timeline(records),
        cost=facts.cost(records),
    )
    return shortened(report, records)


def _unit(goal: Goal) -> str:
    return _UNITS.get(goal.metric, f"{goal.metric.removesuffix('_ms').replace('_', ' ')} ms")


def _facts(records: Sequence[TrialRecord]) -> tuple[tuple[str, str], ...]:
    first = next((r for r in records if r.launch is not None), records[0] if records else None)
    if first is None:
        return ()
    version = f" {first.engine_version}" if first.engine_version else ""
    named = (
        ("model", first.config.model),
        ("engine", f"{first.config.engine}{version}"),
        ("tensor parallel", str(first.config.tensor_parallel_size)),
        ("machine", machine(first.topology)),
    )
    return tuple((name, value) for name, value in named if value)


def machine(topology: Topology) -> str:
    """The machine in words, such as `2 × H200, nvlink`."""
    if not topology.gpu_count:
        return f"{topology.cpu_count} CPU cores, no GPU" if topology.cpu_count else "no GPU"
    peers = {True: None, False: "no peer access", None: None}[topology.peer_access]
    parts = (f"{topology.gpu_count} × {topology.gpu_model or 'GPU'}", topology.link, peers)
    return ", ".join(part for part in parts if part)


def _verdict(selection: Selection, grouped: facts.Launches, goal: Goal) -> Verdict:
    winner, base = selection.winner, selection.baseline
    if winner is None:
        return Verdict(
            headline="No winner",
            reason=_sentence(selection.reason),
            baseline=base.values[0] if base else None,
            noise_floor=selection.noise_floor,
        )
    launch = next((r.launch for r in grouped.get(winner.config_id, ()) if r.launch is not None), None)
    low, high = _interval(selection, winner)
    return Verdict(
        headline=_headline(selection, winner, goal),
        reason=_sentence(selection.reason),
        winner=facts.named(winner.words),
        winner_id=winner.config_id,
        value=winner.values[0],
        baseline=base.values[0] if base else None,
        speedup=1 + winner.gain if winner.gain is not None else None,
        speedup_low=low,
        speedup_high=high,
        noise_floor=selection.noise_floor,
        lossless=_lossless(winner, grouped),
        command=pasteable(launch) if launch else None,
    )


def explain(ranking: Sequence[Row]) -> str | None:
    """What speculation yields and costs: of the winner, or of the best speculation where plain decoding wins."""
    speculative = [row for row in ranking if row.accept_length is not None and row.speedup]
    row = next((row for row in speculative if row.is_winner), speculative[0] if speculative else None)
    if row is None or row.accept_length is None or row.speedup is None:
        return None
    steps = row.accept_length / row.speedup
    cycle = f"a verify cycle yields {row.accept_length:.2f} tokens and takes as long as {steps:.2f} plain steps"
    if row.is_winner:
        return f"With it {cycle}; below {steps:.2f} tokens it would lose."
    return f"With the best speculation, {row.name}, {cycle}; it pays above {steps:.2f} tokens."


def by_workload(load: LoadAdvice | None, noise: float) -> str | None:
    """The fastest of each workload, where they differ; a lead within noise is none."""
    leaders: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for workload, streams, name, speedup in load.best if load else ():
        leader = name if speedup > 1 + noise else ""
        leaders.setdefault(workload, {}).setdefault(leader, []).append((streams, speedup))
    if len({tuple(names) for names in leaders.values()}) < 2:
        return None
    return " ".join(
        f"{workload}: {'; '.join(_leads(name, where) for name, where in names.items())}."
        for workload, names in leaders.items()
    )


def _leads(name: str, where: Sequence[tuple[int, float]]) -> str:
    streams = ", ".join(str(count) for count, _ in where)
    at = f"at {streams} stream{'' if streams == '1' else 's'}"
    gains = " and ".join(f"{speedup:.2f}×" for _, speedup in where)
    return f"{name} is the fastest {at} ({gains})" if name else f"nothing beats the baseline beyond noise {at}"


def _headline(selection: Selection, winner: Ranked, goal: Goal) -> str:
    if winner.is_baseline:
        return f"No configuration beats the baseline: {facts.named(winner.words)} stays"
    gained = _claimed(selection, winner)
    if gained is None:
        return f"{facts.named(winner.words)} wins"
    word = "faster" if goal.maximize else "quicker"
    return f"{facts.named(winner.words)} wins: {gained:.1%} {word} than the baseline"


def _claimed(selection: Selection, winner: Ranked) -> float | None:
    claim = next((c for c in selection.claims if c.config_id == winner.config_id), None)
    return claim.gain.value if claim else winner.gain


def _interval(selection: Selection, winner: Ranked) -> tuple[float | None, float | None]:
    claim = next((c for c in selection.claims if c.config_id == winner.config_id), None)
    if claim is None or claim.gain.low is None or claim.gain.high is None:
        return None, None
    return 1 + claim.gain.low, 1 + claim.gain.high


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!')) else '.'}"


def _lossless(winner: Ranked, grouped: facts.Launches) -> str | None:
    if winner.is_baseline:
        return "The baseline is the reference."
    results = [r.lossless for r in grouped.get(winner.config_id, ()) if r.lossless is not None]
    return " ".join(dict.fromkeys(_lossless_words(result) for result in results)) or None


def _lossless_words(result: LosslessResult) -> str:
    same = f"{result.identical} of {result.prompts} greedy outputs equal the baseline's"
    if result.passed and not result.numerics:
        return f"Yes: {same}."
    if result.passed:
        return f"Yes: {same}; {result.numerics} part at a near-tie, within rounding."
    return f"No: {same}, {result.wrong} are wrong."


def _front(selection: Selection, measured: Sequence[Point], objective: ObjectiveSpec) -> tuple[set[str], str]:
    """Of the study's two goals; with one goal, of throughput against latency over the measured loads."""
    if len(objective.goals) > 1:
        goals = " against ".join(goal.metric for goal in objective.goals)
        return {row.config_id for row in selection.pareto}, f"Pareto front: {goals}."
    able = {row.config_id for row in selection.ranking if row.reason is None}
    return facts.throughput_against_latency([p for p in measured if p.config_id in able])


def _ranking(selection: Selection, grouped: facts.Launches, on_front: set[str]) -> tuple[Row, ...]:
    """Configurations with figures; the others are among the failures."""
    ranked = [row for row in selection.ranking if row.values[0] is not None]
    return tuple(_row(rank, row, selection, grouped, on_front) for rank, row in enumerate(ranked, start=1))


def _row(rank: int, row: Ranked, selection: Selection, grouped: facts.Launches, on_front: set[str]) -> Row:
    first = grouped[row.config_id][0]
    levels = [level for r in grouped[row.config_id] if r.measurement for level in r.measurement.levels]
    return Row(
        rank=rank if row.reason is None else None,
        config_id=row.config_id,
        name=facts.named(row.words),
        algorithm=first.config.speculation.algorithm,
        trials=row.trials,
        value=row.values[0],
        speedup=1 + row.gain if row.gain is not None else None,
        accept_length=facts.accept_length(levels),
        is_baseline=row.is_baseline,
        is_winner=selection.winner is not None and row.config_id == selection.winner.config_id,
        on_front=row.config_id in on_front,
        note=row.reason or "",
        params=dict(facts.flat(first.config)),
    )


def _claims(selection: Selection) -> tuple[str, ...]:
    words = {row.config_id: facts.named(row.words) for row in selection.ranking}
    return tuple(f"{words.get(c.config_id, c.config_id)}: {c.verdict}, {c.text}." for c in selection.claims)


def _subject(dissected: Sequence[Anatomy], winner: Ranked | None) -> Anatomy | None:
    """The dissection that the what-if table is about: the winner's, else the best speculation's."""
    if not dissected:
        return None
    return next((a for a in dissected if winner is not None and a.name == facts.named(winner.words)), dissected[0])


def _load(
    measured: Sequence[Point], grouped: facts.Launches, objective: ObjectiveSpec, selection: Selection
) -> LoadAdvice | None:
    able = {
        cid: found[0].config
        for cid, found in grouped.items()
        if not any(why_not(record, objective) for record in found)
    }
    usable = [point for point in measured if point.config_id in able]
    static = facts.named(selection.winner.words) if selection.winner else None
    return loads.advise(usable, able, noise=selection.noise_floor or 0.0, static=static)
