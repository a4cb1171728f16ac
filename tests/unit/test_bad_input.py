"""Every mistake in a space file is one error with file, line, key, what was expected and the nearest name."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.errors import InputError
from pipeline.records import Topology
from pipeline.space import Overrides, choose_engine, load_space

GOOD = """\
study: s
sglang:
  model: m
  tensor_parallel_size: 2
  draft_models: {EAGLE3: head}
  fixed:
    max_running_requests: 64
  space:
    speculation:
      none:
      NGRAM:
        num_draft_tokens: [4, 8]
      EAGLE3:
        num_steps: {low: 1, high: 4}
    collectives:
      custom_all_reduce: [true, false]
      nccl_algo: {choices: [Ring], when: {collectives.custom_all_reduce: false}}
    attention_backend: [triton]
  seeds:
    - {speculation.algorithm: NGRAM}
load: {concurrency: [8]}
search: {budget: {trials: 8}}
"""

# what replaces what; line of the error; its key (below `sglang.space.` where it is there); words of the message
MISTAKES = [
    ("study: s", "stdy: s", 1, "stdy", "unknown key.*did you mean 'study'"),
    ("study: s", "study: a/b", 1, "study", "letters, digits"),
    ("study: s", f"study: {'s' * 65}", 1, "study", "up to 64"),
    ("study: s\n", "", 1, "study", "missing"),
    ("max_running_requests: 64", 'env: {"A=B": c}', 7, "sglang.fixed.env.A=B", "no name of a variable"),
    ("max_running_requests: 64", 'env: {"": c}', 7, "sglang.fixed.env.", "no name of a variable"),
    ("{low: 1, high: 4}", "{low: 1, high: 4, step: 4}", 14, "speculation.EAGLE3.num_steps.step", "up to 3"),
    ("algorithm: NGRAM}", "algorithm: [NGRAM]}", 20, "sglang.seeds[0].speculation.algorithm", "did you mean"),
    ("{concurrency: [8]}", "{concurrency: [8, 4, 8]}", 21, "load", "lists a level twice"),
    ("{concurrency: [8]}", "{concurrency: [100000000]}", 21, "load.concurrency[0]", "less than or equal to 10000"),
    ("{concurrency: [8]}", "{concurrency: [8], min_repeats: 9}", 21, "load", "min_repeats is 9, more than the 5"),
    ("{concurrency: [8]}", "{concurrency: [8], level_budget_s: 1e9}", 21, "load.level_budget_s", "less than or equal"),
    ("  model: m", "  modle: m", 3, "sglang.modle", "did you mean 'model'"),
    ("size: 2", "size: 0", 4, "sglang.tensor_parallel_size", "greater than 0"),
    ("size: 2", "size: two", 4, "sglang.tensor_parallel_size", "integer"),
    (
        "size: 2",
        "size: 2\n  tensor_parallel_size: 4",
        5,
        "sglang.tensor_parallel_size",
        "stated twice, first on line 4",
    ),
    ("EAGLE3: head", "EAGEL3: head", 5, "sglang.draft_models.EAGEL3", "did you mean 'EAGLE3'"),
    ("requests: 64", "requests: many", 7, "sglang.fixed.max_running_requests", "integer"),
    ("max_running_requests: 64", "max_runing_requests: 64", 7, "sglang.fixed.max_runing_requests", "did you mean"),
    ("max_running_requests: 64", "env: {NCCL_ALGO: off}", 7, "sglang.fixed.env.NCCL_ALGO", "quote it"),
    ("max_running_requests: 64", "env: {NCCL_ALGO: false}", 7, "sglang.fixed.env.NCCL_ALGO", "must be quoted"),
    ("max_running_requests: 64", "attention_backend: fa3", 18, "attention_backend", "fixed on line 7"),
    ("max_running_requests: 64", "env: {NCCL_ALGO: Ring}", 6, "sglang.fixed", "state collectives.nccl_algo"),
    ("max_running_requests: 64", "extra_args: [--tp=4]", 6, "sglang.fixed", "state tensor_parallel_size"),
    ("max_running_requests: 64", "extra_args: [--log, true]", 7, "sglang.fixed.extra_args[1]", "boolean"),
    ("      NGRAM:", "      NGRM:", 11, "speculation.NGRM", "did you mean 'NGRAM'"),
    ("        num_draft_tokens: [", "        num_drafts: [", 12, "speculation.NGRAM.num_drafts", "unknown key"),
    ("[4, 8]", "[4, 4]", 12, "speculation.NGRAM.num_draft_tokens[1]", "listed twice"),
    ("[4, 8]", "[0, 8]", 12, "speculation.NGRAM.num_draft_tokens[0]", "greater than 0"),
    ("[4, 8]", "[4, eight]", 12, "speculation.NGRAM.num_draft_tokens[1]", "integer"),
    ("[4, 8]", "[4, true]", 12, "speculation.NGRAM.num_draft_tokens[1]", "boolean"),
    ("[4, 8]", "[]", 12, "speculation.NGRAM.num_draft_tokens", "empty choice"),
    ("[4, 8]", "", 12, "speculation.NGRAM.num_draft_tokens", "empty choice"),
    ("{low: 1, high: 4}", "{low: 4, high: 1}", 14, "speculation.EAGLE3.num_steps.high", "reversed range"),
    ("{low: 1, high: 4}", "{low: 0, high: 4, log: true}", 14, "speculation.EAGLE3.num_steps.low", "log from 0"),
    ("{low: 1, high: 4}", "{low: 0, high: 4}", 14, "speculation.EAGLE3.num_steps.low", "greater than 0"),
    ("{low: 1, high: 4}", "{low: 1}", 14, "speculation.EAGLE3.num_steps.high", "missing"),
    ("{low: 1, high: 4}", "{low: 1, high: 4, setp: 2}", 14, "speculation.EAGLE3.num_steps.setp", "'step'"),
    ("{low: 1, high: 4}", "{low: 1, high: 4, step: 0}", 14, "speculation.EAGLE3.num_steps.step", "above 0"),
    ("{low: 1, high: 4}", "{low: 1, high: 4, step: 2, log: true}", 14, "speculation.EAGLE3.num_steps.step", "log"),
    ("{low: 1, high: 4}", "{low: 1, high: 4, choices: [1]}", 14, "speculation.EAGLE3.num_steps", "either"),
    ("{low: 1, high: 4}", "{low: 1, high: 4, type: float}", 14, "speculation.EAGLE3.num_steps.type", "int"),
    ("{low: 1, high: 4}", "{low: 1.5, high: 4}", 14, "speculation.EAGLE3.num_steps.low", "integer"),
    ("{low: 1, high: 4}", "{low: 1, high: 4000000}", 14, "speculation.EAGLE3.num_steps", "more than"),
    ("{low: 1, high: 4}", "{choices: [1], step: 1}", 14, "speculation.EAGLE3.num_steps.step", "means nothing"),
    ("[true, false]", "[on, false]", 16, "collectives.custom_all_reduce[0]", "quote it"),
    ("[true, false]", '["on", false]', 16, "collectives.custom_all_reduce[0]", "boolean"),
    ("[true, false]", "{low: 0, high: 1}", 16, "collectives.custom_all_reduce", "no number"),
    ("collectives:", "colectives:", 15, "colectives", "did you mean 'collectives'"),
    ("nccl_algo:", "nccl_alg:", 17, "collectives.nccl_alg", "did you mean 'nccl_algo'"),
    (
        "{collectives.custom",
        "{colectives.custom",
        17,
        "collectives.nccl_algo.when.colectives.custom_all_reduce",
        "did you mean",
    ),
    ("reduce: false}}", "reduce: maybe}}", 17, "collectives.nccl_algo.when.collectives.custom_all_reduce", "boolean"),
    ("when: {collectives.custom_all_reduce: false}", "when: false", 17, "collectives.nccl_algo.when", "mapping"),
    (
        "when: {collectives.custom_all_reduce: false}",
        "when: {attention_backend: fa3}",
        17,
        "collectives.nccl_algo.when.attention_backend",
        "never happens",
    ),
    (
        "when: {collectives.custom_all_reduce: false}",
        "when: {collectives.nccl_algo: Ring}",
        17,
        "collectives.nccl_algo.when",
        "circle",
    ),
    ("attention_backend: [triton]", "extra_args: [[a]]", 18, "extra_args", "cannot be searched"),
    ("attention_backend: [triton]", "kv_cache_dtype: [fp8_e4m3]", 18, "kv_cache_dtype", "allow_lossy"),
    (
        "      nccl_algo:",
        "      quant_communications: [true, false]\n      nccl_algo:",
        17,
        "collectives.quant_communications",
        "allow_lossy",
    ),
    (
        "num_steps: {low: 1, high: 4}",
        "accept_threshold_single: [0.5]",
        14,
        "speculation.EAGLE3.accept_threshold_single",
        "allow_lossy",
    ),
    ("algorithm: NGRAM}", "algorithm: EAGLE}", 20, "sglang.seeds[0].speculation.algorithm", "outside of the space"),
    (
        "{speculation.algorithm: NGRAM}",
        "{speculation.algorithm: none, speculation.NGRAM.num_draft_tokens: 4}",
        20,
        "sglang.seeds[0].speculation.NGRAM.num_draft_tokens",
        "exists only with",
    ),
    (
        "{speculation.algorithm: NGRAM}",
        "{speculation.algoritm: NGRAM}",
        20,
        "sglang.seeds[0].speculation.algoritm",
        "did you mean",
    ),
    ("{concurrency: [8]}", "{concurrency: [0]}", 21, "load.concurrency[0]", "greater than 0"),
    ("{concurrency: [8]}", "{}", 21, "load", "at least one of"),
    ("{trials: 8}", "{trails: 8}", 22, "search.budget.trails", "did you mean 'trials'"),
    ("load:", "objective: {goals: [{concurrency: 4}]}\nload:", 21, "objective.goals[0].concurrency", "one of 8"),
    ("load:", "objective: {goals: [{weights: {opn: 1}}]}\nload:", 21, "objective.goals[0].weights.opn", "'open'"),
    ("load:", "objective: {goals: [{}, {}]}\nload:", 21, "objective", "both goals are the same"),
    ("load:", "objective: {constraints: {error_rate: 2}}\nload:", 21, "objective.constraints.error_rate", "equal to 1"),
    ("load:", "workload: {prompts: {a/b: open}}\nload:", 21, "workload.prompts.a/b", "cannot be named 'a/b'"),
    ("load:", "workload: {prompts: {'': open}}\nload:", 21, "workload.prompts.", "cannot be named ''"),
    ("{budget: {trials: 8}}", "{seed: -1}", 22, "search.seed", "greater than or equal to 0"),
    ("{budget: {trials: 8}}", "{sampler: tpee}", 22, "search.sampler", "did you mean 'tpe'"),
    (
        "  seeds:\n",
        "  rules: {allow: [bare-treee]}\n  seeds:\n",
        19,
        "sglang.rules.allow[0]",
        "did you mean 'bare-tree'",
    ),
]


def _write(tmp_path: Path, old: str, new: str) -> Path:
    assert old in GOOD
    path = tmp_path / "space.yaml"
    path.write_text(GOOD.replace(old, new, 1))
    return path


def test_the_file_without_a_mistake_loads(tmp_path: Path) -> None:
    assert load_space(_write(tmp_path, "study: s", "study: s")).for_engine("sglang").size() == 14


@pytest.mark.parametrize(("old", "new", "line", "key", "words"), MISTAKES)
def test_mistake(tmp_path: Path, old: str, new: str, line: int, key: str, words: str) -> None:
    path = _write(tmp_path, old, new)
    with pytest.raises(InputError, match=words) as caught:
        load_space(path)
    assert caught.value.source == str(path)
    assert caught.value.line == line
    assert str(caught.value.key).removeprefix("sglang.space.") == key
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_lossy_settings_pass_where_the_file_allows_them(tmp_path: Path) -> None:
    path = _write(tmp_path, "attention_backend: [triton]", "kv_cache_dtype: [auto, fp8_e4m3]")
    path.write_text("allow_lossy: true\n" + path.read_text())
    assert load_space(path).allow_lossy


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"trials": 0}, "--trials"),
        ({"hours": float("inf")}, "--time-budget"),
        ({"seed": -1}, "--seed"),
        ({"model": ""}, "--model: no model"),
        ({"draft_model": ("EAGLE3=",)}, "--draft-model: no model"),
        ({"hours": -1.0}, "--time-budget"),
        ({"hours": float("nan")}, "--time-budget"),
        ({"concurrency": (10**8,)}, "--concurrency: .*up to 10000"),
        ({"concurrency": (8, 8)}, "--concurrency: a level is stated twice"),
        ({"concurrency": (4, 0)}, "--concurrency"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size"),
        ({"engine": "sglag"}, "did you mean 'sglang'"),
        ({"sampler": "tpee"}, "did you mean 'tpe'"),
    ],
)
def test_wrong_flags(given: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Overrides(**given)  # type: ignore[arg-type]


def test_what_is_missing_names_the_flag_that_supplies_it(tmp_path: Path) -> None:
    no_model = _write(tmp_path, "  model: m\n", "")
    with pytest.raises(InputError, match=r"missing model.*--model"):
        load_space(no_model).for_engine("sglang")
    assert load_space(no_model, Overrides(model="x")).for_engine("sglang").model == "x"
    with pytest.raises(InputError, match=r"no `embedded` part.*--engine sglang"):
        load_space(no_model).for_engine("embedded")
    no_draft = _write(tmp_path, "EAGLE3: head", "STANDALONE: head")
    with pytest.raises(InputError, match=r"EAGLE3 needs a draft model.*--draft-model EAGLE3=MODEL"):
        load_space(no_draft).for_engine("sglang")
    assert load_space(no_draft, Overrides(draft_model="d")).for_engine("sglang").draft_models["EAGLE3"] == "d"


def test_one_draft_for_several_algorithms_must_be_told_apart(tmp_path: Path) -> None:
    path = _write(tmp_path, "      NGRAM:\n        num_draft_tokens: [4, 8]", "      STANDALONE: {num_steps: [2]}")
    path.write_text(path.read_text().replace("NGRAM", "STANDALONE"))
    with pytest.raises(InputError, match="STANDALONE=d, EAGLE3=d"):
        load_space(path, Overrides(draft_model="d")).for_engine("sglang")


def test_a_draft_for_what_does_not_draft(tmp_path: Path) -> None:
    spec = load_space(_write(tmp_path, "study: s", "study: s"), Overrides(draft_model="EAGEL3=d"))
    with pytest.raises(InputError, match=r"^--draft-model: EAGEL3 takes no draft.*did you mean 'EAGLE3'"):
        spec.for_engine("sglang")


def test_local_models_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    path = _write(tmp_path, "model: m", f"model: {tmp_path}/targt")
    with pytest.raises(InputError, match=r"no model folder .*did you mean '.*/target'") as caught:
        load_space(path).for_engine("sglang").check_paths()
    assert (caught.value.source, caught.value.line, caught.value.key) == (str(path), 3, "sglang.model")
    given = Overrides(model=str(tmp_path / "target"), draft_model=f"EAGLE3={tmp_path}/none")
    with pytest.raises(InputError, match=r"^--draft-model: sglang\.draft_models\.EAGLE3: no model folder"):
        load_space(path, given).for_engine("sglang").check_paths()


@pytest.mark.parametrize("stated", ["[none, NGRAM]", "NGRAM", "{NGRAM: 8}"])
def test_algorithms_are_branches_not_a_list(tmp_path: Path, stated: str) -> None:
    (tmp_path / "a.yaml").write_text(f"study: a\nsglang:\n  model: m\n  space:\n    speculation: {stated}\n")
    with pytest.raises(InputError, match=r"a\.yaml:5: sglang\.space\.speculation.*expected a mapping"):
        load_space(tmp_path / "a.yaml")


def test_a_file_without_an_engine(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("study: a\n")
    with pytest.raises(InputError, match="no engine in this file"):
        load_space(tmp_path / "a.yaml")


ONE, TWO = (Topology(gpu_count=count, gpu_model="NVIDIA H200") for count in (1, 2))


@pytest.mark.parametrize(
    ("asked", "topology", "installed", "need", "engine"),
    [
        ("auto", Topology(), None, 8, "embedded"),
        ("auto", TWO, "0.5.23", 2, "sglang"),
        ("sglang", TWO, "0.5.23", 1, "sglang"),
        ("embedded", TWO, "0.5.23", 8, "embedded"),
    ],
)
def test_engine_choice(asked: str, topology: Topology, installed: str | None, need: int, engine: str) -> None:
    choice = choose_engine(asked, topology, installed, need)
    assert choice.engine == engine
    assert choice.reason


@pytest.mark.parametrize(
    ("asked", "topology", "installed", "need", "words"),
    [
        ("auto", TWO, "0.5.23", 8, "needs 8 GPUs, this machine has 2.*--tensor-parallel-size 2.*--model"),
        ("auto", ONE, None, 1, r"not installed.*pip install '\.\[sglang\]'.*--engine embedded"),
        ("sglang", Topology(), "0.5.23", 8, "no GPU on this machine.*--engine embedded"),
    ],
)
def test_no_silent_step_down(asked: str, topology: Topology, installed: str | None, need: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        choose_engine(asked, topology, installed, need)


def test_the_command_ends_with_one_line_and_exit_code_2_in_time(tmp_path: Path) -> None:
    path = _write(tmp_path, "{low: 1, high: 4}", "{low: 4, high: 1}")
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "pipeline.tune", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert f"{path}:14: sglang.space.speculation.EAGLE3.num_steps.high: a reversed range" in ended.stderr
    assert time.monotonic() - began < 10  # under 2 s on a quiet machine
