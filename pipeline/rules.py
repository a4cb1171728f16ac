"""SGLang's validity and rewrite rules for a configuration, a release and a machine. Pure.

The rules themselves are data: `rule_validity.py` (what is refused) and `rule_rewrites.py` (what is
changed). Unknown facts about the machine or the model's class keep a setting alive.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from pipeline.config import EngineConfig, Frozen
from pipeline.records import Topology
from pipeline.rule_facts import Facts, Rewrite, Rule, Source, holds, release_numbers
from pipeline.rule_rewrites import REWRITES
from pipeline.rule_validity import RULES, WARNINGS

__all__ = ["NAMES", "Canonical", "Examined", "Violation", "canonical", "check", "examine", "lossy", "warnings"]

NAMES = tuple(rule.name for rule in RULES)
_EXACT_KV_CACHES = (None, "auto", "bf16", "bfloat16")
_LOSSY_FLAGS = (
    "--speculative-accept-threshold-single", "--speculative-accept-threshold-acc", "--enable-quant-communications",
    "--kv-cache-dtype",
)  # fmt: skip


class Violation(Frozen):
    """A rule that a configuration breaks: what was seen, why it matters, how that is known."""

    rule: str
    seen: str
    reason: str
    source: Source

    def text(self) -> str:
        """One line for tables and records."""
        return f"{self.rule}: {self.seen}: {self.reason} ({self.source})"


class Canonical(Frozen):
    """What the engine would make of a configuration; equal ones are one launch."""

    config: EngineConfig
    rewrites: tuple[str, ...] = ()


def check(
    config: EngineConfig, release: str | None, topology: Topology, architecture: str | None = None
) -> tuple[Violation, ...]:
    """Rules that `config` breaks; empty means launchable.

    Args:
        config: as asked, before SGLang's rewrites.
        release: SGLang's version, None for the newest one known.
        topology: the machine; unknown facts break nothing.
        architecture: the model's class, such as `Qwen3MoeForCausalLM`, where known.
    """
    return _broken(RULES, _resolve(config, release, topology, architecture)[0])


def warnings(
    config: EngineConfig, release: str | None, topology: Topology, architecture: str | None = None
) -> tuple[Violation, ...]:
    """Risks of a launchable configuration that the record should carry."""
    return _broken(WARNINGS, _resolve(config, release, topology, architecture)[0])


class Examined(NamedTuple):
    """All that the rules say of one configuration."""

    violations: tuple[Violation, ...]
    warnings: tuple[Violation, ...]
    canonical: Canonical


def examine(config: EngineConfig, release: str | None, topology: Topology, architecture: str | None = None) -> Examined:
    """`check`, `warnings` and `canonical` at once, for many configurations."""
    facts, rewrites = _resolve(config, release, topology, architecture)
    resolved = Canonical(config=facts.config, rewrites=rewrites)
    return Examined(_broken(RULES, facts), _broken(WARNINGS, facts), resolved)


def _broken(rules: tuple[Rule, ...], facts: Facts) -> tuple[Violation, ...]:
    found = ((rule, rule.broken(facts)) for rule in rules if holds(rule, facts.asked.engine, facts.release))
    return tuple(
        Violation(rule=rule.name, seen=seen, reason=rule.reason, source=rule.source) for rule, seen in found if seen
    )


def canonical(
    config: EngineConfig, release: str | None, topology: Topology, architecture: str | None = None
) -> Canonical:
    """What the engine would make of `config`, and each rewrite in words. Applying it twice changes nothing more."""
    facts, rewrites = _resolve(config, release, topology, architecture)
    return Canonical(config=facts.config, rewrites=rewrites)


def lossy(name: str, value: Any) -> str | None:
    """Why a flat setting changes the model's output, or None where it does not."""
    field = name.rpartition(".")[2]
    if field.startswith("accept_threshold_") and value is not None and value < 1:
        return "an accept threshold below 1 accepts tokens that the model would not choose"
    if field == "quant_communications" and value is True:
        return "the ranks exchange INT8"
    if field == "kv_cache_dtype" and value not in _EXACT_KV_CACHES:
        return "the KV cache is rounded"
    if name == "env.SGLANG_SIMULATE_ACC_LEN" and value not in (None, "-1"):
        return "the accept length is made up and the text is garbage"
    if name == "extra_args":
        return next((f"{flag} does" for flag in _LOSSY_FLAGS for word in value if word.partition("=")[0] == flag), None)
    return None


def _resolve(
    config: EngineConfig, release: str | None, topology: Topology, architecture: str | None
) -> tuple[Facts, tuple[str, ...]]:
    facts = Facts(config, config, release_numbers(release), topology, architecture)
    words: list[str] = []
    for rewrite in REWRITES:
        if holds(rewrite, config.engine, facts.release):
            changes = {name: new for name, new in rewrite.changes(facts).items() if _get(facts.config, name) != new}
            if changes:
                words += _in_words(rewrite, facts.config, changes)
                facts = replace(facts, config=_changed(facts.config, changes))
    return facts, tuple(words)


def _in_words(rewrite: Rewrite, config: EngineConfig, changes: dict[str, Any]) -> list[str]:
    """Say only what overrules something stated: a default filled in surprises nobody."""
    stated = [
        (name, _get(config, name), new) for name, new in changes.items() if _get(config, name) not in (None, False)
    ]
    return [f"{name} {old} -> {'not used' if new is None else new}: {rewrite.reason}" for name, old, new in stated]


def _get(config: EngineConfig, name: str) -> Any:
    group, _, field = name.rpartition(".")
    return getattr(getattr(config, group) if group else config, field)


def _changed(config: EngineConfig, changes: dict[str, Any]) -> EngineConfig:
    top: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, new in changes.items():
        group, _, field = name.rpartition(".")
        (groups.setdefault(group, {}) if group else top)[field] = new
    for group, values in groups.items():
        top[group] = getattr(config, group).model_copy(update=values)
    return config.model_copy(update=top)
