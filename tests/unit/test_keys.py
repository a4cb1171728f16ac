"""API keys: hashes only, several, and never a key in a message."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from pipeline.cli import run_command
from pipeline.errors import InputError
from serve.keys import FILE_VARIABLE, HASHES_VARIABLE, KeyRing, app, new_key


def test_a_new_key_is_accepted_and_the_file_holds_only_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = [new_key(path), new_key(path)]
    assert path.stat().st_mode & 0o077 == 0
    assert not any(key in path.read_text() for key in keys)
    path.write_text(path.read_text() + "# a comment\n\n")
    ring = KeyRing.from_environment({FILE_VARIABLE: str(path)})
    assert all(ring.accepts(f"Bearer {key}") for key in keys)
    assert not any(ring.accepts(bad) for bad in (None, "", "Bearer", "Bearer x", f"Basic {keys[0]}", keys[0]))


def test_the_command_makes_a_key_and_takes_no_flag_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for argument, code in (("keys.txt", 0), ("--help", 0), ("--halp", 2), ("missing/keys.txt", 2)):
        monkeypatch.setattr(sys, "argv", ["keys", argument])
        with pytest.raises(SystemExit) as ended:
            run_command(app)
        assert (ended.value.code or 0) == code
    assert [path.name for path in tmp_path.iterdir()] == ["keys.txt"]
    key, _, rest = capsys.readouterr().out.partition("\n")
    assert KeyRing([(tmp_path / "keys.txt").read_text().strip()]).accepts(f"Bearer {key}")
    assert "Usage" in rest


def test_without_keys_everyone_is_accepted_and_the_ring_says_so() -> None:
    assert KeyRing.from_environment({}).open
    assert KeyRing().accepts(None)


def test_hashes_come_from_the_environment_too() -> None:
    text = ",".join(hashlib.sha256(key).hexdigest() for key in (b"a", b"b"))
    ring = KeyRing.from_environment({HASHES_VARIABLE: text})
    assert ring.accepts("bearer b")
    assert not ring.accepts("bearer c")


@pytest.mark.parametrize("variable", [FILE_VARIABLE, HASHES_VARIABLE])
def test_a_plain_key_where_a_hash_belongs_is_refused_without_repeating_it(variable: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("my-secret-key\n")
    with pytest.raises(InputError, match="not a hash") as refused:
        KeyRing.from_environment({variable: str(path) if variable == FILE_VARIABLE else "my-secret-key"})
    assert "secret" not in str(refused.value)


def test_a_missing_file_is_an_error_and_not_an_open_endpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        KeyRing.from_environment({FILE_VARIABLE: str(tmp_path / "none")})
