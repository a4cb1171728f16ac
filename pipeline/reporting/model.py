"""What a report says, as data. `--json` prints this; text, Markdown and HTML are made from it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from pipeline.ablation import Effect
from pipeline.anatomy import Anatomy, CollectiveShare, Simulated, WhatIf
from pipeline.config import Frozen
from pipeline.profile import StepProfile
from pipeline.records import Estimate


class Verdict(Frozen):
    """The first screen: who won, by how much, how sure, why, whether it is lossless, how to launch it."""

    headline: str
    reason: str
    explanation: str | None = None  # in tokens and plain steps a cycle
    by_workload: str | None = None  # the fastest of each, where they differ
    winner: str | None = None
    winner_id: str | None = None
    value: Estimate | None = None
    baseline: Estimate | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    noise_floor: float | None = None  # share of the value
    lossless: str | None = None
    command: str | None = None


class Row(Frozen):
    """One configuration in the ranking, over all its launches."""

    rank: int | None = None
    config_id: str
    name: str
    algorithm: str
    trials: tuple[int, ...]
    value: Estimate | None = None
    speedup: float | None = None
    accept_length: float | None = None  # over all levels: tokens / verify steps
    is_baseline: bool = False
    is_winner: bool = False
    on_front: bool = False
    note: str = ""
    params: dict[str, Any] = Field(default_factory=dict)


class Point(Frozen):
    """One configuration at one load level, pooled over its launches."""

    config_id: str
    name: str
    algorithm: str
    level: str
    workload: str
    concurrency: int | None = None
    tok_per_s: Estimate
    mean_ttft_ms: float | None = None
    p95_ttft_ms: float | None = None
    mean_tpot_ms: float | None = None
    p95_tpot_ms: float | None = None
    accept_length: float | None = None
    verify_steps: int | None = None
    speedup: float | None = None  # of tok/s, against the baseline at this level


class FailureLine(Frozen):
    """One class of failure and what it hit."""

    failure_class: str
    count: int
    example: str
    cause: str
    log_path: str | None = None


class Cost(Frozen):
    """What the study took. Hours are of engines' time, launch to proven teardown."""

    launches: int
    reused: int
    pruned: int
    failed: int
    hours: float
    gpu_hours: float | None
    phases_s: dict[str, float]


class Crossover(Frozen):
    """Between two neighbouring loads of one workload another configuration becomes the fastest."""

    workload: str
    below: int
    above: int
    best_below: str
    best_above: str
    inside_noise: bool


class LoadAdvice(Frozen):
    """The best static choice, the best at each load, and SGLang's adaptive configuration where it may be used."""

    best: tuple[tuple[str, int, str, float], ...]  # workload, concurrency, configuration, speed-up over baseline
    crossovers: tuple[Crossover, ...]
    static: str | None
    adaptive: dict[str, Any] | None = None
    adaptive_note: str = ""


class Span(Frozen):
    """One trial on the timeline. Seconds since the study's first start."""

    trial: int
    name: str
    role: str
    status: str
    start_s: float
    phases_s: dict[str, float]


class Comparison(Frozen):
    """One configuration in two studies."""

    name: str
    here: Estimate | None
    there: Estimate | None
    change: float | None
    verdict: str


class Screen(Frozen):
    """Collective settings timed without the engine, before the search."""

    summary: str
    left: tuple[tuple[str, str], ...] = ()  # a setting, and why it left the space
    unreached: str = ""  # what there was no time for: it stayed in the space


class Report(Frozen):
    """Everything a report says. Empty parts are left out by the renderings."""

    title: str
    facts: tuple[tuple[str, str], ...] = ()  # model, engine, machine, versions
    metric: str = "output_tok_per_s"
    unit: str = "tok/s"
    verdict: Verdict
    ranking: tuple[Row, ...] = ()
    points: tuple[Point, ...] = ()
    effects: tuple[Effect, ...] = ()
    failures: tuple[FailureLine, ...] = ()
    claims: tuple[str, ...] = ()
    front: str = ""  # what the Pareto front weighs, in words
    anatomies: tuple[Anatomy, ...] = ()
    subject: Anatomy | None = None  # the one that the what-if table is about
    what_if: WhatIf | None = None
    simulated: tuple[Simulated, ...] = ()  # launches with a made-up accept length; never in the ranking
    collectives: CollectiveShare | None = None
    screen: Screen | None = None
    misfits: tuple[str, ...] = ()
    profiles: tuple[StepProfile, ...] = ()
    load: LoadAdvice | None = None
    timeline: tuple[Span, ...] = ()
    cost: Cost | None = None
    compared_with: str | None = None
    comparison: tuple[Comparison, ...] = ()
