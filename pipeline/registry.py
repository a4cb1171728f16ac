"""Champions in MLflow's model registry: configurations, never pickles. Beside `tracking.py` the only mlflow user.

A version holds everything needed to launch it again elsewhere: the configuration, the `serve deploy`
YAML, the promotion's report. `champion` is the one in service, `previous` the one before it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from pipeline.config import Frozen
from pipeline.errors import InputError, PromotionError
from pipeline.mlflow_trial import key
from pipeline.tracking import EXPERIMENT, MAX_PARAM, _experiment, quiet_client, without_password

CHAMPION, PREVIOUS = "champion", "previous"
MODEL_TYPE = "serving-config"
SERVICE_FILE, REPORT_FILE = "service.json", "promotion.json"


class Version(Frozen):
    """One registered champion."""

    name: str
    version: int
    tags: dict[str, str] = Field(default_factory=dict)


class Registry:
    """The registered model `name` of an MLflow store.

    Args:
        uri: MLflow's tracking URI, which holds the registry too.
        name: the registered model; one a served model.
    """

    def __init__(self, uri: str, name: str) -> None:
        self.uri, self.name = uri, name
        self._client = quiet_client(uri)

    def by_alias(self, alias: str) -> Version | None:
        """The version that an alias points to, None when there is none."""
        from mlflow.exceptions import MlflowException

        try:
            found = self._client.get_model_version_by_alias(self.name, alias)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
        return Version(name=self.name, version=int(found.version), tags=dict(found.tags))

    def files(self, version: Version, folder: Path) -> Path:
        """Download a version's files into `folder`; return where they lie.

        Raises:
            InputError: the version holds no service.
        """
        from mlflow import artifacts

        source = self._client.get_model_version(self.name, str(version.version)).source
        with _process_uri(self.uri):
            path = Path(artifacts.download_artifacts(artifact_uri=source, dst_path=str(folder)))
        if not (path / SERVICE_FILE).is_file():
            raise InputError(f"version {version.version} of {self.name} is no champion: it has no {SERVICE_FILE}")
        return path

    def service(self, version: Version) -> str:
        """A version's service as JSON."""
        with tempfile.TemporaryDirectory() as folder:
            return (self.files(version, Path(folder)) / SERVICE_FILE).read_text()

    def report(self, version: Version) -> dict[str, Any]:
        """What a version's promotion measured and decided."""
        with tempfile.TemporaryDirectory() as folder:
            found: dict[str, Any] = json.loads((self.files(version, Path(folder)) / REPORT_FILE).read_text())
        return found

    def register(
        self, files: Mapping[str, str], *, params: Mapping[str, Any], tags: Mapping[str, str], run_id: str | None
    ) -> Version:
        """Store a configuration as a new version; no alias moves yet.

        Args:
            files: name to text; `service.json` among them.
            params: flat figures of the configuration, shown in the UI.
            tags: lineage and gates.
            run_id: the study's parent run.
        """
        experiment = _experiment(self._client, self.uri)
        with _folder(files) as folder:
            model = self._client.create_logged_model(
                experiment, name="champion", source_run_id=run_id, model_type=MODEL_TYPE, tags=dict(tags),
                params={key(name): str(value)[:MAX_PARAM] for name, value in params.items()},
            )  # fmt: skip
            self._client.log_model_artifacts(model.model_id, folder)
        self._client.finalize_logged_model(model.model_id, "READY")
        self._ensure()
        source = f"models:/{model.model_id}"
        with _process_uri(self.uri):
            made = self._client.create_model_version(
                self.name, source=source, run_id=run_id, model_id=model.model_id, tags=dict(tags)
            )
        return Version(name=self.name, version=int(made.version), tags=dict(tags))

    def promote(self, version: Version) -> None:
        """Point `champion` at `version` and `previous` at what was champion."""
        before = self.by_alias(CHAMPION)
        if before is not None and before.version != version.version:
            self._client.set_registered_model_alias(self.name, PREVIOUS, str(before.version))
        self._client.set_registered_model_alias(self.name, CHAMPION, str(version.version))

    def tag(self, version: Version, name: str, value: str) -> None:
        """Set a tag on a version, such as drift's alarm."""
        self._client.set_model_version_tag(self.name, str(version.version), name, value[:5000])

    def _ensure(self) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(self.name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise


@contextmanager
def answering(uri: str, so_far: str = "") -> Iterator[None]:
    """What MLflow refuses, or that it does not answer, is one line.

    Raises:
        PromotionError: says `so_far`, and MLflow's reason.
    """
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        raise PromotionError(f"{so_far}the registry at {without_password(uri)} does not answer: {error}") from error


@contextmanager
def _process_uri(uri: str) -> Iterator[None]:
    """MLflow looks a version's source up through the process's own setting, whatever the client was given."""
    import mlflow

    before: Any = os.environ.get("MLFLOW_TRACKING_URI")  # None unsets it again
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)


@contextmanager
def _folder(files: Mapping[str, str]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text)
        yield folder


def run_tags(uri: str, run_id: str) -> dict[str, str]:
    """The tags of an MLflow run; they name its study and trial.

    Raises:
        InputError: there is no such run.
    """
    from mlflow.exceptions import MlflowException

    try:
        return dict(quiet_client(uri).get_run(run_id).data.tags)
    except MlflowException as error:
        problem = f"{without_password(uri)} has no run {run_id}"
        raise InputError(problem, expected="a study's folder or name, or a run's id") from error


def registered_name(model: str) -> str:
    """A registry name for a served model: `/` and `:` are not allowed there."""
    return f"{EXPERIMENT}-{Path(model).name.replace(':', '_')}"


def as_json(value: Any) -> str:
    """Indented JSON, for files that people read."""
    return json.dumps(value, indent=2, ensure_ascii=False)
