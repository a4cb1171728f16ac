"""What a space file points to is looked at before a launch; the error is about the key, or lies in the file itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import InputError
from pipeline.inputs import check_command, check_models, check_workload
from pipeline.space import SpaceSpec, load_space

SPACE = """\
study: s
embedded:
  model: {model}
  fixed: {fixed}
workload: {workload}
load: {load}
"""


def _load(tmp_path: Path, *, model: str = "", fixed: str = "{}", workload: str = "{}", load: str = "") -> SpaceSpec:
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    path = tmp_path / "space.yaml"
    filled = {"model": model or tmp_path / "model", "fixed": fixed, "workload": workload}
    path.write_text(SPACE.format(**filled, load=load or "{concurrency: [1]}"))
    return load_space(path)


def _error(spec: SpaceSpec) -> InputError:
    with pytest.raises(InputError) as caught:
        check_workload(spec, spec.for_engine("embedded"))
    return caught.value


def test_what_is_right_passes(tmp_path: Path) -> None:
    spec = _load(tmp_path, workload="{output_tokens: 511}")
    check_models(spec, spec.for_engine("embedded"))
    check_workload(spec, spec.for_engine("embedded"))


@pytest.mark.parametrize(
    ("stated", "key", "words"),
    [
        ({"workload": "{prompts: {a: extrac}}"}, "workload.prompts.a", "no prompt set or file.*did you mean 'extract'"),
        ({"workload": "{prompts: {a: EMPTY}}"}, "workload.prompts.a", "no prompts"),
        ({"workload": "{output_tokens: 512}"}, "workload.output_tokens", "do not fit the context.*fewer than 512"),
        ({"workload": "{greedy_tokens: 512}"}, "workload.greedy_tokens", "do not fit the context"),
        ({"workload": "{output_tokens: 64}", "fixed": "{context_length: 64}"}, "workload.output_tokens", "than 64"),
        ({"load": "{trace: nowhere.jsonl}"}, "load.trace", "cannot be read"),
        ({"load": "{trace: EMPTY}"}, "load.trace", "the trace is empty"),
    ],
)
def test_the_key_that_points_there_is_named(tmp_path: Path, stated: dict[str, str], key: str, words: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    spec = _load(tmp_path, **{k: v.replace("EMPTY", str(tmp_path / "empty.jsonl")) for k, v in stated.items()})
    error = _error(spec)
    assert (error.source, error.key) == (str(spec.path), key)
    assert error.line == (5 if key.startswith("workload") else 6)
    with pytest.raises(InputError, match=words):
        raise error


@pytest.mark.parametrize(
    ("stated", "row", "words"),
    [
        ("workload: {prompts: {a: FILE}}", "{oops", "not JSON"),
        ("workload: {prompts: {a: FILE}}", "7", "not a prompt"),
        ("load: {trace: FILE}", '{"timestamp_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "a time that is none"),
        ("load: {trace: FILE}", '{"timestamp_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "a length below 1"),
    ],
)
def test_a_bad_row_is_named_in_its_own_file(tmp_path: Path, stated: str, row: str, words: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"\n{row}\n")
    name, _, value = stated.partition(": ")
    error = _error(_load(tmp_path, **{name: value.replace("FILE", str(file))}))
    assert (error.source, error.line) == (str(file), 2)
    assert words in error.problem


@pytest.mark.parametrize(
    ("stated", "words"),
    [("python 'x", "No closing quotation: python 'x"), ("/no/such/program --x", "no program '/no/such/program'")],
)
def test_a_command_that_cannot_be_run_in_the_engines_place(stated: str, words: str) -> None:
    with pytest.raises(InputError, match=f"^FASTVERIFY_SGLANG_COMMAND: {words}"):
        check_command({"FASTVERIFY_SGLANG_COMMAND": stated})


def test_a_command_that_can_or_none() -> None:
    for environment in ({}, {"FASTVERIFY_SGLANG_COMMAND": ""}, {"FASTVERIFY_SGLANG_COMMAND": "sh -c 'exec x'"}):
        check_command(environment)


def test_a_model_that_cannot_be_had(tmp_path: Path) -> None:
    spec = _load(tmp_path, model="smollm2-135")
    with pytest.raises(InputError, match=r"space\.yaml:3: embedded\.model: no model.*did you mean 'smollm2-135m'"):
        check_models(spec, spec.for_engine("embedded"))


def test_what_is_named_relative_to_the_working_directory_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials run in folders of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("mine.jsonl", "trace.jsonl"):
        Path(name).write_text('{"prompt": "p", "timestamp_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n')
    stated = {"workload": "{prompts: {a: mine.jsonl, b: ~/mine.jsonl, c: open}}", "load": "{trace: ./trace.jsonl}"}
    for model in ("model", "./model", "~/model"):
        space = _load(tmp_path, model=model, **stated).for_engine("embedded")
        assert space.model == str(tmp_path / "model")
    mine = str(tmp_path / "mine.jsonl")
    assert space.workload.prompts == {"a": mine, "b": mine, "c": "open"}
    assert space.load.trace == str(tmp_path / "trace.jsonl")
    assert _load(tmp_path, model="org/name").for_engine("embedded").model == "org/name"


def test_an_unknown_home_is_a_folder_that_is_missing(tmp_path: Path) -> None:
    space = _load(tmp_path, model="~nobody-of-that-name/m").for_engine("embedded")
    with pytest.raises(InputError, match="no model folder"):
        space.check_paths()
