"""After the search: which configuration to ablate, what is left of it, and who is confirmed. Pure, from the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.ablation import Effect, differing, effects, undo, without
from pipeline.claims import decided, looks, make_claims
from pipeline.config import EngineConfig
from pipeline.goals import gain, launched, why_not, worth
from pipeline.records import TrialRecord
from pipeline.selection import ASSUMED_NOISE, Row, measure_noise, rank
from pipeline.spec import ObjectiveSpec


@dataclass(frozen=True)
class Closing:
    """A ledger, seen from the end of its search.

    Args:
        ledger: all records.
        spec: the study's goals and limits.
        baseline: the canonical baseline.
        launchable: whether no rule forbids a configuration.
        canonical: what the engine would make of a configuration.
        ablate: whether the leader is ablated at all.
    """

    ledger: Sequence[TrialRecord]
    spec: ObjectiveSpec
    baseline: EngineConfig
    launchable: Callable[[EngineConfig], bool]
    canonical: Callable[[EngineConfig], EngineConfig]
    ablate: bool = True

    @property
    def opened(self) -> list[TrialRecord]:
        """The records before confirmation: what they decide must not move while it runs."""
        return [record for record in self.ledger if record.role != "confirm"]

    @property
    def noise(self) -> float:
        """A difference of two launches that says nothing, as a share."""
        return max(measure_noise(self.opened, self.spec.goals[0]).floor or 0.0, ASSUMED_NOISE)

    def leader(self) -> EngineConfig | None:
        """The best configuration of the search; None where none comes near the baseline."""
        for row in self._challengers():
            launches = [r for r in self.opened if r.config_id == row.config_id and launched(r)]
            if not any(why_not(record, self.spec) for record in launches):
                return launches[0].config
        return None

    def _challengers(self) -> list[Row]:
        rows = rank([r for r in self.opened if r.role != "ablation"], self.spec)
        able = [row for row in rows if row.reason is None and not row.is_baseline]
        if not any(row.is_baseline and row.reason is None for row in rows):
            return able  # the baseline cannot win, so it need not be beaten
        # The baseline's own figure is one launch, partly luck: who comes close is let into the confirmation.
        return [row for row in able if row.gain is not None and row.gain > -2 * self.noise]

    def undone(self, leader: EngineConfig) -> dict[str, EngineConfig]:
        """Per setting, the canonical configuration without it; settings that change nothing are left out."""
        found = {name: self.canonical(config) for name, config in undo(leader, self.baseline).items()}
        return {name: config for name, config in found.items() if config != leader}

    def effects(self) -> tuple[Effect, ...]:
        """What each setting of the ablated configuration is worth."""
        return effects(self.ledger, self.spec, self.noise)

    def simplified(self, leader: EngineConfig) -> tuple[EngineConfig, list[str]] | None:
        """The leader without the settings that did not earn their place, and their names; None when all did."""
        dropped = self._dropped()
        simple = self._without(leader, dropped)
        if not dropped or simple in (leader, self.baseline) or not self.launchable(simple):
            return None
        return simple, dropped

    def finalists(self) -> list[EngineConfig]:
        """The winner, simplified where that costs nothing beyond noise, and the runner-up."""
        leader = self.leader()
        if leader is None:
            return []
        simple = self.simplified(leader) if self.ablate else None
        best = simple[0] if simple and self._as_good(simple[0]) else leader
        # A runner-up that differs by settings without effect would be the winner once more.
        dropped = self._dropped() if self.ablate else []
        by_id = {record.config_id: record.config for record in self.opened if launched(record)}
        others = [by_id[row.config_id] for row in self._challengers()]
        alike = {best, leader, self._without(best, dropped)}
        return [best, *[c for c in others if c not in alike and self._without(c, dropped) not in alike][:1]]

    def _dropped(self) -> list[str]:
        return [effect.setting for effect in self.effects() if not effect.kept]

    def _without(self, config: EngineConfig, names: Sequence[str]) -> EngineConfig:
        return self.canonical(without(config, self.baseline, names))

    def _as_good(self, simple: EngineConfig) -> bool:
        """True when the simplified configuration is within noise of the freshly launched leader."""
        row = next((r for r in rank(self.opened, self.spec) if r.config_id == simple.config_id), None)
        again = [r.number for r in self.opened if r.role == "ablation" and r.undone is None]
        values = worth(self.opened, self.spec.goals[0])
        if row is None or row.reason is not None or row.values[0] is None or max(again) not in values:
            return False
        return gain(values[max(again)], row.values[0].value, self.spec.goals[0]) <= self.noise

    def next_confirmation(self, rounds: int) -> tuple[EngineConfig, int] | None:
        """The next launch of the confirmation and its round; None when it is complete.

        Each round launches the finalists and the baseline; every other round turns the order round, which
        cancels a steady drift. The last launch of all is the baseline's, also without finalists. Where a pair of
        rounds has settled the matter, the others are saved.
        """
        finalists = self.finalists() if rounds else []
        lineup, count = [*finalists, self.baseline], rounds if finalists else 1
        first = self._first_round({config.config_id for config in lineup})
        for turn in range(count):
            if turn in looks(rounds) and self._settled(finalists, first + turn):
                return None
            for config in lineup if (count - 1 - turn) % 2 == 0 else lineup[::-1]:
                if self._to_confirm(config, first + turn):
                    return config, first + turn
        return None

    def _settled(self, finalists: Sequence[EngineConfig], upcoming: int) -> bool:
        """True when the rounds before `upcoming` suffice; once it has begun, it is also completed."""
        confirmations = [record for record in self.ledger if record.role == "confirm"]
        if any(record.round is not None and record.round >= upcoming for record in confirmations):
            return False
        if all(self._lost(config) for config in finalists):
            return True
        settings = {config.config_id: len(differing(config, self.baseline)) for config in finalists}
        claims = make_claims(self.ledger, self.spec, measure_noise(self.ledger, self.spec.goals[0]).floor)
        return decided([claim for claim in claims if claim.config_id in settings], settings)

    def _to_confirm(self, config: EngineConfig, number: int) -> bool:
        lost = config != self.baseline and self._lost(config)
        return not lost and all(record.round != number for record in self._confirmations(config))

    def _lost(self, config: EngineConfig) -> bool:
        return any(why_not(record, self.spec) for record in self._confirmations(config))

    def _confirmations(self, config: EngineConfig) -> list[TrialRecord]:
        return [r for r in self.ledger if r.role == "confirm" and r.config_id == config.config_id]

    def _first_round(self, lineup: set[str]) -> int:
        """The first round of this line-up.

        A round from before an extension of the search counts only if the very same were launched in it: a new finalist
        would otherwise be paired with a baseline of another time.
        """
        by_round: dict[int, set[str]] = {}
        earlier: set[int] = set()
        for record in self.ledger:
            if record.role == "confirm" and record.round is not None:
                by_round.setdefault(record.round, set()).add(record.config_id)
            elif launched(record):
                earlier |= by_round.keys()
        fitting = [n for n, seen in by_round.items() if seen == lineup or (seen < lineup and n not in earlier)]
        return min(fitting) if fitting else max(by_round, default=0) + 1
