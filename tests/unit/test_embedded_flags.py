"""The embedded server's flags: SGLang's names, its defaults, and its exit code for a wrong one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from serve.embedded.flags import parse, usable_cpus

MODEL = ["--model", "m"]
NGRAM = [*MODEL, "--speculative-algorithm", "NGRAM"]
STANDALONE = [*MODEL, "--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "d"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--model"),
        ([*MODEL, "--speculative-algorithm", "EAGLE"], "invalid choice"),
        ([*MODEL, "--speculative-algorithm", "STANDALONE"], "--speculative-draft-model-path"),
        ([*MODEL, "--speculative-num-draft-tokens", "4"], "needs --speculative-algorithm"),
        ([*NGRAM, "--speculative-num-draft-tokens", "1"], "at least 2"),
        ([*NGRAM, "--speculative-num-draft-tokens", "0"], "positive"),
        ([*STANDALONE, "--speculative-eagle-topk", "4"], "invalid choice"),
        ([*MODEL, "--speculative-algo", "NGRAM"], "unrecognized arguments"),  # no abbreviations
        ([*MODEL, "--dtype", "int8"], "invalid choice"),
    ],
)
def test_a_wrong_flag_exits_with_two_and_says_which(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(flags)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_what_speculation_leaves_open_is_filled_in_as_sglang_does() -> None:
    assert parse(NGRAM).speculative_num_draft_tokens == 12
    standalone = parse([*STANDALONE, "--speculative-num-steps", "5"])
    assert standalone.speculative_num_draft_tokens == 6
    assert parse(STANDALONE).speculative_num_steps == 3


def test_without_flags_it_serves_under_its_own_name_on_every_usable_core() -> None:
    args = parse(MODEL)
    assert args.served_model_name == "m"
    assert args.threads == usable_cpus()
    assert args.speculative_algorithm is None


def test_flags_are_read_without_torch() -> None:
    code = "import sys, serve.embedded.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
