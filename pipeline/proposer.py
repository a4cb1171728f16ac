"""What to try next: baseline, seeds, sampler, ablation, confirmation.

The ledger of records is the only state: each phase works out from it what is still missing, so a run that was
killed anywhere goes on where it was, and the offline benchmarks replay the very code that Ray Tune drives.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.ablation import TOGETHER, Effect, settings_of
from pipeline.closing import Closing
from pipeline.config import EngineConfig
from pipeline.goals import StopRule, launched, value_of, why_not
from pipeline.lessons import LeftRegion, busy_seconds, left_regions, observations
from pipeline.records import Role, Status, TrialRecord
from pipeline.sampling import Point, Sampler, Space, point_of
from pipeline.spec import ObjectiveSpec, SearchSpec

BASELINE_TRIES = 2
MODEL_DRAWS = 25  # of these in a row already known, random draws take over from the model
RANDOM_DRAWS = 400  # of these in a row already known, the space counts as exhausted


class Violated(Protocol):
    """A broken rule (`pipeline.rules.Violation`)."""

    def text(self) -> str: ...


@dataclass(frozen=True)
class Proposal:
    """One launch to make. `facts` belong into its record; `node` is where it must run, None is anywhere."""

    number: int
    role: Role
    config: EngineConfig
    params: Point = field(default_factory=dict)
    undone: str | None = None
    round: int | None = None
    of_rounds: int | None = None
    node: str | None = None
    stop_early: StopRule | None = None

    @property
    def config_id(self) -> str:
        """Names the configuration."""
        return self.config.config_id

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of the record that only the proposer knows."""
        return {"undone": self.undone, "round": self.round, "of_rounds": self.of_rounds}


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
        maximize = tuple(goal.maximize for goal in objective.goals)
        self._sampler = Sampler(space, search.sampler, search.seed, search.startup_trials, maximize, self._describe)
        self._sequence = (
            self._sampler if self._sampler.is_sequence else Sampler(space, "random", search.seed)
        ).sequence()
        self._described: dict[str, Mapping[str, Any]] = {}
        self._regions: tuple[LeftRegion, ...] | None = None  # kept until the next record
        self._exhausted: str | None = None
        self._time_up: str | None = None
        self._finished = False
        self._noted: set[tuple[Any, ...]] = {(r.status, r.reason, r.reused_from) for r in self._records}
        self._stated_baseline = canonical(space.baseline())

    # -- what callers use

    @property
    def baseline(self) -> EngineConfig:
        """The baseline, as it was measured: its second try may have moved the memory fraction."""
        goal = self.objective.goals[0]
        measured = (r.config for r in self._records if r.role == "baseline" and value_of(r, goal))
        return next(measured, self._stated_baseline)

    def propose(self) -> Proposal | Wait | Done:
        """The next launch, or why there is none now."""
        phases = (self._baseline, self._references, self._seeds, self._search, self._ablation, self._confirmation)
        for phase in phases:
            answer = phase()
            if answer is not None:
                return answer
        self._finished = True
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
        if self._regions is None:
            self._regions = left_regions(self._records)
        return self._regions

    def effects(self) -> tuple[Effect, ...]:
        """What each setting of the ablated configuration is worth."""
        return self._view().effects()

    def launches_left(self) -> int | None:
        """About how many launches are still to come, for an ETA; None where the budget does not say."""
        trials = self.search.budget.trials
        if self._finished:
            return 0
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
        view = self._view()
        leader = view.leader() if self.search.ablate else None
        if leader is None:
            return None
        if not self._ablated(leader, None):
            return self._launch("ablation", leader)
        for name, config in view.undone(leader).items():
            proposal = None if self._ablated(config, name) else self._undo(config, name)
            if proposal:
                return proposal
        if self._pending:
            return Wait()
        simple = view.simplified(leader)
        if simple is None or self._of(simple[0].config_id):
            return None
        return self._launch("ablation", simple[0], self._point(simple[0]), undone=TOGETHER.join(simple[1]))

    def _ablated(self, config: EngineConfig, name: str | None) -> bool:
        """True when the ledger has, or will have, the configuration without that setting."""
        ours: list[TrialRecord | Proposal] = [*self._records, *self._pending.values()]
        return any(r.role == "ablation" and r.undone == name and r.config_id == config.config_id for r in ours)

    def _undo(self, config: EngineConfig, name: str) -> Proposal | None:
        if broken := self._check(config):
            self._note("ablation", config, "pruned", {}, reason=broken[0].text(), undone=name)
        elif same := self._of(config.config_id):
            self._note("ablation", config, "reused", {}, reused_from=same[0].number, undone=name)
        else:
            return self._launch("ablation", config, self._point(config), undone=name)
        return None

    def _point(self, config: EngineConfig) -> Point:
        """Its point: should a simpler configuration win, a later study begins with it."""
        return point_of(self.space, config, self._canonical)

    def _confirmation(self) -> Proposal | Wait | None:
        if self._pending:
            return Wait()  # in turns: the launches of a round are comparable because nothing else ran
        rounds = self.search.confirm_rounds
        found = self._view().next_confirmation(rounds)
        return self._launch("confirm", found[0], round=found[1], of_rounds=rounds) if found else None

    # -- search

    def _draw(self) -> Proposal | None:
        for point in self._draws():
            proposal = None if _key(point) in self._known else self._admit(point, "search")
            if proposal:
                return proposal
        grid = self.search.sampler == "grid"
        self._exhausted = (
            "every point of the grid was tried"
            if grid
            else f"the space is exhausted: {RANDOM_DRAWS} random draws in a row gave nothing new"
        )
        return None

    def _draws(self) -> Iterator[Point]:
        """Points to try, best first: the model's own, then random ones in case those are all known."""
        if not self._sampler.is_sequence:
            in_flight = [proposal.params for proposal in self._pending.values() if proposal.params]
            seen = observations(self._records, self.objective)
            yield from itertools.islice(self._sampler.points(seen, in_flight, self._free_number()), MODEL_DRAWS)
        yield from itertools.islice(self._sequence, None if self.search.sampler == "grid" else RANDOM_DRAWS)

    def _admit(self, params: Point, role: Role) -> Proposal | None:
        """A launch for the point, or a record that says why it needs none."""
        config = self.space.config(params)
        broken = self._check(config)
        if broken:
            self._note(role, config, "pruned", params, reason=broken[0].text())
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

    def _describe(self, params: Point) -> Mapping[str, Any]:
        """The settings that the engine would make of a point."""
        key = _key(params)
        if key not in self._described:
            self._described[key] = settings_of(self._canonical(self.space.config(params)))
        return self._described[key]

    def _stop_rule(self) -> StopRule | None:
        if not self.search.early_stop:
            return None
        goal = self.objective.goals[0]
        able = [r for r in self._records if r.status == "ok" and why_not(r, self.objective) is None]
        values = [value.value for record in able if (value := value_of(record, goal))]
        best = (max(values) if goal.maximize else min(values)) if values else None
        finished = tuple(record.measurement.levels for record in able if record.measurement)
        return StopRule(self.objective, best, self._view().noise, finished)

    def _search_over(self) -> str | None:
        """Why the search has ended, None while it goes on."""
        budget = self.search.budget
        if budget.trials is not None and self._searched() >= budget.trials:
            return f"the budget of {budget.trials} trials is used"
        # Kept once said: a mean that falls while the study closes must not reopen the search.
        self._time_up = self._time_up or self._time_is_up()
        return self._time_up or self._exhausted

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
        """Launches that ablation and confirmation take in all, as far as is known now."""
        view = self._view()
        leader = view.leader() if self.search.ablate else None
        ablation = len(view.undone(leader)) + 2 if leader else 0
        return ablation + max(1, 3 * self.search.confirm_rounds)

    def _view(self) -> Closing:
        return Closing(
            self._records, self.objective, self.baseline, lambda config: not self._check(config), self._canonical,
            self.search.ablate,
        )  # fmt: skip

    # -- ledger

    def _of(self, config_id: str) -> list[TrialRecord]:
        return [r for r in self._records if r.config_id == config_id and launched(r)]

    def _launch(self, role: Role, config: EngineConfig, params: Point | None = None, **more: Any) -> Proposal:
        proposal = Proposal(self._free_number(), role, config, params or {}, **more)
        self._pending[proposal.number] = proposal
        self._known |= {_key(params)} if params else set()
        return proposal

    def _note(self, role: Role, config: EngineConfig, status: Status, params: Point, **more: Any) -> None:
        """Put a point that needs no launch into the ledger; of the search's own, the first for each reason."""
        why = (status, more.get("reason"), more.get("reused_from"))
        if role == "search" and why in self._noted:
            self._known.add(_key(params))
            return
        self._noted.add(why)
        record = TrialRecord(
            study=self.study, number=self._free_number(), role=role, status=status, config=config,
            config_id=config.config_id, params=params, **more,
        )  # fmt: skip
        self._add(record)
        self._undelivered.append(record)

    def _add(self, record: TrialRecord) -> None:
        self._records.append(record)
        self._regions = None
        self._known |= {_key(record.params)} if record.params else set()

    def _free_number(self) -> int:
        """The lowest unused number, so that a trial lost in flight comes back under its own."""
        used = {record.number for record in self._records} | set(self._pending)
        return next(number for number in range(len(used) + 1) if number not in used)


def _key(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True, default=str)
