"""Undo a configuration's settings one at a time, and judge which of them earn their place. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pipeline.config import EngineConfig, Frozen, NoSpeculation
from pipeline.goals import gain, why_not, worth
from pipeline.records import TrialRecord
from pipeline.spec import ObjectiveSpec

TOGETHER = ", "  # joins the names in `undone` of the configuration without all settings that did not earn their place

# SGLang asserts that the three are stated together or not at all.
DRAFT_SHAPE = ("num_steps", "eagle_topk", "num_draft_tokens")
_NOT_SETTINGS = {"engine", "model", "tensor_parallel_size", "speculation", "collectives"}
_NEEDED = {"algorithm", "draft_model"}  # a drafter without its model is another launch failure, not a setting


class Effect(Frozen):
    """What undoing one setting did. `gain` is the setting's own share of the winner's value."""

    setting: str
    value: str
    config_id: str  # of the configuration without the setting
    gain: float | None = None
    kept: bool
    reason: str


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """Every stated setting under its flat name, such as `speculation.NGRAM.num_draft_tokens`."""
    flat = config.model_dump(mode="json", exclude_none=True, exclude={"speculation", "collectives", "env"})
    flat = {name: tuple(value) if isinstance(value, list) else value for name, value in flat.items()}
    flat |= {f"collectives.{key}": value for key, value in config.collectives.model_dump(exclude_none=True).items()}
    flat |= {f"env.{name}": value for name, value in config.env}
    speculation = config.speculation.model_dump(exclude_none=True)
    algorithm = speculation.pop("algorithm")
    return flat | {"speculation": algorithm} | {f"speculation.{algorithm}.{k}": v for k, v in speculation.items()}


def undo(config: EngineConfig, baseline: EngineConfig) -> dict[str, EngineConfig]:
    """One configuration per setting that differs from the baseline, with just that setting undone.

    The speculation algorithm as a whole is one setting, and so is each of its parameters: those go back
    to the algorithm's own default.
    """
    return {name: without(config, baseline, (name,)) for name in differing(config, baseline)}


def without(config: EngineConfig, baseline: EngineConfig, names: Iterable[str]) -> EngineConfig:
    """`config` with the named settings back at the baseline's value."""
    names = tuple(names)
    top: dict[str, Any] = {n: getattr(baseline, n) for n in names if n in EngineConfig.model_fields}
    collectives = {n: getattr(baseline.collectives, n) for n in _under("collectives.", names)}
    if collectives:
        top["collectives"] = config.collectives.model_copy(update=collectives)
    if "speculation" not in names and (drafting := _under("speculation.", names)):
        top["speculation"] = _default_drafting(config, baseline, drafting)
    env = _under("env.", names)
    if env:
        top["env"] = tuple(pair for pair in config.env if pair[0] not in env) + tuple(
            pair for pair in baseline.env if pair[0] in env
        )
    return config.model_copy(update=top)


def value_text(config: EngineConfig, name: str) -> str:
    """The setting's value in words."""
    if name == "speculation.shape":
        return "/".join(str(getattr(config.speculation, field)) for field in DRAFT_SHAPE)
    settings = settings_of(config)
    algorithm = settings["speculation"]
    return str(settings.get(name.replace("speculation.", f"speculation.{algorithm}.", 1), settings.get(name)))


def _under(prefix: str, names: Iterable[str]) -> list[str]:
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def differing(config: EngineConfig, baseline: EngineConfig) -> list[str]:
    """Names of the settings in which the two differ, speculation first."""
    top = [n for n in EngineConfig.model_fields if n not in _NOT_SETTINGS | {"env"} and _differ(config, baseline, n)]
    collectives = [
        f"collectives.{name}"
        for name in type(config.collectives).model_fields
        if _differ(config.collectives, baseline.collectives, name)
    ]
    env = [f"env.{name}" for name in sorted({name for name, _ in set(config.env) ^ set(baseline.env)})]
    return _drafting(config, baseline) + collectives + top + env


def _differ(a: object, b: object, name: str) -> bool:
    return bool(getattr(a, name) != getattr(b, name))


def _drafting(config: EngineConfig, baseline: EngineConfig) -> list[str]:
    """The settings of speculation: the algorithm, then its parameters, tied ones as `speculation.shape`."""
    ours, default = config.speculation, _default_of(config, baseline)
    if isinstance(ours, NoSpeculation):
        return [] if ours == baseline.speculation else ["speculation"]
    fields = [name for name in type(ours).model_fields if name not in _NEEDED and _differ(ours, default, name)]
    shape = hasattr(ours, "num_steps")
    names = ["shape" if shape and name in DRAFT_SHAPE else name for name in fields]
    whole = [] if ours.algorithm == baseline.speculation.algorithm else ["speculation"]
    return whole + [f"speculation.{name}" for name in dict.fromkeys(names)]


def _default_of(config: EngineConfig, baseline: EngineConfig) -> Any:
    if config.speculation.algorithm == baseline.speculation.algorithm:
        return baseline.speculation
    return type(config.speculation).model_validate({"algorithm": config.speculation.algorithm})


def _default_drafting(config: EngineConfig, baseline: EngineConfig, names: list[str]) -> Any:
    default = _default_of(config, baseline)
    fields = {field for name in names for field in (DRAFT_SHAPE if name == "shape" else (name,))}
    ours = fields & set(type(config.speculation).model_fields)  # another algorithm's settings are not there to undo
    return config.speculation.model_copy(update={field: getattr(default, field) for field in ours})


def effects(records: Sequence[TrialRecord], spec: ObjectiveSpec, noise: float) -> tuple[Effect, ...]:
    """Which settings of the ablated configuration stay, from the ledger alone.

    The last ablation record without `undone` is the configuration itself, launched afresh: what chose it was
    partly luck, so its first figure would make every setting look useful.

    Args:
        records: the ledger.
        spec: the study's goals and limits.
        noise: settings that gain no more than this share go back.
    """
    ablated = sorted((r for r in records if r.role == "ablation"), key=lambda r: r.number)
    whole = next((r for r in reversed(ablated) if r.undone is None), None)
    if whole is None:
        return ()
    values, goal = worth(records, spec.goals[0]), spec.goals[0]
    by_number = {record.number: record for record in records}
    found = []
    for record in ablated:
        if record.number < whole.number or record.undone is None or TOGETHER in record.undone:
            continue
        launch = by_number.get(record.reused_from if record.reused_from is not None else record.number, record)
        unable = record.reason if record.status == "pruned" else why_not(launch, spec)
        if unable is None and whole.number in values:
            found.append(_effect(whole.config, record, gain(values[whole.number], values[launch.number], goal), noise))
        else:
            found.append(_effect(whole.config, record, unable or "there are no figures to compare", noise))
    return tuple(found)


def _effect(config: EngineConfig, record: TrialRecord, gained: float | str, noise: float) -> Effect:
    name = record.undone or ""

    def effect(kept: bool, reason: str, share: float | None = None) -> Effect:
        value = value_text(config, name)
        return Effect(setting=name, value=value, config_id=record.config_id, gain=share, kept=kept, reason=reason)

    if isinstance(gained, str):
        return effect(True, f"kept: without it, {gained}")
    if gained > noise:
        return effect(True, f"kept: gains {gained:.1%}, noise {noise:.1%}", gained)
    why = f"{gained:+.1%} is within noise ({noise:.1%})" if gained > -noise else f"it costs {-gained:.1%}"
    return effect(False, f"back to its default: {why}", gained)
