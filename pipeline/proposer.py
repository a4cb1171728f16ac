"""What to try next: baseline, seeds, sampler, ablation, confirmation.

The ledger of records is the only state: each phase works out from it what is still missing, so a run that was
killed anywhere goes on where it was, and the offline benchmarks replay the very code that Ray Tune drives.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.ablation import TOGETHER, Effect, effects, settings_of, undo, without
from pipeline.config import EngineConfig
from pipeline.goals import StopRule, ceilings, launched, value_of, why_not, worth
from pipeline.lessons import LeftRegion, busy_seconds, left_regions, observations
from pipeline.records import Role, Status, TrialRecord
from pipeline.sampling import Point, Sampler, Space
from pipeline.selection import ASSUMED_NOISE, Row, measure_noise, rank
from pipeline.spec import ObjectiveSpec, SearchSpec

BASELINE_TRIES = 2
MODEL_DRAWS = 25  # of these in a row already known, random draws take over from the model
RANDOM_DRAWS = 400  # of these in a row already known, the space counts as exhausted


class Violated(Protocol):
    """A broken rule (`pipeline.rules.Violation`)."""

    @property
    def rule(self) -> str: ...

    @property
    def reason(self) -> str: ...


@dataclass(frozen=True)
class Proposal:
    """One launch to make. `facts` belong into its record; `node` is where it must run, None is anywhere."""

    number: int
    role: Role
    config: EngineConfig
    params: Point = field(default_factory=dict)
    undone: str | None = None
    round: int | None = None
    node: str | None = None
    stop_early: StopRule | None = None

    @property
    def config_id(self) -> str:
        """Names the configuration."""
        return self.config.config_id

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of the record that only the proposer knows."""
        return {"undone": self.undone, "round": self.round}


@dataclass(frozen=True)
class Wait:
    """Nothing to start before a trial in flight has ended."""


@dataclass(frozen=True)
class Done:
    """The study is over, and why the search ended."""

    reason: str


class Proposer:
    """Proposes launches until the study is over.

    `propose` and `observe` may be called for several trials in flight. Points that need no launch (pruned by a
    rule, known already) become records too: store what `drain` hands out after each `propose`.

    Args:
        space: the engine's part of the space file.
        search: how to search, and the budget.
        objective: goals and limits.
        check: rules that a configuration breaks; empty means launchable.
        canonical: what the engine would make of a configuration.
        records: the ledger of an interrupted study.
        study: the study's name, for the records made here.
        gpus_per_trial: for a budget in GPU-hours.
        nodes: names of the nodes; each but the baseline's gets a reference trial.
        extra_seeds: points from an earlier study.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        space: Space,
        search: SearchSpec,
        objective: ObjectiveSpec,
        *,
        check: Callable[[EngineConfig], Sequence[Violated]],
        canonical: Callable[[EngineConfig], EngineConfig],
        records: Iterable[TrialRecord] = (),
        study: str = "study",
        gpus_per_trial: int = 0,
        nodes: Sequence[str] = (),
        extra_seeds: Sequence[Point] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.space, self.search, self.objective, self.study = space, search, objective, study
        self._check, self._canonical, self._gpus, self._nodes = check, canonical, gpus_per_trial, nodes
        self._records = list(records)
        self._earlier_s, self._clock, self._began = busy_seconds(self._records), clock, clock()
        self._pending: dict[int, Proposal] = {}
        self._undelivered: list[TrialRecord] = []
        self._known = {_key(record.params) for record in self._records if record.params}
        self._seed_points = [*space.seeds(), *extra_seeds]
        directions = [goal.maximize for goal in objective.goals]
        self._sampler = Sampler(
            space, search.sampler, seed=search.seed, startup=search.startup_trials, maximize=directions
        )
        self._fallback = Sampler(space, "random", seed=search.seed + 1)
        self._exhausted: str | None = None
        self.baseline = canonical(space.baseline())

    # -- what callers use

    def propose(self) -> Proposal | Wait | Done:
        """The next launch, or why there is none now."""
        phases = (self._baseline, self._references, self._seeds, self._search, self._ablation, self._confirmation)
        for phase in phases:
            answer = phase()
            if answer is not None:
                return answer
        return Done(self._search_over() or "every phase is complete")

    def observe(self, record: TrialRecord) -> None:
        """Take in the record of a proposed trial."""
        self._pending.pop(record.number, None)
        self._add(record)

    def drain(self) -> list[TrialRecord]:
        """Records of points that needed no launch, each handed out once."""
        out, self._undelivered = self._undelivered, []
        return out

    def left_regions(self) -> tuple[LeftRegion, ...]:
        """Settings that keep failing."""
        return left_regions(self._records)

    def effects(self) -> tuple[Effect, ...]:
        """What each setting of the ablated configuration is worth."""
        return effects(self._records, self.objective, self._effect_noise())

    def launches_left(self) -> int | None:
        """Launches still to come, for an ETA; None where the budget does not say."""
        trials = self.search.budget.trials
        if self._search_over() is None and trials is None:
            return None
        searching = 0 if self._search_over() or trials is None else trials - self._searched()
        closing = self._closing_launches() - sum(
            r.role in ("ablation", "confirm") for r in self._records if launched(r)
        )
        return searching + max(0, closing)

    # -- phases: each returns a launch, Wait, Done, or None when it is complete

    def _baseline(self) -> Proposal | Wait | Done | None:
        tried = [record for record in self._records if record.role == "baseline"]
        if any(value_of(record, self.objective.goals[0]) for record in tried):
            return None
        if self._pending:
            return Wait()
        if len(tried) >= BASELINE_TRIES:
            return Done(f"the baseline gave no figures: {tried[-1].reason}")
        return self._launch("baseline", self.baseline)

    def _references(self) -> Proposal | None:
        home = [record.node for record in self._records if record.role == "baseline"]
        seen = {r.node for r in self._records if r.role in ("baseline", "reference")}
        seen |= {p.node for p in self._pending.values()}
        missing = next((node for node in self._nodes if node not in seen), None) if any(home) else None
        return self._launch("reference", self.baseline, node=missing) if missing else None

    def _seeds(self) -> Proposal | None:
        for point in self._seed_points:
            if self._search_over():
                return None
            if _key(point) not in self._known:
                proposal = self._admit(point, "seed")
                if proposal:
                    return proposal
        return None

    def _search(self) -> Proposal | Wait | None:
        if self._search_over() is None:
            proposal = self._draw()
            if proposal:
                return proposal
        return Wait() if self._pending else None

    def _ablation(self) -> Proposal | Wait | None:
        leader = self._leader()
        if not self.search.ablate or leader is None:
            return None
        if not any(r.role == "ablation" and r.undone is None for r in self._of(leader.config_id)):
            return self._once("ablation", leader)
        for name, config in self._undone(leader).items():
            if not self._settled(name, config):
                proposal = self._launch_undone(name, config)
                if proposal:
                    return proposal
        if self._pending:
            return Wait()
        simple, dropped = self._simplified(leader)
        if simple is None or self._of(simple.config_id):
            return None
        return self._launch("ablation", simple, undone=TOGETHER.join(dropped))

    def _confirmation(self) -> Proposal | Wait | None:
        if self._pending:
            return Wait()  # in turns: the launches of a round are comparable because nothing else ran
        finalists = self._finalists() if self.search.confirm_rounds else []
        lineup = [*finalists, self.baseline]
        count = self.search.confirm_rounds if finalists else 1
        done = [r for r in self._records if r.role == "confirm"]
        first = self._first_round(done, {config.config_id for config in lineup})
        for turn in range(count):
            # Turning the order round cancels a steady drift; the baseline is last of all.
            order = lineup if (count - 1 - turn) % 2 == 0 else lineup[::-1]
            for config in order:
                here = [r for r in done if r.config_id == config.config_id]
                out = any(why_not(r, self.objective) for r in here) and config != self.baseline
                if not out and not any(r.round == first + turn for r in here):
                    return self._launch("confirm", config, round_=first + turn)
        return None

    # -- search

    def _draw(self) -> Proposal | None:
        seen = observations(self._records, self.objective)
        for attempt in range(MODEL_DRAWS + RANDOM_DRAWS):
            model = attempt < MODEL_DRAWS or self._sampler.is_sequence
            sampler = self._sampler if model else self._fallback
            in_flight = [proposal.params for proposal in self._pending.values() if proposal.params]
            point = sampler.draw(seen, in_flight, key=(self._free_number(), attempt))
            if point is None:
                self._exhausted = "every point of the grid was tried"
                return None
            proposal = None if _key(point) in self._known else self._admit(point, "search")
            if proposal:
                return proposal
        self._exhausted = f"the space is exhausted: {MODEL_DRAWS + RANDOM_DRAWS} draws in a row gave nothing new"
        return None

    def _admit(self, params: Point, role: Role) -> Proposal | None:
        """A launch for the point, or a record that says why it needs none."""
        config = self.space.config(params)
        broken = self._check(config)
        if broken:
            self._note(role, config, "pruned", params, reason=f"{broken[0].rule}: {broken[0].reason}")
            return None
        config = self._canonical(config)
        if same := self._of(config.config_id):
            self._note(role, config, "reused", params, reused_from=same[0].number)
        elif left := self._left(config):
            self._note(role, config, "pruned", params, reason=f"left region: {left.text()}")
        elif all(proposal.config_id != config.config_id for proposal in self._pending.values()):
            return self._launch(role, config, params, stop_early=self._stop_rule())
        return None

    def _left(self, config: EngineConfig) -> LeftRegion | None:
        pairs = settings_of(config)
        regions = self.left_regions()
        return next((region for region in regions if pairs.items() >= dict(region.settings).items()), None)

    def _stop_rule(self) -> StopRule | None:
        if not self.search.early_stop:
            return None
        goal = self.objective.goals[0]
        able = [r for r in self._records if why_not(r, self.objective) is None and launched(r)]
        values = [value.value for record in able if (value := value_of(record, goal))]
        best = (max(values) if goal.maximize else min(values)) if values else None
        return StopRule(self.objective, best, self._effect_noise(), ceilings(able, goal))

    def _search_over(self) -> str | None:
        """Why the search has ended, None while it goes on."""
        budget = self.search.budget
        if budget.trials is not None and self._searched() >= budget.trials:
            return f"the budget of {budget.trials} trials is used"
        return self._time_is_up() or self._exhausted

    def _time_is_up(self) -> str | None:
        hours, gpu_hours = self.search.budget.hours, self.search.budget.gpu_hours
        if hours is None and gpu_hours is None:
            return None
        used = [sum(record.phases_s.values()) for record in self._records if launched(record)]
        reserve = self._closing_launches() * (sum(used) / len(used) if used else 0.0)
        elapsed = self._earlier_s + self._clock() - self._began + reserve
        if hours is not None and elapsed >= 3600 * hours:
            return f"the budget of {hours:g} hours is used, or needed for the confirmation"
        if gpu_hours is not None and (sum(used) + reserve) * self._gpus >= 3600 * gpu_hours:
            return f"the budget of {gpu_hours:g} GPU-hours is used, or needed for the confirmation"
        return None

    def _searched(self) -> int:
        done = sum(launched(r) and r.role in ("seed", "search") for r in self._records)
        return done + sum(p.role in ("seed", "search") for p in self._pending.values())

    def _closing_launches(self) -> int:
        """Launches that ablation and confirmation take, as far as is known now."""
        leader = self._leader()
        ablation = len(self._undone(leader)) + 2 if leader and self.search.ablate else 0
        return ablation + max(1, 3 * self.search.confirm_rounds)

    # -- closing

    def _opened(self) -> list[TrialRecord]:
        """The records before confirmation: what it decides must not move while it runs."""
        return [record for record in self._records if record.role != "confirm"]

    def _rows(self) -> list[Row]:
        """Configurations of the search that beat the baseline, best first."""
        rows = rank([r for r in self._opened() if r.role != "ablation"], self.objective)
        return [r for r in rows if r.reason is None and not r.is_baseline and r.gain is not None and r.gain > 0]

    def _leader(self) -> EngineConfig | None:
        for row in self._rows():
            launches = [r for r in self._opened() if r.config_id == row.config_id and launched(r)]
            if not any(why_not(record, self.objective) for record in launches):
                return launches[0].config
        return None

    def _undone(self, leader: EngineConfig) -> dict[str, EngineConfig]:
        """Per setting, the canonical configuration without it; settings that change nothing are left out."""
        found = {name: self._canonical(config) for name, config in undo(leader, self.baseline).items()}
        return {name: config for name, config in found.items() if config != leader}

    def _settled(self, name: str, config: EngineConfig) -> bool:
        """True when the ledger says what the configuration without the setting does."""
        mine: list[TrialRecord | Proposal] = [*self._records, *self._pending.values()]
        return any(r.role == "ablation" and r.undone == name and r.config_id == config.config_id for r in mine)

    def _launch_undone(self, name: str, config: EngineConfig) -> Proposal | None:
        broken, same = self._check(config), self._of(config.config_id)
        if broken:
            reason = f"{broken[0].rule}: {broken[0].reason}"
            self._note("ablation", config, "pruned", {}, reason=reason, undone=name)
        elif same:
            self._note("ablation", config, "reused", {}, reused_from=same[0].number, undone=name)
        else:
            return self._launch("ablation", config, undone=name)
        return None

    def _once(self, role: Role, config: EngineConfig) -> Proposal | Wait:
        running = any(p.role == role and p.config == config for p in self._pending.values())
        return Wait() if running else self._launch(role, config)

    def _simplified(self, leader: EngineConfig) -> tuple[EngineConfig | None, list[str]]:
        """The leader with every setting that did not earn its place at its default; None when all did."""
        dropped = [effect.setting for effect in self.effects() if not effect.kept]
        simple = self._canonical(without(leader, self.baseline, dropped))
        if not dropped or self._check(simple) or simple in (leader, self.baseline):
            return None, dropped
        return simple, dropped

    def _finalists(self) -> list[EngineConfig]:
        """The winner, simplified where that costs nothing beyond noise, and the runner-up."""
        leader = self._leader()
        if leader is None:
            return []
        rows = {row.config_id: row for row in rank(self._opened(), self.objective)}
        best = leader
        simple = self._simplified(leader)[0] if self.search.ablate else None
        if simple is not None and self._as_good(rows.get(simple.config_id)):
            best = simple
        others = [row for row in self._rows() if row.config_id not in (leader.config_id, best.config_id)]
        return [best] + [self._of(row.config_id)[0].config for row in others[:1]]

    def _as_good(self, row: Row | None) -> bool:
        """True when the simplified configuration is within noise of the freshly launched leader."""
        again = [r for r in self._opened() if r.role == "ablation" and r.undone is None]
        values = worth(self._opened(), self.objective.goals[0])
        if row is None or row.reason is not None or row.values[0] is None or again[-1].number not in values:
            return False
        behind = values[again[-1].number] / row.values[0].value - 1
        return (behind if self.objective.goals[0].maximize else -behind) <= self._effect_noise()

    def _effect_noise(self) -> float:
        return max(measure_noise(self._opened(), self.objective.goals[0]).floor or 0.0, ASSUMED_NOISE)

    def _first_round(self, done: Sequence[TrialRecord], lineup: set[str]) -> int:
        """The first round of this line-up; rounds of other finalists, from before an extension, do not count."""
        by_round: dict[int, set[str]] = {}
        for record in done:
            by_round.setdefault(record.round or 0, set()).add(record.config_id)
        fitting = [number for number, configs in by_round.items() if configs <= lineup]
        return min(fitting) if fitting else max(by_round, default=0) + 1

    # -- ledger

    def _of(self, config_id: str) -> list[TrialRecord]:
        return [r for r in self._records if r.config_id == config_id and launched(r)]

    def _launch(
        self,
        role: Role,
        config: EngineConfig,
        params: Point | None = None,
        *,
        undone: str | None = None,
        round_: int | None = None,
        node: str | None = None,
        stop_early: StopRule | None = None,
    ) -> Proposal:
        proposal = Proposal(self._free_number(), role, config, params or {}, undone, round_, node, stop_early)
        self._pending[proposal.number] = proposal
        self._known |= {_key(params)} if params else set()
        return proposal

    def _note(self, role: Role, config: EngineConfig, status: Status, params: Point, **more: Any) -> None:
        """Put a point that needs no launch into the ledger."""
        record = TrialRecord(
            study=self.study, number=self._free_number(), role=role, status=status, config=config,
            config_id=config.config_id, params=params, **more,
        )  # fmt: skip
        self._add(record)
        self._undelivered.append(record)

    def _add(self, record: TrialRecord) -> None:
        self._records.append(record)
        self._known |= {_key(record.params)} if record.params else set()

    def _free_number(self) -> int:
        """The lowest unused number, so that a trial lost in flight comes back under its own."""
        used = {record.number for record in self._records} | set(self._pending)
        return next(number for number in range(len(used) + 1) if number not in used)


def _key(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True, default=str)
