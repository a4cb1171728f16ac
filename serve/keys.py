"""API keys of the endpoint: only their SHA-256 is kept, and nothing here ever prints or logs a key.

`python -m serve.keys FILE` makes a new key, appends its hash to FILE and shows the key once.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli import run_command
from pipeline.errors import InputError

FILE_VARIABLE = "FASTVERIFY_API_KEYS_FILE"
HASHES_VARIABLE = "FASTVERIFY_API_KEY_HASHES"
app = typer.Typer(add_completion=False)
_HASH = re.compile(r"[0-9a-f]{64}")


class KeyRing:
    """Accepted keys, as hashes. An empty ring accepts everyone."""

    def __init__(self, hashes: Iterable[str] = ()) -> None:
        self._hashes = tuple(bytes.fromhex(text) for text in hashes)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> KeyRing:
        """Keys named by the environment: a file of hashes, hashes separated by commas, or both.

        Raises:
            InputError: the file is missing, or an entry is not a SHA-256 in hex.
        """
        hashes = [text for text in environ.get(HASHES_VARIABLE, "").split(",") if text]
        path = environ.get(FILE_VARIABLE)
        return cls([*_checked(hashes, HASHES_VARIABLE), *(_read(Path(path)) if path else ())])

    @property
    def open(self) -> bool:
        """True when no key is asked for."""
        return not self._hashes

    def accepts(self, authorization: str | None) -> bool:
        """Whether an `Authorization` header carries a key of the ring.

        Every hash is compared, in constant time, so that the answer's time tells nothing.
        """
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        found = sum([hmac.compare_digest(digest, known) for known in self._hashes])
        return self.open or (scheme.casefold() == "bearer" and found > 0)


def new_key(path: Path) -> str:
    """Make a key, append its hash to `path` (readable by its owner only) and return the key."""
    key = f"fv-{secrets.token_urlsafe(32)}"
    path.touch(mode=0o600)
    with path.open("a") as file:
        file.write(hashlib.sha256(key.encode()).hexdigest() + "\n")
    return key


def _read(path: Path) -> list[str]:
    if not path.is_file():
        raise InputError("the file of API key hashes does not exist", source=str(path), key=FILE_VARIABLE)
    lines = [line.split("#", 1)[0].strip() for line in path.read_text().splitlines()]
    return _checked([line for line in lines if line], str(path))


def _checked(hashes: list[str], source: str) -> list[str]:
    for number, text in enumerate(hashes, start=1):
        if not _HASH.fullmatch(text):
            # The text itself may be a key written by mistake: never repeat it.
            raise InputError(f"entry {number} is not a hash", source=source, expected="64 hex digits of a SHA-256")
    return hashes


@app.command()
def main(file: Annotated[Path, typer.Argument(help="Where hashes are kept; made when it is not there.")]) -> None:
    """Make an API key and show it once; FILE gets its hash."""
    if not file.parent.is_dir():
        raise InputError("no such folder", source=str(file.parent), key="FILE")
    typer.echo(new_key(file))


if __name__ == "__main__":
    run_command(app)
