"""May a configuration become the champion? The gates, as data and arithmetic. Pure.

Every gate says what it saw, so that a refusal tells what to do next. A forced promotion passes through
the same gates and records which of them it ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.api_matrix import MatrixResult
from pipeline.claims import Claim, make_claims
from pipeline.config import Frozen
from pipeline.goals import why_not
from pipeline.records import TrialRecord
from pipeline.selection import measure_noise
from pipeline.spec import Constraints, ObjectiveSpec

FASTER, LIMITS, LOSSLESS, API, SOAK = "faster than the incumbent", "limits", "lossless", "API matrix", "soak"
STANDS = "this configuration is the champion already"


class Gate(Frozen):
    """One condition: whether it holds, and what was seen."""

    name: str
    passed: bool
    seen: str

    def line(self) -> str:
        """For a report."""
        return f"{'ok  ' if self.passed else 'NO  '} {self.name}: {self.seen}"


class Evidence(Frozen):
    """What a promotion measured.

    `launches` are those of winner and incumbent, in the order in which they were made; `incumbent` is
    the champion's config_id, or the baseline's while there is no champion.
    """

    winner: str
    incumbent: str
    has_champion: bool
    launches: tuple[TrialRecord, ...]
    matrix: MatrixResult | None = None
    soak: Gate | None = None


class Decision(Frozen):
    """The outcome.

    `promote` is the config_id to promote, None to leave everything as it is: because a gate refused, or because
    the configuration is the champion already (`stands`).
    """

    promote: str | None
    reason: str
    gates: tuple[Gate, ...] = ()
    claim: Claim | None = None
    forced: bool = False
    stands: bool = False

    def lines(self) -> list[str]:
        """The gates, then the outcome, a line each."""
        return [*(gate.line() for gate in self.gates), self.reason]


def decide(evidence: Evidence, spec: ObjectiveSpec, *, force: bool = False) -> Decision:
    """Apply every gate.

    Without a champion the best lossless configuration is promoted, and that may be the baseline.
    """
    if evidence.winner == evidence.incumbent:
        return _baseline(evidence, spec, "the study's winner is the baseline itself", (), None)
    claim = compare(evidence, spec)
    gates = (_faster(claim), *own_gates(evidence, evidence.winner, spec))
    failed = [gate.name for gate in gates if not gate.passed]
    if not failed:
        return Decision(promote=evidence.winner, reason="promoted: every gate holds", gates=gates, claim=claim)
    if force:
        reason = f"promoted by force, against: {', '.join(failed)}"
        return Decision(promote=evidence.winner, reason=reason, gates=gates, claim=claim, forced=True)
    refused = f"not promoted: {', '.join(failed)}"
    if evidence.has_champion:
        return Decision(promote=None, reason=f"{refused}; the champion stays", gates=gates, claim=claim)
    return _baseline(evidence, spec, refused, gates, claim)


def _baseline(
    evidence: Evidence, spec: ObjectiveSpec, why: str, gates: tuple[Gate, ...], claim: Claim | None
) -> Decision:
    """There is no champion: the baseline is promoted, if nothing speaks against it either."""
    if evidence.has_champion:
        return Decision(promote=None, reason=STANDS, gates=gates, claim=claim, stands=True)
    own = own_gates(evidence, evidence.incumbent, spec)
    failed = [gate.name for gate in own if not gate.passed]
    if failed:
        reason = f"{why}; there is no champion, and the baseline may not become one: {', '.join(failed)}"
        return Decision(promote=None, reason=reason, gates=(*gates, *own), claim=claim)
    reason = f"{why}; there is no champion yet, so the baseline is promoted: the best lossless configuration"
    return Decision(promote=evidence.incumbent, reason=reason, gates=gates or own, claim=claim)


def compare(evidence: Evidence, spec: ObjectiveSpec) -> Claim | None:
    """The winner against the incumbent over the rounds; None when too few launches gave figures."""
    # Limits and losslessness have gates of their own: here a slow or a wrong winner is compared all the same.
    bare = {"lossless": None, "broken": (), "role": "confirm"}
    launches = [record.model_copy(update=bare) for record in evidence.launches]
    incumbent = [record for record in launches if record.config_id == evidence.incumbent]
    if not incumbent:
        return None
    # The comparison holds confirmation launches against the configuration of the record marked as baseline.
    records = [incumbent[0].model_copy(update={"role": "baseline"}), *launches]
    unlimited = ObjectiveSpec(goals=spec.goals, constraints=Constraints(error_rate=1.0))
    claims = make_claims(records, unlimited, measure_noise(launches, spec.goals[0]).floor)
    return next((claim for claim in claims if claim.config_id == evidence.winner), None)


def _faster(claim: Claim | None) -> Gate:
    if claim is None:
        return Gate(name=FASTER, passed=False, seen="too few launches gave figures to compare")
    return Gate(name=FASTER, passed=claim.verdict == "better", seen=f"{claim.verdict}, {claim.text}")


def own_gates(evidence: Evidence, config_id: str, spec: ObjectiveSpec) -> tuple[Gate, ...]:
    """What a configuration must hold whatever it is compared with."""
    launches = [record for record in evidence.launches if record.config_id == config_id]
    gates = [_limits(launches, spec), _lossless(launches)]
    if config_id == evidence.winner and evidence.matrix is not None:
        gates.append(_api(evidence.matrix))
    if config_id == evidence.winner and evidence.soak is not None:
        gates.append(evidence.soak)
    return tuple(gates)


def _limits(launches: Sequence[TrialRecord], spec: ObjectiveSpec) -> Gate:
    """Every launch has figures within the limits; the lossless check has its own gate."""
    bare = [record.model_copy(update={"lossless": None}) for record in launches]
    broken = [f"launch {record.number}: {why}" for record in bare if (why := why_not(record, spec))]
    passed = bool(launches) and not broken
    return Gate(name=LIMITS, passed=passed, seen="; ".join(broken) or f"held in {len(launches)} launches")


def _lossless(launches: Sequence[TrialRecord]) -> Gate:
    checked = [record.lossless for record in launches if record.lossless is not None]
    bad = [result for result in checked if not result.passed]
    if not checked:
        return Gate(name=LOSSLESS, passed=False, seen="no greedy outputs to check")
    if bad:
        return Gate(name=LOSSLESS, passed=False, seen=bad[0].corruption or f"{bad[0].wrong} wrong outputs")
    same, numerics = sum(result.identical for result in checked), sum(result.numerics for result in checked)
    return Gate(name=LOSSLESS, passed=True, seen=f"{same} outputs identical, {numerics} rounding flips")


def _api(matrix: MatrixResult) -> Gate:
    if not matrix.passed:
        first = matrix.differences[0]
        seen = f"{first.probe}: the baseline answers {first.baseline}, the winner {first.winner}"
        return Gate(name=API, passed=False, seen=f"{len(matrix.differences)} probes differ; {seen}")
    seen = f"{len(matrix.probes)} probes alike"
    return Gate(name=API, passed=True, seen=f"{seen}; refused by both: {'; '.join(matrix.lacking) or 'nothing'}")


def soak_gate(throughputs: Sequence[float], errors: int, seconds: float, tolerance: float) -> Gate:
    """A long run with the load ramping up and down: no errors, and the end as fast as the start.

    Args:
        throughputs: output_tok_per_s of the full-load stretches, in time order.
        errors: requests that failed.
        tolerance: share that the last may fall below the first.
    """
    seen = f"{seconds / 60:.1f} min, {errors} errors"
    if not throughputs:
        return Gate(name=SOAK, passed=False, seen=f"{seen}, no figures")
    kept = throughputs[-1] / throughputs[0] - 1
    passed = errors == 0 and kept >= -tolerance
    return Gate(name=SOAK, passed=passed, seen=f"{seen}, {kept:+.1%} from first to last full load")
