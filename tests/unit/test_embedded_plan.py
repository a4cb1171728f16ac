"""The embedded engine's launch, to the letter."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pipeline.config import EngineConfig
from pipeline.errors import InputError
from serve.embedded.flags import parse
from serve.engines.embedded import _ROOT, DIMENSIONS, plan


def config(**fields: Any) -> EngineConfig:
    return EngineConfig.model_validate({"engine": "embedded", "model": "smollm2-135m"} | fields)


COMMON = (
    "-m serve.embedded.server --model-path smollm2-135m --served-model-name smollm2-135m --host 127.0.0.1 --port 4000 "
)
STANDALONE = {"algorithm": "STANDALONE", "draft_model": "smollm2-student"}


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({}, "--max-queued-requests 48"),
        (
            {"dtype": "bfloat16", "context_length": 2048, "max_running_requests": 4, "extra_args": ["--threads", "1"]},
            "--dtype bfloat16 --context-length 2048 --max-queued-requests 4 --threads 1",
        ),
        (
            {"speculation": {"algorithm": "NGRAM", "num_draft_tokens": 8, "max_trie_depth": 3}},
            "--max-queued-requests 48 --speculative-algorithm NGRAM --speculative-num-draft-tokens 8 "
            "--speculative-ngram-max-trie-depth 3",
        ),
        (
            {"speculation": STANDALONE | {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}},
            "--max-queued-requests 48 --speculative-algorithm STANDALONE "
            "--speculative-draft-model-path smollm2-student --speculative-num-steps 3 "
            "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
        ),
    ],
)
def test_the_command_is_what_the_configuration_says_and_the_server_takes_it(fields: dict[str, Any], flags: str) -> None:
    launch = plan(config(**fields), port=4000, inherited={})
    assert launch.argv == (sys.executable, *(COMMON + flags).split())
    assert parse(launch.argv[3:]).port == 4000
    assert launch.base_url == "http://127.0.0.1:4000"


def test_the_environment_is_offline_finds_the_project_and_drops_inherited_threads() -> None:
    inherited = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PATH": "/bin", "PYTHONPATH": "/mine"}
    launch = plan(config(env=[["A", "b"]]), port=1, inherited=inherited)
    assert launch.env == {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{_ROOT}:/mine",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "A": "b",
    }
    assert launch.scrubbed == ("MKL_NUM_THREADS", "OMP_NUM_THREADS")


def test_models_are_served_under_their_names_from_where_they_lie() -> None:
    argv = plan(config(speculation=STANDALONE), port=1, inherited={}, folder_of=lambda name: f"/cache/{name}").argv
    args = parse(argv[3:])
    assert args.model_path == "/cache/smollm2-135m"
    assert args.served_model_name == "smollm2-135m"
    assert args.speculative_draft_model_path == "/cache/smollm2-student"


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"speculation": {"algorithm": "EAGLE3", "draft_model": "d"}}, "speculation.algorithm"),
        ({"speculation": {"algorithm": "DFLASH"}}, "speculation.algorithm"),
        ({"speculation": {"algorithm": "NGRAM", "max_bfs_breadth": 4}}, "speculation.NGRAM.max_bfs_breadth"),
        ({"speculation": STANDALONE | {"adaptive": True}}, "speculation.STANDALONE.adaptive"),
        ({"collectives": {"nccl_algo": "Ring"}}, "collectives.nccl_algo"),
        ({"attention_backend": "triton"}, "attention_backend"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
    ],
)
def test_a_setting_that_it_lacks_is_refused_by_name(fields: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as refused:
        plan(config(**fields), port=1, inherited={})
    assert refused.value.key == key
    assert key == "speculation.algorithm" or key not in DIMENSIONS
