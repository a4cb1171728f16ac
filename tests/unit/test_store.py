"""The ledger: what is written is there, a torn line is no record, two drivers exclude each other."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import EngineConfig
from pipeline.errors import InputError
from pipeline.store import Study, finished_studies
from tests.fakes.toy_search import record

CONFIG = EngineConfig(engine="embedded", model="m")


@pytest.fixture
def study(tmp_path: Path) -> Study:
    space = tmp_path / "space.yaml"
    space.write_text("study: s\n")
    return Study.create("s", space, {"finished": False}, tmp_path / "runs")


def test_records_come_back_whole_and_in_order(study: Study) -> None:
    records = [record(number, CONFIG, 10.0 + number) for number in range(3)]
    for one in records:
        study.append(one)
    assert Study.open(study.folder).records() == records
    assert (study.folder / "trials" / "002" / "record.json").is_file()


def test_a_line_cut_short_by_a_crash_is_no_record_and_spoils_nothing(study: Study) -> None:
    study.append(record(0, CONFIG, 10.0))
    with study.ledger.open("a") as ledger:
        ledger.write('{"study": "s", "numb')
    assert [r.number for r in study.records()] == [0]
    study.mend()
    study.append(record(1, CONFIG, 11.0))
    assert [r.number for r in study.records()] == [0, 1]


def test_a_full_disk_leaves_the_ledger_as_it_was(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    study.append(record(0, CONFIG, 10.0))
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", _no_space)
        with pytest.raises(OSError, match="No space"):
            study.append(record(1, CONFIG, 11.0))
    study.append(record(2, CONFIG, 12.0))
    assert [r.number for r in study.records()] == [0, 2]


def _no_space(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_spoiled_line_names_file_and_line(study: Study) -> None:
    study.ledger.write_text('{"study": 1}\n')
    with pytest.raises(InputError, match=r"records\.jsonl:1"):
        study.records()


def test_a_second_study_of_the_same_name_gets_its_own_folder(study: Study) -> None:
    again = Study.create("s", study.space_file, {}, study.folder.parent)
    assert again.name == "s-2"
    assert Study.open("latest", study.folder.parent).name in ("s", "s-2")


def test_no_study_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no study at nowhere"):
        Study.open("nowhere", tmp_path)
    with pytest.raises(InputError, match="no study at latest"):
        Study.open("latest", tmp_path)


def test_one_driver_a_study(study: Study) -> None:
    study.lock()
    code = f"from pipeline.store import Study; Study.open({str(study.folder)!r}).lock()"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert other.returncode != 0
    assert "another process runs" in other.stderr


def test_finished_studies_are_those_that_say_so(study: Study) -> None:
    assert finished_studies(study.folder.parent) == []
    study.add_facts(finished=True, model="m")
    assert finished_studies(study.folder.parent) == [{"finished": True, "model": "m"}]
