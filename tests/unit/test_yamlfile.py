"""Strict YAML: what PyYAML would pass silently is an error with file, line and key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pipeline.errors import InputError
from pipeline.records import Topology
from pipeline.spec import LoadSpec, ObjectiveSpec
from pipeline.yamlfile import Document, dotted, load


def _load(tmp_path: Path, text: str) -> Document:
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    return load(path)


def _error(tmp_path: Path, text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        _load(tmp_path, text)
    return caught.value


def test_plain_values_keep_their_kind_and_their_line(tmp_path: Path) -> None:
    found = _load(tmp_path, "a: 1\nb: 1.5\nc: 1e-3\nd: true\ne: null\nf: word\ng: [x, 2]\n")
    assert found.data == {"a": 1, "b": 1.5, "c": 1e-3, "d": True, "e": None, "f": "word", "g": ["x", 2]}
    assert found.line(("c",)) == 3
    assert found.line(("g", 1)) == 7


@pytest.mark.parametrize("text", ["1:30", "2024-01-02", "0.5.23", "010", "0x1F", "y", "n", ".inf"])
def test_what_yaml_1_1_would_turn_into_something_else_stays_text(tmp_path: Path, text: str) -> None:
    assert _load(tmp_path, f"a: {text}").data == {"a": text}


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "Off", "NO"])
def test_switch_words_must_be_quoted_as_value_and_as_key(tmp_path: Path, word: str) -> None:
    error = _error(tmp_path, f"env:\n  NCCL_ALGO: {word}\n")
    assert (error.line, error.key) == (2, "env.NCCL_ALGO")
    assert "quote it" in error.problem
    assert _error(tmp_path, f"a: 1\n{word}: 1\n").line == 2
    assert _load(tmp_path, f'a: "{word}"').data == {"a": word}


def test_a_key_that_is_no_word_is_refused(tmp_path: Path) -> None:
    assert "quote it" in _error(tmp_path, "a:\n  8: x\n").problem
    assert "quote it" in _error(tmp_path, "true: x\n").problem


def test_a_duplicate_key_names_both_lines(tmp_path: Path) -> None:
    error = _error(tmp_path, "a:\n  num_steps: 5\n  num_steps: 7\n")
    assert (error.line, error.key) == (3, "a.num_steps")
    assert "line 2" in error.problem


@pytest.mark.parametrize(
    "text", ["a: [1\n", "a: b: c\n", "\tx: 1\n", "a: 1\n---\nb: 2\n", "", "- a\n", "a: *nowhere\n"]
)
def test_broken_yaml_is_one_error_with_the_file(tmp_path: Path, text: str) -> None:
    assert _error(tmp_path, text).source == str(tmp_path / "a.yaml")


def test_aliases_work_unless_they_never_end(tmp_path: Path) -> None:
    assert _load(tmp_path, "a: &x {b: 1}\nc: *x\n").data == {"a": {"b": 1}, "c": {"b": 1}}
    assert "itself" in _error(tmp_path, "a: &x [*x]\n").problem
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    laughs += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    assert "more than" in _error(tmp_path, laughs).problem


def test_tags_and_binary_files_are_refused(tmp_path: Path) -> None:
    assert "tag" in _error(tmp_path, "a: !!python/object:os.system x\n").problem
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(InputError, match="UTF-8"):
        load(tmp_path / "b.yaml")


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "verify.yaml").write_text("a: 1")
    with pytest.raises(InputError, match=r"no such file; did you mean '.*/verify\.yaml'"):
        load(tmp_path / "verfy.yaml")


@pytest.mark.parametrize("place", [".", "/dev/zero", "pipe"])
def test_what_is_no_file_is_not_opened(tmp_path: Path, place: str) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    with pytest.raises(InputError, match="not a file; expected a UTF-8 text file"):
        load(tmp_path / place)


@pytest.mark.parametrize("place", ["a.yaml/b.yaml", "loop", "x" * 300])
def test_a_place_that_cannot_be_looked_at_is_an_error_too(tmp_path: Path, place: str) -> None:
    (tmp_path / "a.yaml").write_text("a: 1")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match=f"{place}: cannot be read: "):
        load(tmp_path / place)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("a: 1\n" + "# more\n" * 20_000, "larger than 100 kB"),
        ("a: " + "9" * 5000, None),  # Python itself refuses to read that as a number
        ("a: 9223372036854775808", "too large a number"),
        ("a: -1e309", "too large a number"),
        ("".join(" " * depth + "a:\n" for depth in range(99)), "a.a.a: nested too deeply"),
        ('a: "x\\0y"', "no path, argument or variable can hold"),
        ('"x\\0y": 1', "no path, argument or variable can hold"),
        ('a: "\\ud800"', "no path, argument or variable can hold"),
        ("a: 1\0", "not YAML: unacceptable character"),
    ],
)
def test_what_no_file_means_is_refused_in_one_line(tmp_path: Path, text: str, words: str | None) -> None:
    if words is None:
        assert _load(tmp_path, text).data["a"] == text[3:]
        return
    error = _error(tmp_path, text)
    assert words in str(error)
    assert "\n" not in str(error)


def test_validation_errors_carry_line_key_and_nearest_name(tmp_path: Path) -> None:
    document = _load(tmp_path, "load:\n  concurrency: [8]\n  min_repeat: 2\n")
    with pytest.raises(InputError) as caught:
        document.parse(LoadSpec, document.data["load"], ("load",))
    assert (caught.value.line, caught.value.key, caught.value.nearest) == (3, "load.min_repeat", "min_repeats")


def test_names_deep_in_lists_are_suggested_too(tmp_path: Path) -> None:
    document = _load(tmp_path, "objective:\n  goals:\n    - metric: output_tok_per_s\n    - metrc: p95_ttft_ms\n")
    with pytest.raises(InputError) as caught:
        document.parse(ObjectiveSpec, document.data["objective"], ("objective",))
    assert (caught.value.line, caught.value.key, caught.value.nearest) == (4, "objective.goals[1].metrc", "metric")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("concurrency: [0]", "greater than 0"),
        ('concurrency: ["8"]', "integer"),
        ("concurrency: [true]", "integer"),
        ("concurrency: 8", "a list"),
        ("concurrency: [8]\nci_width: wide", "number"),
        ("ci_width: 0.1", "at least one of concurrency"),
    ],
)
def test_wrong_types_say_what_fits(tmp_path: Path, text: str, expected: str) -> None:
    document = _load(tmp_path, text)
    with pytest.raises(InputError, match=expected):
        document.parse(LoadSpec, document.data)


def test_a_wrong_choice_names_the_nearest(tmp_path: Path) -> None:
    document = _load(tmp_path, "link: nvlnk")
    with pytest.raises(InputError, match="did you mean 'nvlink'"):
        document.parse(Topology, document.data)


def test_a_boolean_where_a_word_is_meant_says_quote(tmp_path: Path) -> None:
    document = _load(tmp_path, "driver: false")
    with pytest.raises(InputError, match=r"boolean where a word or number is meant.*quoted"):
        document.parse(Topology, document.data)


def test_dotted_keys() -> None:
    assert dotted(("sglang", "seeds", 0, "x")) == "sglang.seeds[0].x"


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_but_never_crashes(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        assert isinstance(load(path).data, dict)
    except InputError as error:
        assert str(path) in str(error)


@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{3,8}", fullmatch=True).filter(lambda s: s not in ("null", "true", "false", "yes", "off")),
        st.integers(-(2**63) + 1, 2**63 - 1) | st.booleans(),
    )
)
def test_what_is_written_plainly_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, data: dict[str, int | bool]
) -> None:
    if not data:
        return
    path = tmp_path_factory.getbasetemp() / "plain.yaml"
    path.write_text(
        "\n".join(f"{name}: {TypeAdapter(int | bool).dump_json(value).decode()}" for name, value in data.items())
    )
    assert load(path).data == data
