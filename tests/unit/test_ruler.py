"""The ruler against a fake server: order of a measurement, repeats, watching, refusals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline import ruler as ruler_module
from pipeline.errors import EngineError, MeasurementError
from pipeline.lossless import Reference
from pipeline.metrics import Window
from pipeline.records import Failure, FailureClass, LevelResult, LoadLevel
from pipeline.ruler import MeasurePlan, Ruler, refuse_saturated
from pipeline.spec import Constraints, Goal, LoadSpec, ObjectiveSpec, WorkloadSpec
from tests.fakes.running import fake_server, free_port

NGRAM = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"]


def plan(workload: dict[str, Any] | None = None, **load: Any) -> MeasurePlan:
    quick = {"concurrency": (4, 1), "requests_per_level": 4, "max_repeats": 2, "ci_width": 10.0}
    small = {"output_tokens": 8, "greedy_prompts": 2, "greedy_tokens": 4, **(workload or {})}
    return MeasurePlan(workload=WorkloadSpec(**small), load=LoadSpec(**{**quick, **load}), salt="test")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_server(NGRAM, ttft_ms=20, step_ms=5, tokens_per_step=2) as running:
        yield running


def test_levels_come_busiest_first_with_the_workloads_in_turns(url: str) -> None:
    phases: list[str] = []
    measured = Ruler(plan()).measure(url, on_phase=phases.append)
    assert [level.level.key for level in measured.levels] == ["extract.c4", "open.c4", "extract.c1", "open.c1"]
    turns = [phase.split()[0] for phase in phases[1:5]]
    assert phases[0] == "warm up"
    assert turns == ["extract.c4", "open.c4", "extract.c4", "open.c4"]
    assert all(level.requests_ok == 8 and level.output_tok_per_s.n == 2 for level in measured.levels)
    assert all(level.accept_length > 1 for level in measured.levels)
    assert measured.server["version"]


def test_every_trial_gets_the_same_prompts_and_confirmation_gets_others(url: str) -> None:
    def ids(**how: Any) -> list[str]:
        windows = Ruler(plan(concurrency=(1,))).measure(url, greedy=False, **how).windows.values()
        return [trace.prompt_id for found in windows for window in found for trace in window.traces]

    assert ids() == ids()
    assert not set(ids()) & set(ids(held_out=True))


def test_the_baseline_brings_margins_and_its_own_flips(url: str) -> None:
    greedy = Ruler(plan(concurrency=(1,))).measure(url, baseline=True).greedy
    assert [output.batched for output in greedy] == [False] * 4 + [True] * 4
    reference = Reference.of(greedy)
    assert reference.flips == 0
    assert all(o.margins and o.tokens and "".join(o.tokens) == o.text for o in reference.outputs)
    assert len(Ruler(plan(concurrency=(1,))).measure(url).greedy) == 4


def test_repeats_end_when_the_interval_is_narrow_or_at_their_limit(url: str) -> None:
    wide = Ruler(plan(concurrency=(1,), max_repeats=4)).measure(url, greedy=False)
    narrow = Ruler(plan(concurrency=(1,), max_repeats=3, ci_width=1e-9)).measure(url, greedy=False)
    assert {level.output_tok_per_s.n for level in wide.levels} == {2}
    assert {level.output_tok_per_s.n for level in narrow.levels} == {3}


def test_the_budget_ends_the_repeats_and_says_so(url: str) -> None:
    tight = plan(concurrency=(1,), max_repeats=50, ci_width=1e-9, level_budget_s=0.5)
    began = time.monotonic()
    measured = Ruler(tight).measure(url, greedy=False)
    assert time.monotonic() - began < 10
    assert any("the budget ended the repeats" in note for note in measured.notes)
    assert all(level.requests_cut_off == 0 for level in measured.levels)


def test_a_trial_that_cannot_win_stops_between_loads(url: str) -> None:
    seen: list[tuple[LevelResult, ...]] = []

    def stop(levels: tuple[LevelResult, ...]) -> str:
        seen.append(levels)
        return "hopeless"

    measured = Ruler(plan()).measure(url, stop_early=stop)
    assert [level.level.concurrency for level in measured.levels] == [4, 4]
    assert measured.notes[-1] == "stopped early: hopeless"
    assert measured.greedy == ()
    assert len(seen) == 1


def test_a_dead_engine_ends_the_measurement_within_seconds() -> None:
    failure = Failure(failure_class=FailureClass.KILLED, cause="gone", phase="measure")
    calls = []

    def watch() -> None:
        calls.append(time.monotonic())
        if len(calls) > 1:
            raise EngineError(failure)

    with fake_server(ttft_ms=60_000) as slow:
        began = time.monotonic()
        with pytest.raises(EngineError, match="gone"):
            Ruler(plan()).measure(slow, watch=watch)
        assert time.monotonic() - began < 8


def test_a_watch_that_fails_after_the_window_explains_failed_requests() -> None:
    with fake_server(error_rate=1.0) as broken, pytest.raises(MeasurementError, match="no warm-up request"):
        Ruler(plan()).measure(broken)

    def watch() -> None:
        raise EngineError(Failure(failure_class=FailureClass.CRASH, cause="crashed"))

    with fake_server(error_rate=1.0) as broken, pytest.raises(EngineError, match="crashed"):
        Ruler(plan()).measure(broken, watch=watch)


def test_an_engine_whose_end_is_known_a_moment_after_its_socket_closed_explains_the_failed_request() -> None:
    # Real SGLang after kill -9 of its scheduler: the trial was "nothing listens", and not tried again as a killed one.
    calls: list[float] = []

    def watch() -> None:
        calls.append(time.monotonic())
        if len(calls) > 3:
            raise EngineError(Failure(failure_class=FailureClass.KILLED, cause="scheduler_0 was killed by SIGKILL"))

    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match="scheduler_0 was killed"):
        Ruler(plan()).measure(nobody, watch=watch)
    began = time.monotonic()
    with pytest.raises(MeasurementError, match="nothing listens"):
        Ruler(plan()).measure(nobody)  # nobody's engine: nothing to wait for
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("window", [Window((), client_cpu=0.95), Window((), client_cpu=0.6, loop_lag_ms=25.0)])
def test_a_saturated_client_is_refused(window: Window) -> None:
    with pytest.raises(MeasurementError, match="saturated"):
        refuse_saturated("extract.c256", window)
    assert refuse_saturated("extract.c8", Window((), client_cpu=0.5, loop_lag_ms=1.0)) is None


def test_a_client_starved_by_other_work_is_noted_not_blamed() -> None:
    assert "25 ms late" in str(refuse_saturated("extract.c8", Window((), client_cpu=0.1, loop_lag_ms=25.0)))


def test_percentiles_in_demand_get_their_samples() -> None:
    level = LoadLevel(workload="extract", concurrency=1)
    load = LoadSpec(concurrency=(1,))
    assert MeasurePlan(load=load).requests(level) == 8
    limited = ObjectiveSpec(constraints=Constraints(p95_ttft_ms=100.0))
    assert MeasurePlan(load=load, objective=limited).requests(level) == 10
    assert MeasurePlan(load=LoadSpec(concurrency=(64,))).requests(LoadLevel(workload="open", concurrency=64)) == 256


def test_the_metric_that_is_repeated_for_is_the_levels_own_goal() -> None:
    goals = ObjectiveSpec(goals=(Goal(concurrency=64), Goal(metric="mean_tpot_ms", concurrency=1)))
    both = MeasurePlan(load=LoadSpec(concurrency=(64, 1)), objective=goals)
    assert [both.metric(level) for level in both.levels[1:3]] == ["output_tok_per_s", "mean_tpot_ms"]


def test_a_server_without_flush_is_measured_and_noted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_flush(*_: object, **__: object) -> bool:
        return False

    monkeypatch.setattr(ruler_module, "flush", no_flush)
    measured = Ruler(plan(concurrency=(1,))).measure(url, greedy=False)
    assert measured.notes.count("the server has no cache flush") == 1
