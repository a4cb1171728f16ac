"""Flag tables: what each release takes, and how its own parser is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import InputError
from serve.engines import sglang_flags
from serve.engines.sglang_flags import check_args, flags


@pytest.fixture(autouse=True)
def _no_sglang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sglang_flags, "installed_release", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_bundled_tables_differ_where_the_releases_do() -> None:
    old, new = flags("0.5.17"), flags("0.5.23")
    assert "--cuda-graph-max-bs" in old.flags and "--cuda-graph-max-bs" not in new.flags
    assert new.flags["--flashinfer-allreduce-fusion-backend"].choices == ("auto", "trtllm", "mnnvl", "cutedsl")
    assert old.flags["--flashinfer-allreduce-fusion-backend"].choices == ("auto", "trtllm", "mnnvl")
    assert new.flags["--tp-size"].kind == "int" and new.flags["--mem-fraction-static"].kind == "float"
    assert len(old.flags) > 450 and len(new.flags) > 500
    assert "SGLANG_USE_CPU_ENGINE" in old.variables & new.variables  # nowhere declared, read by its platforms


def test_an_unknown_release_takes_the_closest_older_table_and_says_so() -> None:
    assert flags("0.5.20").source == "bundled table of 0.5.17 (none for 0.5.20)"
    assert flags("0.6.1").source == "bundled table of 0.5.23 (none for 0.6.1)"
    assert flags("0.4.0").source == "bundled table of 0.5.17 (none for 0.4.0)"
    assert flags().release == "0.5.23"


@pytest.mark.parametrize(
    ("args", "release", "result", "note"),
    [
        (["--cuda-graph-max-bs", "8"], "0.5.23", ("--cuda-graph-max-bs-decode", "8"), "old name"),
        (["--cuda-graph-max-bs=8"], "0.5.17", ("--cuda-graph-max-bs-decode", "8"), "old name"),
        (["--disable-piecewise-cuda-graph"], "0.5.17", ("--cuda-graph-backend-prefill", "disabled"), "old name"),
        (["--enable-flashinfer-allreduce-fusion"], "0.5.23", ("--enable-flashinfer-allreduce-fusion",), "deprecated"),
        (["--disable-cuda-graph"], "0.5.23", ("--disable-cuda-graph",), "deprecated"),
        (["--cuda-graph-bs-decode", "1", "2", "4"], "0.5.23", ("--cuda-graph-bs-decode", "1", "2", "4"), None),
    ],
)
def test_old_names_are_mapped_and_deprecated_ones_said(
    args: list[str], release: str, result: tuple[str, ...], note: str | None
) -> None:
    checked = check_args(args, release)
    assert checked.args == result
    assert [note in said for said in checked.notes] == ([True] if note else [])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--speculative-eagle-top", "8"], "abbreviations are refused.*--speculative-eagle-topk"),
        (["--speculative-num", "8"], "abbreviations are refused"),
        (["--atention-backend", "triton"], "no such flag in SGLang 0.5.23.*--attention-backend"),
        (["--attention-backend", "tritonn"], "is not a choice.*did you mean 'triton'"),
        (["--tp-size", "two"], "expected an integer"),
        (["--mem-fraction-static", "high"], "expected a number"),
        (["--tp-size"], "has 0 values; expected one value"),
        (["--tp-size", "1", "2"], "has 2 values"),
        (["--enable-metrics", "true"], "expected no value"),
        (["--cuda-graph-bs-decode"], "one value or more"),
        (["8"], "belongs to no flag"),
    ],
)
def test_wrong_arguments_are_input_errors(args: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_args(args, "0.5.23")


def test_an_installed_release_is_asked_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "site" / "sglang" / "srt"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "environ.py").write_text("class Envs:\n    SGLANG_NEW = 1\n\nenvs = Envs()\n")
    (package / "platforms.py").write_text("import os\n\nCPU = os.getenv('SGLANG_USE_CPU_ENGINE', '0')\n")
    (package / "server_args.py").write_text(
        "class ServerArgs:\n    @staticmethod\n    def add_cli_args(parser):\n"
        "        print('a banner')\n"
        "        parser.add_argument('--brand-new', type=int, choices=[1, 2])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setattr(sglang_flags, "installed_release", lambda: "9.9.9")
    table = flags()
    assert (table.release, table.source) == ("9.9.9", "installed parser")
    assert table.flags["--brand-new"] == sglang_flags.Flag(1, "int", ("1", "2"))
    assert table.variables == {"SGLANG_NEW", "SGLANG_USE_CPU_ENGINE"}  # declared, and read past the declarations
    assert check_args(["--brand-new", "2"]).args == ("--brand-new", "2")
    assert len(list((tmp_path / "cache" / "fastverify").glob("sglang-flags-9.9.9-*.json"))) == 1


def test_an_installed_release_that_cannot_be_imported_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_flags, "installed_release", lambda: "0.5.24")
    monkeypatch.setattr(sglang_flags, "_read_parser", lambda: None)
    assert flags().source == "bundled table of 0.5.23 (none for 0.5.24)"
