"""Reports of studies whose truth is known."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import EngineConfig, NgramSpeculation
from pipeline.errors import InputError
from pipeline.profile import parse
from pipeline.records import Estimate, FailureClass, Launch
from pipeline.report import load_report, render, write_html
from pipeline.reporting import loads
from pipeline.reporting.command import pasteable
from pipeline.reporting.compare import compare
from pipeline.reporting.facts import in_order
from pipeline.reporting.figures import figures
from pipeline.reporting.html import render as render_html
from pipeline.reporting.model import Point, Report
from pipeline.reporting.readable import change, figure, spread
from tests.fakes.fake_study import BASELINE, WINNER, FakeStudy, Shape, config, eagle, full_study, null_study
from tests.fakes.fake_trace import FakeTrace


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_study().write(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def report(study: Path) -> Report:
    return load_report(str(study))


def test_the_first_screen_answers(report: Report) -> None:
    verdict = report.verdict
    assert verdict.winner == WINNER.config.words()
    assert verdict.speedup == pytest.approx(1.70, abs=0.03)
    assert verdict.speedup_low is not None and verdict.speedup_high is not None
    assert 1 < verdict.speedup_low < verdict.speedup_high
    assert verdict.noise_floor is not None and 0 < verdict.noise_floor < 0.02
    assert verdict.lossless is not None and verdict.lossless.startswith("Yes: 15 of 16")
    first_screen = render(report).split("Ranking")[0]
    for part in ("winner", "baseline", "speed-up", "noise floor", "why", "lossless", "sglang.launch_server", "±"):
        assert part in first_screen


def test_ranking_has_one_row_a_configuration_with_figures(report: Report) -> None:
    names = [row.name for row in report.ranking]
    assert len(names) == len(set(names)) == 12
    assert "no speculation nccl_algo=Tree" not in names
    baseline = next(row for row in report.ranking if row.is_baseline)
    assert len(baseline.trials) == 5 and baseline.speedup == pytest.approx(1)
    assert baseline.accept_length is None


def test_failures_are_listed_by_class_with_their_cause(report: Report) -> None:
    assert {f.failure_class: f.count for f in report.failures} == {"collective": 1, "hang": 1}
    assert "allreduce:tree" in report.failures[0].cause


def test_cost_counts_launches_and_gpu_hours(report: Report) -> None:
    cost = report.cost
    assert cost is not None
    assert (cost.launches, cost.reused, cost.failed) == (25, 1, 2)
    assert cost.gpu_hours == pytest.approx(2 * cost.hours)


def test_phases_come_in_the_order_of_a_trial() -> None:
    found = in_order({"measure": 3.0, "teardown": 1.0, "soak": 2.0, "ready": 5.0, "deploy": 1.0})
    assert list(found) == ["deploy", "ready", "measure", "soak", "teardown"]


def test_each_kept_setting_earns_its_place(report: Report) -> None:
    effects = {effect.setting: effect for effect in report.effects}
    assert effects["collectives.nccl_algo"].kept and effects["speculation"].kept
    assert not effects["collectives.nccl_proto"].kept
    assert effects["collectives.nccl_algo"].gain == pytest.approx(1 / 0.9 - 1, abs=0.02)


def test_anatomies_recover_the_cost_model(report: Report) -> None:
    found = next(a for a in report.anatomies if a.name == WINNER.config.words() and a.level == "chat.c1")
    assert found.accept_length == pytest.approx(2.1)
    assert found.break_even_accept_length == pytest.approx(1.45 * 0.9, rel=0.02)
    assert found.max_accept_length == 4


def test_why_is_said_in_tokens_and_plain_steps(report: Report) -> None:
    assert report.verdict.explanation == (
        "With it a verify cycle yields 2.28 tokens and takes as long as 1.34 plain steps; "
        "below 1.34 tokens it would lose."
    )


def test_profiles_of_a_study_are_shown(tmp_path: Path) -> None:
    folder = full_study().write(tmp_path)
    trace = FakeTrace()
    for _ in range(4):
        trace.speculative_step()
    found = [parse(trace.events, rank=f"TP-{rank}", label="EAGLE3") for rank in range(2)]
    (folder / "profiles" / "abc").mkdir(parents=True)
    (folder / "profiles" / "abc" / "profile.json").write_text(json.dumps([p.model_dump() for p in found]))
    report = load_report(str(folder))
    assert [p.rank for p in report.profiles] == ["TP-0", "TP-1"]
    assert "Where the milliseconds go" in render(report)
    bars = figures(report)["step_time"]["data"]
    assert sum(bar["x"][0] for bar in bars) == pytest.approx(report.profiles[0].step_ms)
    (folder / "profiles" / "abc" / "profile.json").write_text('[{"rank": 1}]')
    with pytest.raises(InputError, match="not a file of profiles"):
        load_report(str(folder))


def test_no_winner_is_an_answer(tmp_path: Path) -> None:
    report = load_report(str(null_study().write(tmp_path)))
    assert report.verdict.headline == "No configuration beats the baseline: no speculation stays"
    assert report.verdict.reason.startswith("No difference that holds")
    assert report.verdict.explanation is not None
    assert report.verdict.explanation.startswith("With the best speculation, NGRAM draft=16, a verify cycle yields")
    assert "as long as 1.77 plain steps; it pays above 1.77 tokens" in report.verdict.explanation
    assert report.effects == ()


def test_a_study_without_a_baseline_figure_has_no_winner(tmp_path: Path) -> None:
    study = FakeStudy("dead")
    study.failed(config(), FailureClass.OOM_LOWER, "out of memory")
    report = load_report(str(study.write(tmp_path)))
    assert report.verdict.winner is None and report.verdict.headline == "No winner"
    assert "No winner" in render(report) and "oom_lower" in render(report)
    assert "No winner" in render_html(report)


def test_an_interrupted_study_reports_what_there_is(tmp_path: Path) -> None:
    study = FakeStudy("cut", loads=(1,))
    study.trial(BASELINE, "baseline")
    folder = study.write(tmp_path)
    with (folder / "records.jsonl").open("a") as ledger:
        ledger.write('{"study": "cut", "numb')
    report = load_report(str(folder))
    assert report.verdict.winner == "no speculation"
    assert report.verdict.by_workload is None and report.anatomies == ()


def test_what_all_configurations_share_is_said_once(tmp_path: Path) -> None:
    study = FakeStudy("shared")
    plain = config(custom_all_reduce=False, flashinfer_fusion="off")
    for role, made in (("baseline", plain), ("search", plain.model_copy(update={"speculation": eagle(3)}))):
        study.trial(Shape(made, 2.0, 1.5), role)
    tree = plain.collectives.model_copy(update={"nccl_algo": "Tree"})
    study.failed(plain.model_copy(update={"collectives": tree}), FailureClass.COLLECTIVE, "no all-gather for Tree")
    report = load_report(str(study.write(tmp_path)))
    assert {row.name for row in report.ranking} == {"no speculation", "EAGLE3 steps=3 topk=1 draft=4"}
    assert report.failures[0].example == "no speculation nccl_algo=Tree"
    assert dict(report.facts)["in all configurations"] == "car=off fusion=off"
    for form in ("text", "markdown"):
        assert render(report, form).count("car=off") == 1
    assert report.timeline[0].name == "no speculation"


def test_the_fastest_of_each_workload_is_on_the_first_screen_where_they_differ(report: Report, tmp_path: Path) -> None:
    study = FakeStudy("mixed", loads=(1,))
    study.trial(BASELINE, "baseline")
    study.trial(Shape(config(NgramSpeculation(num_draft_tokens=8)), 1.45, 1.5), "search")  # pays at 1.6, not at 1.45
    study.trial(BASELINE, "reference")
    found = load_report(str(study.write(tmp_path)))
    assert found.verdict.by_workload is not None
    assert "chat: nothing beats the baseline beyond noise at 1 stream." in found.verdict.by_workload
    assert re.search(r"extract: NGRAM draft=8 is the fastest at 1 stream \(1\.0\d×\)\.", found.verdict.by_workload)
    for page in (render(found), render_html(found)):
        assert found.verdict.by_workload.split(" (")[0] in " ".join(page.split())


def test_an_unknown_study_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no study at"):
        load_report(str(tmp_path / "nowhere"))


def test_json_is_the_report_itself(report: Report) -> None:
    assert Report.model_validate_json(render(report, "json")) == report


def test_markdown_tables_have_whole_rows(report: Report) -> None:
    text = render(report, "markdown")
    tables = [block for block in text.split("\n\n") if block.startswith("| ")]
    assert len(tables) >= 6
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1


def test_the_page_is_whole_and_reads_nothing_from_the_network(report: Report, tmp_path: Path) -> None:
    page = write_html(report, tmp_path / "deep" / "report.html").read_text()
    outside = page.replace(page[page.index("<script>") : page.index('<script type="application/json"')], "")
    assert not re.search(r"(src|href)=[\"']https?:", outside)
    assert "@import" not in outside
    drawn = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.S)[1].replace("<\\/", "</"))  # type: ignore[index]
    assert set(drawn) == {"throughput_latency", "break_even", "cycle", "parallel", "timeline"}
    assert set(re.findall(r'data-figure="(\w+)"', page)) == set(drawn)


def test_text_in_the_page_is_escaped(report: Report) -> None:
    evil = report.model_copy(update={"title": "</script><script>alert(1)</script>"})
    assert "<script>alert" not in render_html(evil)


def test_figures_have_one_value_a_point(report: Report) -> None:
    for drawn in figures(report).values():
        for trace in drawn["data"]:
            if "x" in trace:
                assert len(trace["x"]) == len(trace["y"]) > 0


def test_two_studies_are_compared_within_noise(report: Report, tmp_path: Path) -> None:
    other = FakeStudy("other", seed=5)
    other.trial(BASELINE, "baseline")
    other.trial(BASELINE, "reference")
    found = compare(report, load_report(str(other.write(tmp_path))))
    by_name = {row.name: row for row in found.comparison}
    assert by_name["no speculation"].verdict == "within noise"
    assert by_name[WINNER.config.words()].verdict == "only in this study"
    assert "Against other" in render(found)


def test_a_real_change_between_studies_has_a_direction(report: Report) -> None:
    slower = report.model_copy(
        update={
            "ranking": tuple(
                row.model_copy(update={"value": Estimate(value=0.8 * row.value.value)}) if row.value else row
                for row in report.ranking
            )
        }
    )
    assert {row.verdict for row in compare(report, slower).comparison} == {"better here"}
    assert {row.verdict for row in compare(slower, report).comparison} == {"worse here"}
    times = {"metric": "p95_ttft_ms"}
    assert {row.verdict for row in compare(report.model_copy(update=times), slower).comparison} == {"worse here"}


def test_the_command_can_be_pasted() -> None:
    argv = ("/x/bin/python3.12", "-m", "sglang.launch_server", "--model-path", "a b", "--port", "41001", "--flag")
    text = pasteable(Launch(argv=argv, env={"NCCL_ALGO": "allreduce:tree", "A": "x y", "PYTHONPATH": "/here"}))
    stand_in = 'python3() { printf "%s|" "$A" "$NCCL_ALGO" "$@"; }\n'
    shown = subprocess.run(["bash", "-c", stand_in + text], capture_output=True, text=True, check=True, timeout=20)
    words = ["x y", "allreduce:tree", "-m", "sglang.launch_server", "--model-path", "a b", "--port", "30000", "--flag"]
    assert shown.stdout.split("|")[:-1] == words


def point(speculation: Any, load: int, rate: float, workload: str = "chat") -> tuple[EngineConfig, Point]:
    made = config(speculation)
    return made, Point(
        config_id=made.config_id,
        name=made.words(),
        algorithm=made.speculation.algorithm,
        level=f"{workload}.c{load}",
        workload=workload,
        concurrency=load,
        tok_per_s=Estimate(value=rate),
        speedup=1.0,
    )


def advise(*made: tuple[EngineConfig, Point]) -> loads.LoadAdvice:
    configs = {made_config.config_id: made_config for made_config, _ in made}
    found = loads.advise([p for _, p in made], configs, noise=0.02, static="x")
    assert found is not None
    return found


def test_a_crossover_becomes_an_adaptive_configuration() -> None:
    found = advise(
        point(None, 1, 100), point(eagle(1), 1, 130), point(eagle(3), 1, 160), point(eagle(3, 8, 4), 1, 900),
        point(None, 32, 2000), point(eagle(1), 32, 1985), point(eagle(3), 32, 1400), point(eagle(3, 8, 4), 32, 100),
    )  # fmt: skip
    assert [(c.below, c.above, c.inside_noise) for c in found.crossovers] == [(1, 32, False)]
    # topk 4 is no candidate, however fast; depth 1 is within noise of plain decoding at 32 streams.
    assert found.adaptive == {"1": {"candidate_steps": [3]}, "32": {"candidate_steps": [0, 1]}}


def test_no_adaptive_configuration_without_eagle_or_without_a_choice() -> None:
    ngram = NgramSpeculation(num_draft_tokens=4)
    none = advise(point(None, 1, 100), point(ngram, 1, 130), point(None, 8, 100), point(ngram, 8, 90))
    assert none.adaptive is None and "EAGLE" in none.adaptive_note
    same = advise(point(None, 1, 100), point(eagle(3), 1, 160), point(None, 8, 800), point(eagle(3), 8, 990))
    assert same.adaptive is None and "Nothing to adapt" in same.adaptive_note


def test_numbers_in_words() -> None:
    assert (figure(None), figure(1234.4), figure(33.33), figure(0.0), figure(100.0)) == (
        "–", "1,234", "33.3", "0.00", "100",
    )  # fmt: skip
    assert spread(Estimate(value=812.0)) == "812"
    assert spread(Estimate(value=812.0, n=3, low=800.0, high=824.0)) == "812 ± 12"
    two = Estimate(value=812.0, n=2, std=16.97, low=660.0, high=964.0)  # 800 and 824
    assert spread(two) == "812 (800–824)"
    assert change(-0.0001) == "+0.0%"


def test_the_story_prints_its_lines() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "pipeline.report", "story"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    said = " ".join(out.split())
    for line in (
        "plain step 12.2 ms", "cycle 33 ms", "break-even accept length 2.7",
        "At a verify step of 30 ms: break-even 2.5",
        "ceiling of a perfect 3-token draft 133 tok/s", "The drafter is not the bottleneck",
        "25 ms of all-reduces in a verify step", "does not fit a plain step of 12.2 ms with as many of them",
    ):  # fmt: skip
        assert line in said


@pytest.mark.parametrize("words", [("nowhere-at-all",), ("story", "--json", "--markdown")])
def test_a_wrong_question_is_one_line_and_exit_code_2(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.report", *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_screen_of_collective_settings_says_what_left_the_space_and_why(tmp_path: Path) -> None:
    folder = full_study().write(tmp_path)
    assert "screened out" not in render(load_report(str(folder)))
    measured = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu2" / "collectives.json"
    (folder / "collectives.json").write_bytes(measured.read_bytes())
    found = load_report(str(folder))
    assert found.screen is not None
    assert [name for name, _ in found.screen.left] == [
        "nccl_algo=Tree", "nccl_algo=Ring nccl_buffsize=1048576 nccl_proto=Simple", "17 more",
    ]  # fmt: skip
    for form in ("text", "markdown"):
        text = " ".join(render(found, form).split())
        assert "72 settings were timed without the engine, in 71 s; 19 left the space" in text
        assert "algorithm/protocol available" in text
        assert "Not reached, so still in the space: " in text
    assert "Collective settings screened out" in render_html(found)
