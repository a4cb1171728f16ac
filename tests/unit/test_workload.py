"""Prompts and plans: read strictly, fresh within a study, equal across its trials."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InputError
from pipeline.records import LoadLevel
from pipeline.spec import WorkloadSpec
from pipeline.workload import SHIPPED_SETS, load_prompts, plan, read_trace

CLOSED = LoadLevel(workload="extract", concurrency=8)
OPEN = LoadLevel(workload="extract", request_rate=20.0)


def texts(requests) -> list[str]:
    return [request.messages[-1]["content"] for request in requests]


@pytest.mark.parametrize("name", SHIPPED_SETS)
def test_shipped_sets_hold_enough_distinct_prompts_and_a_disjoint_held_out_set(name: str) -> None:
    shown, held_out = ({p.messages[0]["content"] for p in load_prompts(name, held_out=h)} for h in (False, True))
    assert len(shown) >= 64
    assert len(held_out) >= 24
    assert not shown & held_out


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("Why?", [("user", "Why?")]),
        ({"id": "a", "prompt": "Why?"}, [("user", "Why?")]),
        (
            {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]},
            [("system", "S"), ("user", "U")],
        ),
        (
            {"conversations": [{"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}]},
            [("user", "U")],
        ),
    ],
)
def test_reads_every_shape(tmp_path: Path, row: object, expected: list[tuple[str, str]]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text((json.dumps(row) + "\n") * 4)
    assert [(m["role"], m["content"]) for m in load_prompts(str(path))[0].messages] == expected


@pytest.mark.parametrize(
    "row",
    ["{", "3", '{"prompt": ""}', '{"messages": [{"role": "robot", "content": "x"}]}', '{"conversations": []}', "{}"],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'"fine"\n\n{row}\n')
    with pytest.raises(InputError) as caught:
        load_prompts(str(path))
    assert (caught.value.source, caught.value.line) == (str(path), 3)


def test_an_unknown_set_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'extract'"):
        load_prompts("extrct")


def test_a_users_file_keeps_every_fourth_prompt_apart(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f'"prompt {i}"\n' for i in range(8)))
    shown, held_out = load_prompts(str(path)), load_prompts(str(path), held_out=True)
    assert (len(shown), len(held_out)) == (6, 2)
    path.write_text('"only one"\n')
    with pytest.raises(InputError, match="too few"):
        load_prompts(str(path), held_out=True)


def test_trials_of_a_study_get_equal_requests_and_other_studies_other_ones() -> None:
    prompts = load_prompts("extract")
    first, again, other = (plan(CLOSED, WorkloadSpec(), prompts, 0, salt, count=32) for salt in ("a", "a", "b"))
    assert first == again
    assert not set(texts(first)) & set(texts(other))


def test_no_request_shares_a_prefix_with_another_of_the_study() -> None:
    """A warm prefix cache would make later requests look fast."""
    prompts = load_prompts("extract")
    levels = [CLOSED, LoadLevel(workload="extract", concurrency=1), OPEN]
    starts = [
        text[:12]
        for level in levels
        for repeat in range(5)
        for text in texts(plan(level, WorkloadSpec(), prompts, repeat, "study", count=32))
    ]
    assert len(set(starts)) == len(starts)


def test_repeats_walk_on_through_the_set() -> None:
    prompts = load_prompts("open")
    ids = [{r.prompt_id for r in plan(CLOSED, WorkloadSpec(), prompts, r, "s", count=24)} for r in (0, 1, 2)]
    assert not ids[0] & ids[1]
    assert not ids[1] & ids[2]


@given(rate=st.floats(0.5, 200.0), seed=st.integers(0, 5))
def test_poisson_arrivals_rise_from_zero_at_the_asked_rate(rate: float, seed: int) -> None:
    level = LoadLevel(workload="open", request_rate=rate)
    at = [r.at_s for r in plan(level, WorkloadSpec(seed=seed), load_prompts("open"), 0, "s", count=800)]
    assert at[0] == 0.0
    assert at == sorted(at)
    assert at[-1] / 799 == pytest.approx(1 / rate, rel=0.2)


def test_a_closed_loop_has_no_arrival_times() -> None:
    assert all(r.at_s is None for r in plan(CLOSED, WorkloadSpec(), load_prompts("open"), 0, "s", count=3))


@pytest.mark.parametrize(
    "rows",
    [
        [
            {"timestamp_s": 12.0, "prompt_tokens": 50, "output_tokens": 9},
            {"timestamp_s": 10.5, "prompt_tokens": 700, "output_tokens": 3},
        ],
        [
            {"timestamp": 12000, "input_length": 50, "output_length": 9, "hash_ids": [1]},
            {"timestamp": 10500, "input_length": 700, "output_length": 3, "hash_ids": [2]},
        ],
    ],
)
def test_a_trace_is_replayed_with_its_times_and_lengths(tmp_path: Path, rows: list[dict[str, float]]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    level = LoadLevel(workload="open", trace=str(path))
    requests = plan(level, WorkloadSpec(), load_prompts("open"), 0, "s", count=99)
    assert [(r.at_s, r.output_tokens) for r in requests] == [(0.0, 3), (1.5, 9)]
    assert [len(text) // 4 for text in texts(requests)] == [pytest.approx(700, abs=5), pytest.approx(50, abs=5)]


@pytest.mark.parametrize(
    "row", ['{"timestamp": 1}', '{"timestamp_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "[]"]
)
def test_a_bad_trace_row_is_named(tmp_path: Path, row: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(row)
    with pytest.raises(InputError, match=r"t\.jsonl:1"):
        read_trace(str(path))


def test_an_empty_trace_and_a_missing_one_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n")
    with pytest.raises(InputError, match="empty"):
        read_trace(str(path))
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(str(tmp_path / "none.jsonl"))
