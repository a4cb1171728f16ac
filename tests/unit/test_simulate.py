"""What a simulated launch may be: which lengths, which variables, and that no trial can be one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.anatomy import Anatomy, Simulated, dissect
from pipeline.config import DraftModelSpeculation, EngineConfig, NgramSpeculation, Speculation
from pipeline.errors import InputError
from pipeline.records import Estimate, TrialRecord
from pipeline.simulate import lengths, subject, variables
from pipeline.store import Study
from serve.engines.sglang import plan
from tests.fakes.fake_study import WINNER, FakeStudy, Shape, config, full_study

CHAIN = DraftModelSpeculation(algorithm="EAGLE3", draft_model="d", num_steps=3, eagle_topk=1, num_draft_tokens=4)


def launched(speculation: Speculation, **resolved: int) -> TrialRecord:
    return FakeStudy().trial(Shape(config(speculation)), resolved=resolved)


def anatomy(accept_length: float = 1.7, most: int | None = 4) -> Anatomy:
    return dissect("EAGLE3", plain=100.0, speculative=80.0, accept_length=accept_length, max_accepted=most)


def test_a_chain_accepts_its_own_drafts_and_a_tree_one_token_over_and_over() -> None:
    def mode(record: TrialRecord) -> str:
        return variables(record, 2.5)["SGLANG_SIMULATE_ACC_TOKEN_MODE"]

    assert variables(launched(CHAIN), 2.5)["SGLANG_SIMULATE_ACC_LEN"] == "2.5"
    assert mode(launched(CHAIN)) == "real-draft-token"
    assert mode(launched(CHAIN.model_copy(update={"eagle_topk": 4}))) == "fixed"
    unsaid = CHAIN.model_copy(update={"eagle_topk": None})
    assert mode(launched(unsaid)) == "fixed"
    assert mode(launched(unsaid, speculative_eagle_topk=1)) == "real-draft-token"
    assert mode(launched(NgramSpeculation(num_draft_tokens=8))) == "fixed"


def test_lengths_reach_from_the_present_one_to_a_perfect_draft() -> None:
    assert lengths(anatomy(), []) == [2, 3, 4]
    assert lengths(anatomy(4.0), []) == [4], "there is nothing better, and something is tried"
    assert lengths(anatomy(6.3, None), []) == [7, 8], "how far it could go is not known"
    assert len(lengths(anatomy(1.7, 64), [])) <= 6, "each is a launch"
    assert lengths(anatomy(), [1.5]) == [1.5]
    for wrong in (0.5, 4.5):
        with pytest.raises(InputError, match="no accept length of"):
            lengths(anatomy(), [wrong])


def test_no_configuration_can_make_results_up() -> None:
    for name in ("SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD", "SGLANG_SIMULATE_UNIFORM_EXPERTS"):
        cheat = EngineConfig(engine="sglang", model="m", env=((name, "3"),))
        with pytest.raises(InputError, match=r"pipeline\.simulate"):
            plan(cheat, port=30000, inherited={}, release="0.5.23")


def test_the_error_is_the_predictions() -> None:
    run = Simulated(
        config_id="c", name="EAGLE3", level="open.c1", asked=3, accept_length=3, cycle_ms=5, predicted_tok_per_s=600,
        measured=Estimate(value=500),
    )  # fmt: skip
    assert run.error == pytest.approx(0.2)  # it promised a fifth too much


def test_the_best_speculation_is_tried_at_the_reports_level(tmp_path: Path) -> None:
    record, found = subject(Study.open(full_study().write(tmp_path)), None)
    assert record.config == WINNER.config
    assert found.level is not None and found.name == WINNER.config.words()
