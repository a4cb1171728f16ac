"""A study's folder: the space file as it was, one ledger of records, one folder a trial.

The ledger `records.jsonl` is the only state: a record is there, whole and synced, or the trial did
not finish. A line cut short by a crash is dropped when the ledger is read.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from pipeline.errors import InputError, nearest
from pipeline.records import TrialRecord

RUNS = Path("runs")


class Study:
    """A study on disk. Use `create` or `open`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = folder / "records.jsonl"
        self._lock: TextIO | None = None
        self._facts_lock = threading.Lock()

    @classmethod
    def create(cls, name: str, space_file: Path, facts: dict[str, Any], root: Path = RUNS) -> Study:
        """Make `root/name`, or `root/name-2` and so on where that exists, and store what was asked."""
        folder = _fresh(root, name)
        (folder / "trials").mkdir()
        shutil.copyfile(space_file, folder / "space.yaml")
        study = cls(folder)
        study.write_facts(facts)
        study.ledger.touch()
        return study

    @classmethod
    def open(cls, path: str | Path, root: Path = RUNS) -> Study:
        """Open a study by folder, by name under `root`, or the newest one for `latest`.

        Raises:
            InputError: no study is there.
        """
        named = root / path
        if str(path) == "latest":
            found = sorted(root.glob("*/study.json"), key=lambda file: file.stat().st_mtime)
            named = found[-1].parent if found else named
        folder = next((p for p in (Path(path), named) if (p / "study.json").is_file()), None)
        if folder is None:
            names = [file.parent.name for file in root.glob("*/study.json")]
            expected = f"a folder with study.json, or a name under {root}/"
            raise InputError(f"no study at {path}", expected=expected, nearest=nearest(str(path), names))
        return cls(folder)

    @property
    def name(self) -> str:
        """The study's name, its folder's."""
        return self.folder.name

    @property
    def space_file(self) -> Path:
        """The space file as it was when the study began."""
        return self.folder / "space.yaml"

    @property
    def facts(self) -> dict[str, Any]:
        """What `study.json` says: engine and its reason, overrides, versions, MLflow run."""
        facts: dict[str, Any] = json.loads((self.folder / "study.json").read_text())
        return facts

    def write_facts(self, facts: dict[str, Any]) -> None:
        """Replace `study.json` whole."""
        _replace(self.folder / "study.json", json.dumps(facts, indent=2))

    def add_facts(self, **found: Any) -> None:
        """Add to `study.json`, or replace there; the driver and the tracker's thread may both do so."""
        with self._facts_lock:
            self.write_facts({**self.facts, **found})

    def trial_dir(self, number: int) -> Path:
        """The folder of a trial's log, launch and traces; made when asked for."""
        folder = self.folder / "trials" / f"{number:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def append(self, record: TrialRecord) -> None:
        """Add a record to the ledger; it is on the disk when this returns.

        Raises:
            OSError: the disk does not take it; the ledger is as it was.
        """
        _append(self.ledger, record.model_dump_json().encode() + b"\n")
        _replace(self.trial_dir(record.number) / "record.json", record.model_dump_json(indent=2))

    def records(self) -> list[TrialRecord]:
        """All whole records, in the order in which they were written.

        Raises:
            InputError: a line is not a record. A last line cut short by a crash is no error.
        """
        whole = self.ledger.read_text().split("\n")[:-1]
        return [self._parse(line, number) for number, line in enumerate(whole, start=1)]

    def _parse(self, line: str, number: int) -> TrialRecord:
        try:
            return TrialRecord.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or None
            raise InputError(str(first["msg"]), source=str(self.ledger), line=number, key=key) from None

    def reference(self) -> str | None:
        """The baseline's greedy answers as JSON; None before there are any."""
        file = self.folder / "reference.json"
        return file.read_text() if file.is_file() else None

    def write_reference(self, text: str) -> None:
        """Store the baseline's greedy answers."""
        _replace(self.folder / "reference.json", text)

    def lock(self) -> None:
        """Hold the study for this process, until it ends.

        Raises:
            InputError: another driver holds it.
        """
        self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"another process runs {self.folder}", expected="one driver a study") from None

    def mend(self) -> None:
        """Cut off a last line that a crash left half written, so that the next append starts a line."""
        text = self.ledger.read_text()
        if text and not text.endswith("\n"):
            _replace(self.ledger, text[: text.rfind("\n") + 1])


def finished_studies(root: Path = RUNS) -> list[dict[str, Any]]:
    """The facts of every study under `root` that came to its end, the newest first."""
    files = sorted(root.glob("*/study.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    found = [json.loads(file.read_text()) for file in files]
    return [facts for facts in found if facts.get("finished")]


def check_root(root: Path) -> None:
    """Whether studies can be kept under `root`, which need not be there yet.

    Raises:
        InputError: it is no folder, or nothing can be written there.
    """
    place = next(path for path in (root, *root.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"{place} cannot hold studies", key="--runs", expected="a folder to write in")


def _fresh(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for count in range(1, 10_000):
        folder = root / (name if count == 1 else f"{name}-{count}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise InputError(f"too many studies named {name} under {root}")


def _append(path: Path, line: bytes) -> None:
    """Write and sync a whole line or nothing: half a line would spoil the one that follows."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            while line:
                line = line[file.write(line) :]
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(before)
            raise


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)
