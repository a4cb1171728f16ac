"""What is to be promoted: a study's winner, or one trial of it by its MLflow run; and who holds the place now."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipeline.config import EngineConfig
from pipeline.errors import InputError, PromotionError
from pipeline.selection import select
from pipeline.spec import ObjectiveSpec
from pipeline.store import Study

if TYPE_CHECKING:
    from pipeline.engine_space import Space
    from pipeline.records import TrialRecord
    from pipeline.registry import Registry


RUN_ID = "[0-9a-f]{32}"  # MLflow's


@dataclass(frozen=True)
class Candidate:
    """A configuration with the study that it comes from. `why` is what the study says for it."""

    study: Study
    space: Space
    objective: ObjectiveSpec
    config: EngineConfig
    why: str

    @property
    def baseline(self) -> EngineConfig:
        """The study's own baseline, as it was launched."""
        found = next((r.config for r in self.study.records() if r.role == "baseline"), None)
        return found or self.space.baseline()


def find_candidate(name: str, runs: Path, uri: str) -> Candidate:
    """Look up a study by folder or name, or a trial by the id of its MLflow run.

    Raises:
        InputError: neither is there, or the study's folder is not on this machine.
        PromotionError: the study has no winner, or the trial may not win.
    """
    study, number = _find(name, runs, uri)
    space, objective = study_space(study), _objective(study)
    records = study.records()
    if number is not None:
        return Candidate(study, space, objective, _one(records, number).config, f"trial {number} of {study.name}")
    selection = select(records, objective)
    if selection.winner is None:
        raise PromotionError(f"{study.name} has no winner: {selection.reason}")
    winner = _one(records, selection.winner.trials[0])
    return Candidate(study, space, objective, winner.config, f"winner of {study.name}: {selection.reason}")


def _find(name: str, runs: Path, uri: str) -> tuple[Study, int | None]:
    from pipeline.mlflow_trial import STUDY_TAG
    from pipeline.tracking import TRIAL_TAG

    if not re.fullmatch(RUN_ID, name):
        return Study.open(name, runs), None
    from pipeline.registry import run_tags

    tags = run_tags(uri, name)
    if STUDY_TAG not in tags:
        raise InputError(f"the MLflow run {name} belongs to no study")
    trial = tags.get(TRIAL_TAG, "")
    return Study.open(tags[STUDY_TAG], runs), int(trial) if trial.isdigit() else None


def _one(records: list[TrialRecord], number: int) -> TrialRecord:
    found = next((record for record in records if record.number == number), None)
    if found is None:
        raise InputError(f"the study has no trial {number}")
    return found


def study_space(study: Study) -> Space:
    """The space that a study searched, with the overrides that it was started with."""
    from pipeline.space import Overrides, load_space

    facts = study.facts
    stated = {name: tuple(v) if isinstance(v, list) else v for name, v in facts.get("overrides", {}).items()}
    overrides = Overrides(**cast("Any", stated))
    return load_space(study.space_file, overrides).for_engine(facts["engine"])


def _objective(study: Study) -> ObjectiveSpec:
    from pipeline.report import study_objective

    return study_objective(study)


@dataclass(frozen=True)
class Incumbent:
    """The champion at the moment; None everywhere while there is none."""

    config: EngineConfig | None = None
    version: int | None = None


def find_incumbent(registry: Registry, champion_file: Path) -> Incumbent:
    """The registered champion, as it is launched on this machine.

    The registry holds it without this machine's paths; the local file, where it is the same one, has them.
    """
    from pipeline.registry import CHAMPION
    from serve.portable import localized, portable
    from serve.service import Service

    version = registry.by_alias(CHAMPION)
    if version is None:
        return Incumbent()
    registered = Service.parse(registry.service(version), f"models:/{version.name}/{version.version}").spec.config
    if champion_file.is_file():
        local = Service.read(champion_file).spec.config
        if portable(local) == registered:
            return Incumbent(local, version.version)
    return Incumbent(localized(registered), version.version)
