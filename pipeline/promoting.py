"""A promotion from the first launch to the alias: measure in turns, decide, switch, register.

Nothing is registered before it serves (where a champion is in service), and nothing is switched before
every gate holds. What was measured stays in the study's folder, whatever the outcome.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.api_matrix import Observed, compare, run_matrix
from pipeline.candidate import Candidate, Incumbent
from pipeline.config import EngineConfig
from pipeline.errors import EngineError, MeasurementError, PromotionError
from pipeline.lossless import Reference, tolerance_of
from pipeline.promotion import SOAK, Decision, Evidence, Gate, decide, soak_gate
from pipeline.records import LevelResult, Role, Topology, TrialRecord
from pipeline.ruler import MeasurePlan, Ruler
from pipeline.spec import LoadSpec
from pipeline.tokens import token_counter
from pipeline.topology import gpu_state
from pipeline.trial import Outcome, TrialRequest, judge, run_trial

if TYPE_CHECKING:
    from serve.deployment import Deployed

Say = Callable[[str], None]
SOAK_FALL = 0.1  # a soak may end this share slower than it began: longer prompts, a warmer GPU


@dataclass
class Bench:
    """Launches and measures the configurations of one promotion, on this node, one at a time."""

    candidate: Candidate
    folder: Path
    topology: Topology
    facts: dict[str, Any]
    say: Say
    launches: list[TrialRecord] = field(default_factory=list)
    observed: dict[str, tuple[Observed, ...]] = field(default_factory=dict)
    reference: Reference | None = None

    @property
    def plan(self) -> MeasurePlan:
        """The study's own plan; the held-out prompts are taken from it."""
        return MeasurePlan.from_space(self.candidate.space, salt=self.candidate.study.facts["id"])

    def launch(self, config: EngineConfig, *, role: Role, round_: int | None = None) -> TrialRecord:
        """Launch, measure on held-out prompts, judge. A baseline's first answers become the reference.

        The first launch of each configuration answers the API matrix too.
        """
        number = len(self.launches) + 1
        self.say(f"launch {number}: {config.words()}")
        request = TrialRequest(
            study=self.candidate.study.name,
            number=number,
            role=role,
            config=config,
            params={},
            objective=self.candidate.objective,
            topology=self.topology,
            facts={**self.facts, "round": round_},
        )
        engine, measure = self._engine(config, number), self._measure(config, role)
        outcome = run_trial(request, engine, measure, _read_back, _quiet, gpu_state)
        record = self._judged(outcome)
        self.launches.append(record)
        if record.failure is not None:
            self.say(f"launch {number} failed: {record.failure.text()}")
        return record

    def _judged(self, outcome: Outcome) -> TrialRecord:
        if self.reference is None and outcome.record.role == "baseline" and outcome.greedy:
            self.reference = Reference.of(outcome.greedy)
        return judge(outcome, self.reference)

    def _engine(self, config: EngineConfig, number: int) -> Deployed:
        from serve.deployment import Deployed, EngineOptions

        options = EngineOptions(str((self.folder / f"{number:03d}").resolve()), self.plan.limits)
        return Deployed(config, options, app_name=f"promote-{self.candidate.study.name}-{number:03d}")

    def _measure(self, config: EngineConfig, role: Role) -> Callable[..., Any]:
        ruler = Ruler(self.plan, count_tokens=token_counter(config.model))

        def measure(base_url: str, **hooks: Any) -> Any:
            measured = ruler.measure(base_url, held_out=True, baseline=role == "baseline", **hooks)
            if config.config_id not in self.observed:
                self.observed[config.config_id] = run_matrix(base_url)
            return measured

        return measure

    def soak(self, config: EngineConfig, minutes: float) -> Gate:
        """Run the configuration for so long with the load going up and down."""
        self.say(f"soak: {minutes:g} minutes with the load going up and down")
        busiest = max(self.plan.load.concurrency, default=1)
        ramp = itertools.cycle((busiest, max(1, busiest // 2), 1, max(1, busiest // 2)))
        full: list[float] = []
        errors, began = 0, time.monotonic()
        try:
            with self._engine(config, len(self.launches) + 1) as engine:
                while not full or time.monotonic() - began < 60 * minutes:
                    concurrency = next(ramp)
                    levels = self._stretch(engine, concurrency, salt=f"soak {len(full)}")
                    errors += sum(level.requests_failed for level in levels)
                    if concurrency == busiest:
                        full.append(sum(level.output_tok_per_s.value for level in levels))
        except (EngineError, MeasurementError) as error:
            return Gate(name=SOAK, passed=False, seen=str(error))
        return soak_gate(full, errors, time.monotonic() - began, SOAK_FALL)

    def _stretch(self, engine: Deployed, concurrency: int, *, salt: str) -> tuple[LevelResult, ...]:
        load = LoadSpec(concurrency=(concurrency,), min_repeats=1, max_repeats=1)
        plan = self.plan.model_copy(update={"load": load, "salt": f"{self.plan.salt}|{salt}"})
        return Ruler(plan).measure(engine.base_url, watch=engine.check, held_out=True, greedy=False).levels


def _read_back(config: EngineConfig, resolved: dict[str, Any], log_path: str) -> dict[str, Any]:
    from pipeline.readback import read_back

    return read_back(config, resolved, log_path)


def _quiet(_: str) -> None:
    """Phases of a launch are not shown."""


def gather(bench: Bench, incumbent: Incumbent, *, rounds: int, soak_minutes: float) -> Evidence:
    """Measure winner and incumbent in turns, each round in the other order, and the winner for long.

    The baseline is launched first, once: it is what losslessness and the API matrix are held against.
    """
    candidate, baseline = bench.candidate, bench.candidate.baseline
    against, winner = incumbent.config or baseline, candidate.config
    evidence = Evidence(
        winner=winner.config_id, incumbent=against.config_id, has_champion=incumbent.config is not None, launches=()
    )
    if bench.launch(baseline, role="baseline", round_=0).failure is not None:
        raise PromotionError(f"the baseline does not run, so nothing can be held against it; see {bench.folder}")
    if winner == against:
        return evidence.model_copy(update={"launches": tuple(bench.launches)})
    for number in range(rounds):
        for config in (winner, against) if number % 2 == 0 else (against, winner):
            if not (number == 0 and config == baseline):
                bench.launch(config, role="confirm", round_=number)
    fit = bench.observed.get(winner.config_id) is not None
    soak = bench.soak(winner, soak_minutes) if soak_minutes and fit else None
    pair = {winner.config_id, against.config_id}
    update = {
        "launches": tuple(record for record in bench.launches if record.config_id in pair),
        "matrix": _matrix(bench, baseline, winner),
        "soak": soak,
    }
    return evidence.model_copy(update=update)


def _matrix(bench: Bench, baseline: EngineConfig, winner: EngineConfig) -> Any:
    ours, theirs = bench.observed.get(baseline.config_id), bench.observed.get(winner.config_id)
    if ours is None or theirs is None:
        return None
    return compare(ours, theirs, exact=tolerance_of(winner) is None)


def judge_promotion(bench: Bench, evidence: Evidence, *, force: bool) -> Decision:
    """Decide, and keep evidence and decision in the promotion's folder."""
    decision = decide(evidence, bench.candidate.objective, force=force)
    bench.folder.mkdir(parents=True, exist_ok=True)
    (bench.folder / "evidence.json").write_text(evidence.model_dump_json(indent=2))
    (bench.folder / "decision.json").write_text(decision.model_dump_json(indent=2))
    return decision


def fresh_folder(candidate: Candidate) -> Path:
    """A new folder for one promotion, in the study's."""
    root = candidate.study.folder / "promotions"
    root.mkdir(exist_ok=True)
    for number in itertools.count(1):
        folder = root / f"{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")
