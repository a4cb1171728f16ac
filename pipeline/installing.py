"""Puts a decided champion in its place: in service, in the registry, in `runs/champion.json` and the YAML."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.candidate import Candidate
from pipeline.config import EngineConfig
from pipeline.errors import InputError, PromotionError
from pipeline.promotion import Decision, Evidence
from pipeline.records import TrialRecord

if TYPE_CHECKING:
    from pipeline.registry import Registry, Version
    from serve.service import Service, Switch

Say = Callable[[str], None]


def service_of(config: EngineConfig, candidate: Candidate, launches: tuple[TrialRecord, ...], file: Path) -> Service:
    """The service of a new champion; replicas, port and endpoint limits stay as the present file has them."""
    from serve.service import ChampionSpec, Service, Shape

    present = Service.read(file) if file.is_file() else None
    own = [r.phases_s for r in launches if r.config_id == config.config_id]
    starts = [phases["deploy"] + phases["ready"] for phases in own if {"deploy", "ready"} <= set(phases)]
    spec = ChampionSpec(
        config=config, limits=candidate.space.limits, folder=str((file.parent / "champion").resolve())
    ).model_copy(
        update={
            **({"expected_start_s": max(starts)} if starts else {}),
            **({"proxy": present.spec.proxy} if present else {}),
        }
    )
    return Service(spec=spec, shape=present.shape if present else Shape())


def install(service: Service, file: Path, *, live: bool, say: Say) -> None:
    """Switch the running service, where there is one; then write the champion's file and YAML.

    Raises:
        PromotionError: the new champion did not start; the old one serves again and nothing was written.
    """
    if live:
        _switch(service, file, say)
    service.write(file)
    from serve.service import deploy_yaml

    yaml = file.with_suffix(".yaml")
    try:
        yaml.write_text(deploy_yaml(service))
    except InputError as error:
        say(f"{yaml.name} was not written: {error}")
        return
    say(f"written: {file} (make serve), {yaml} (serve deploy)")


def _switch(service: Service, file: Path, say: Say) -> None:
    from serve.service import Service as Stored
    from serve.switching import gpus_free, put_in_service, switch

    spare = gpus_free(service.spec.config)
    wait = service.spec.drain_s + service.spec.expected_start_s
    say("switching behind a bridge: no gap" if spare else f"switching: 503 with Retry-After for up to {wait:.0f} s")
    done = switch(service, spare_gpus=spare, folder=str(file.parent.resolve() / "champion" / "bridge"))
    if done is None:
        return
    say(f"{done.outcome}: {done.seconds:.1f} s, {done.seconds_without_service:.1f} s of them without service")
    if done.outcome == "rolled back":
        if file.is_file():
            put_in_service(Stored.read(file))  # so that a replica that Serve replaces later starts with it too
        raise PromotionError(f"the new champion did not start, the old one serves again: {_cause(done)}")


def _cause(done: Switch) -> str:
    return done.failure or "no reason was given"


def register(
    registry: Registry, service: Service, candidate: Candidate, evidence: Evidence, decision: Decision, file: Path
) -> Version:
    """Register the champion, move the aliases, and keep the service with this machine's own paths beside `file`."""
    from pipeline.registry import REPORT_FILE, SERVICE_FILE, as_json
    from serve.service import deploy_yaml, portable_service

    facts = candidate.study.facts
    portable = portable_service(service)
    config = portable.spec.config
    tags = {
        "config_id": service.spec.config.config_id,
        "study": candidate.study.name,
        "forced": str(decision.forced),
        "why": candidate.why,
        "decision": decision.reason,
        "gates": as_json({gate.name: gate.passed for gate in decision.gates}),
        "git_commit": str(facts.get("git_commit")),
        **{f"version.{name}": version for name, version in facts.get("versions", {}).items()},
    }
    files = {
        SERVICE_FILE: portable.model_dump_json(indent=2),
        "champion.yaml": deploy_yaml(service),
        REPORT_FILE: as_json(promotion_report(evidence, decision)),
        "space.yaml": candidate.study.space_file.read_text(),
    }
    version = registry.register(files, params=_flat(config), tags=tags, run_id=facts.get("mlflow_run_id"))
    registry.promote(version)
    service.write(file.with_name(f"champion-{version.version}.json"))
    return version


def previous_service(registry: Registry, file: Path) -> tuple[Service, Version]:
    """The champion before the present one, to be launched on this machine.

    Raises:
        PromotionError: there is none.
    """
    from pipeline.registry import PREVIOUS

    version = registry.by_alias(PREVIOUS)
    if version is None:
        raise PromotionError(f"{registry.name} has no previous champion to go back to")
    return registered_service(registry, version, file), version


def registered_service(registry: Registry, version: Version, file: Path) -> Service:
    """A registered champion, to be launched on this machine."""
    from serve.portable import localized, portable
    from serve.service import Service

    service = Service.parse(registry.service(version), f"models:/{version.name}/{version.version}")
    kept = file.with_name(f"champion-{version.version}.json")  # with this machine's own paths
    if kept.is_file():
        ours = Service.read(kept)
        if portable(ours.spec.config) == service.spec.config:  # the versions of another model have these numbers too
            return ours
    spec = service.spec.model_copy(
        update={"config": localized(service.spec.config), "folder": str((file.parent / "champion").resolve())}
    )
    return service.model_copy(update={"spec": spec})


def go_back(registry: Registry, service: Service, version: Version, file: Path, *, live: bool, say: Say) -> None:
    """Serve `version` again and swap the aliases, so that a second rollback undoes the first."""
    from serve.switching import running

    install(service, file, live=live and running(), say=say)
    registry.promote(version)
    say(f"champion again: models:/{version.name}/{version.version}, {service.spec.config.words()}")


def promotion_report(evidence: Evidence, decision: Decision) -> dict[str, Any]:
    """What was decided and on which figures, without paths, hosts or texts of this machine."""
    figures = [
        {
            "launch": record.number,
            "role": record.role,
            "config_id": record.config_id,
            "config": record.config.words(),
            "status": record.status,
            "engine_version": record.engine_version,
            "measurement": record.measurement.model_dump(mode="json") if record.measurement else None,
        }
        for record in evidence.launches
    ]
    matrix = evidence.matrix.model_dump(mode="json") if evidence.matrix else None
    return {"decision": decision.model_dump(mode="json"), "matrix": matrix, "launches": figures}


def _flat(config: EngineConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json", exclude_none=True).items():
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat
