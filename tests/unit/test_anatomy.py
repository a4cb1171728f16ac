"""The arithmetic of a verify step, on the story's published figures and on what must always hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import anatomy
from pipeline.config import DflashSpeculation, DraftModelSpeculation, EngineConfig, NgramSpeculation, Speculation
from pipeline.reporting.story import load_story, story_report

RATES = st.floats(1, 1e5)
LENGTHS = st.floats(1, 16)


def eagle3(plain: float = 82, speculative: float = 60, accept_length: float = 2.0) -> anatomy.Anatomy:
    return anatomy.dissect(
        "EAGLE-3", plain=plain, speculative=speculative, accept_length=accept_length, max_accepted=4, verify_ms=30
    )


def test_the_storys_arithmetic() -> None:
    found = eagle3()
    assert found.plain_step_ms == pytest.approx(12.2, abs=0.05)
    assert found.cycle_ms == pytest.approx(33.3, abs=0.05)
    assert found.break_even_accept_length == pytest.approx(2.73, abs=0.01)
    assert found.break_even_at_verify == pytest.approx(2.46, abs=0.01)
    assert found.ceiling_at_verify_tok_per_s == pytest.approx(133.3, abs=0.1)
    assert found.cheap_step_tok_per_s == pytest.approx(164)


def test_the_story_blames_the_step_and_not_the_drafter() -> None:
    found = eagle3()
    assert found.bottleneck == "step"
    assert found.advice.startswith("The drafter is not the bottleneck: a perfect one would give 133 tok/s")


def test_the_story_names_what_does_not_fit() -> None:
    report = story_report(load_story())
    assert report.collectives is not None and not report.collectives.fits
    assert report.collectives.us_each == pytest.approx(204.9, abs=0.1)
    assert report.collectives.plain_us_each_at_most == pytest.approx(100, abs=0.1)
    assert any("25 ms of all-reduces" in line and "12.2 ms" in line for line in report.misfits)
    # A cycle of 28.8 ms cannot hold a verify step of 30 ms.
    assert any(line.startswith("second drafter") for line in report.misfits)
    assert not any("EAGLE-3" in line or "third" in line for line in report.misfits)


def test_collectives_that_fit_are_said_to_fit() -> None:
    share = anatomy.collective_share(122, 10, 30, 12.2)
    assert share.fits and "fits a plain step" in share.verdict


@given(plain=RATES, speculative=RATES, accept_length=LENGTHS, streams=st.integers(1, 256))
def test_break_even_is_where_the_speed_up_is_one(
    plain: float, speculative: float, accept_length: float, streams: int
) -> None:
    found = anatomy.dissect(
        "x", plain=plain, speculative=speculative, accept_length=accept_length, streams=streams, max_accepted=8
    )
    even = anatomy.tok_per_s(found.cycle_ms, streams, found.break_even_accept_length)
    assert even == pytest.approx(plain)
    assert found.speedup == pytest.approx(accept_length / found.break_even_accept_length)
    assert (found.cycle_ms < found.allowed_cycle_ms) == (found.speedup > 1) or found.speedup == pytest.approx(1)


def test_a_cheap_cycle_with_few_accepted_blames_the_drafter() -> None:
    found = eagle3(plain=100, speculative=110, accept_length=1.3)
    assert found.bottleneck == "drafter"


def test_no_drafter_can_pay_when_even_a_perfect_one_loses() -> None:
    found = anatomy.dissect("x", plain=100, speculative=20, accept_length=1.0, max_accepted=4)
    assert found.advice.startswith("No drafter can pay here")


def test_what_if_holds_the_present_point_and_the_plain_step() -> None:
    found = eagle3()
    table = anatomy.what_if(found)
    assert table.cycle_names[0] == "now" and table.cycle_names[-1] == "plain step"
    row = table.tok_per_s[table.accept_lengths.index(2.0)]
    assert row[0] == pytest.approx(60)
    assert row[-1] == pytest.approx(164)
    assert table.tok_per_s[-1][table.cycle_names.index("verify alone")] == pytest.approx(133.3, abs=0.1)
    assert table.accept_lengths[-1] == 4  # no what-if beyond a perfect drafter


@pytest.mark.parametrize(
    ("speculation", "resolved", "expected"),
    [
        (NgramSpeculation(num_draft_tokens=8), {}, 8),
        (NgramSpeculation(), {"speculative_num_draft_tokens": 12}, 12),
        (NgramSpeculation(), {}, None),
        (DraftModelSpeculation(algorithm="EAGLE3", num_steps=3, eagle_topk=1, num_draft_tokens=4), {}, 4),
        (DraftModelSpeculation(algorithm="EAGLE3", num_steps=3, eagle_topk=4, num_draft_tokens=16), {}, 4),
        (DflashSpeculation(block_size=16), {}, 16),
    ],
)
def test_most_tokens_a_step_can_yield(speculation: Speculation, resolved: dict[str, int], expected: int | None) -> None:
    config = EngineConfig(engine="sglang", model="m", speculation=speculation)
    assert anatomy.max_accept_length(config, resolved) == expected


def test_the_embedded_engine_counts_proposed_tokens_only() -> None:
    config = EngineConfig(engine="embedded", model="m", speculation=NgramSpeculation(num_draft_tokens=8))
    assert anatomy.max_accept_length(config) == 9
