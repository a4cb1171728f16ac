"""What a log says: decode lines of every release, degraded features, why an engine died."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from pipeline.config import EngineConfig
from pipeline.records import Failure, FailureClass
from serve.engines import logs
from serve.engines.logs import classify, decode_line, degraded, log_accept_length, second_try
from tests.fakes.fake_failures import FAILURES, Death

FIXTURES = Path(__file__).parent.parent / "fixtures" / "sglang-0.5.17"


CPU_FIXTURES = FIXTURES.with_name("sglang-0.5.23-cpu")


def fixture(name: str, folder: Path = FIXTURES) -> str:
    with gzip.open(folder / f"{name}.log.gz", "rt") as file:
        return file.read()


# The lines of public reports, by release: ranks, running, tokens/s, accept length, accept rate.
SHAPES = [
    (
        "[2024-12-20 12:45:38 TP0] Decode batch. #running-req: 16, #token: 24443, token usage: 0.02, "
        "gen throughput (token/s): 2739.89, #queue-req: 0",
        (("TP0",), 16, 2739.89, None, None),
    ),
    (
        "(head, rank=0, pid=18260) [2025-02-14 00:42:22 DP2 TP2] Decode batch. #running-req: 1, #token: 210, "
        "token usage: 0.00, gen throughput (token/s): 11.45, #queue-req: 0",
        (("DP2", "TP2"), 1, 11.45, None, None),
    ),
    (
        "Decode batch. #running-req: 3, #token: 30, token usage: 0.10, accept len: 2.50, "
        "gen throughput (token/s): 99.00, #queue-req: 1",
        ((), 3, 99.0, 2.5, None),
    ),
    (
        "[2025-06-01 10:00:00 TP0] Decode batch. #running-req: 3, #token: 30, token usage: 0.10, accept len: 2.50, "
        "pre-allocated usage: 0.10, #retracted-req: 0, cuda graph: True, gen throughput (token/s): 99.00",
        (("TP0",), 3, 99.0, 2.5, None),
    ),
    (
        "2025-12-04 20:35:53 INFO 151972 [scheduler_metrics_mixin.py:287] Decode batch. #running-req: 48, "
        "#token: 3894, token usage: 0.00, accept len: 1.00, accept rate: 0.11, cuda graph: False, "
        "gen throughput (token/s): 5452.63, #queue-req: 0, ",
        ((), 48, 5452.63, 1.0, 0.11),
    ),
    (
        "[2025-11-01 10:00:00] Decode batch [123], #running-req: 2, #token: 20, token usage: 0.00, cuda graph: True, "
        "gen throughput (token/s): 50.00, #queue-req: 0, ",
        ((), 2, 50.0, None, None),
    ),
    (
        "[2026-07-04 04:32:35 TP0] Decode batch, #running-req: 68, #full token: 321920, full token usage: 0.49, "
        "mamba num: 66, mamba usage: 0.54, accept len: 2.99, accept rate: 0.66, npu graph: True, "
        "gen throughput (token/s): 2499.67, #queue-req: 0",
        (("TP0",), 68, 2499.67, 2.99, 0.66),
    ),
    (
        "[2026-07-21 15:00:13 TP0 EP0] Decode batch, #running-req: 24, #token: 233600, token usage: 0.66, "
        "accept len: 3.05, accept rate: 0.68, npu graph: True, gen throughput (token/s): 239.06, #queue-req: 2",
        (("TP0", "EP0"), 24, 239.06, 3.05, 0.68),
    ),
    (
        "[2026-08-14 14:02:47 TP0] Decode batch, #running-req: 3, #token: 266624, token usage: 0.43, "
        "accept len: 1.67, accept rate: 0.13, pre-allocated usage: 0.22, #prealloc-req: 0, #transfer-req: 1, "
        "#retracted-req: 0, cuda graph: True, gen throughput (token/s): 183.10, #queue-req: 0",
        (("TP0",), 3, 183.1, 1.67, 0.13),
    ),
    (
        "[2026-11-30 02:02:25.123 DP1 PP0 ATTN_CP2 MOE_DP0 TP3 EP4] Decode batch, #running-req: 6, #token: 1180, "
        "token usage: 0.00, accept len: 2.02, accept rate: 0.34, cap len: 3.00, block accept len: 2.50, "
        "cuda graph: True, gen throughput (token/s): 3172.44, #queue-req: 0, est. decode TFLOPS/s (per GPU): 1.00",
        (("DP1", "PP0", "ATTN_CP2", "MOE_DP0", "TP3", "EP4"), 6, 3172.44, 2.02, 0.34),
    ),
    (
        "[2026-11-30 02:02:25] Decode batch, #running-req: 6, #token: 1180, token usage: 0.00, cap len: 3.00, "
        "block accept len: 2.50, cuda graph: True, gen throughput (token/s): 3172.44, #queue-req: 0",
        ((), 6, 3172.44, None, None),
    ),
]


@pytest.mark.parametrize(("line", "expected"), SHAPES)
def test_decode_lines_of_every_release(line: str, expected: tuple[object, ...]) -> None:
    found = decode_line(line)
    assert found is not None
    assert (found.ranks, found.running, found.throughput, found.accept_length, found.accept_rate) == expected


def test_other_lines_are_no_decode_lines() -> None:
    assert decode_line("[2026-11-30 02:02:20] Prefill batch, #new-seq: 1, #new-token: 6, #running-req: 0") is None
    assert decode_line("Decode batch is over") is None


@pytest.mark.parametrize("name", ["base_tp1", "dummy_tp2", "eagle3_tp1", "ngram8_tp1", "standalone_tp1", "student_tp1"])
def test_every_decode_line_of_the_real_logs_parses(name: str) -> None:
    text = fixture(name)
    parsed = [line for line in text.splitlines() if decode_line(line)]
    assert len(parsed) == text.count("Decode batch") > 90


def test_accept_length_of_the_log_agrees_with_the_server() -> None:
    # /server_info of the same run: avg_spec_accept_length 1.6626
    assert log_accept_length(fixture("eagle3_tp1").splitlines()) == pytest.approx(1.6626, abs=0.005)
    assert log_accept_length(fixture("base_tp1").splitlines()) is None


def test_accept_length_weighs_ranks_by_their_requests() -> None:
    line = "[2026-11-30 02:02:25 DP{}] Decode batch, #running-req: {}, accept len: {}, gen throughput (token/s): 1.0"
    assert log_accept_length([line.format(0, 9, "2.0"), line.format(1, 1, "4.0")]) == pytest.approx(2.2)


def test_the_ready_line_is_no_startup_line() -> None:
    assert logs.is_ready(fixture("base_tp1"))
    assert not logs.is_ready(fixture("tp2_nop2p_tree"))
    assert not logs.is_ready("INFO:     Application startup complete.")


@pytest.mark.parametrize(
    ("line", "tag"),
    [
        (
            "FlashInfer workspace preflight: cuMemCreate probe failed on at least one rank. Skipping allreduce fusion",
            "fusion skipped",
        ),
        (
            "CustomAllreduceV2 is disabled because it's not supported on more than two PCIe-only GPUs.",
            "custom all-reduce refused",
        ),
        (
            "Setup Custom allreduce failed with invalid literal for int() with base 10: 'GPU-1'. To silence this",
            "custom all-reduce failed",
        ),
        ("Max running requests is reset to 48 for speculative decoding.", "speculation limits the batch"),
        ("speculative_adaptive disabled: topk > 1. Falling back", "adaptive speculation off"),
        ("Cuda graph is disabled because of using torch native attention backend", "CUDA graphs off"),
        ("TorchSymmMemCommunicator: World size 2 not supported, communicator", "torch symmetric memory off"),
    ],
)
def test_degraded_features_become_tags(line: str, tag: str) -> None:
    assert degraded([f"[2026-11-30 02:02:25 TP0] {line}"]) == (tag,)


def test_healthy_logs_have_no_tags() -> None:
    assert degraded(fixture("eagle3_tp1").splitlines()) == ()
    assert degraded(fixture("dummy_tp2").splitlines()) == ("multimem all-gather off",)


# ---- why it died


def test_bare_tree_is_a_collective_failure_at_capture_with_its_cause_in_words() -> None:
    failure = classify(fixture("tp2_nop2p_tree"), 137, "launch", env={"NCCL_ALGO": "Tree"})
    assert (failure.failure_class, failure.phase, failure.rank) == (FailureClass.COLLECTIVE, "capture", "TP0")
    assert failure.cause == (
        "Tree has no all-gather: NCCL refused it while CUDA graphs were captured; use allreduce:tree"
    )
    assert any("NCCL error: invalid usage" in line for line in failure.log_tail)


def test_the_same_log_without_its_environment_still_names_the_usual_reason() -> None:
    failure = classify(fixture("tp2_nop2p_tree"), -9, "launch")
    assert failure.failure_class is FailureClass.COLLECTIVE
    assert "use allreduce:tree" in failure.cause


def test_another_algorithm_is_not_blamed_on_tree() -> None:
    failure = classify(fixture("tp2_nop2p_tree"), -9, "launch", env={"NCCL_ALGO": "NVLS"})
    assert failure.failure_class is FailureClass.COLLECTIVE
    assert "Tree" not in failure.cause


@pytest.mark.parametrize(("name", "who"), [("kill_scheduler", "scheduler_0"), ("kill_main", "the engine")])
def test_kill_9_of_a_real_process_is_no_crash(name: str, who: str) -> None:
    text = fixture(name, CPU_FIXTURES)
    assert logs.is_ready(text) and degraded(text.splitlines()) == ("CUDA graphs off",)
    failure = classify(text, -9, "measure")  # its main process kills itself when a child died
    assert (failure.failure_class, failure.phase) == (FailureClass.KILLED, "measure")
    assert failure.cause.startswith(f"{who} was killed by SIGKILL")


@pytest.mark.parametrize(
    ("name", "failure_class", "phase", "cause"),
    [
        ("ngram", FailureClass.CRASH, "load", "has no attribute 'copy_all_layer_kv_cache_cpu'"),
        ("triton", FailureClass.CRASH, "warm-up", "RuntimeError: 0 active drivers"),
        ("gguf", FailureClass.CONFIG_INVALID, "load", "no such model: ValueError: /models/smollm2-135m-0.1.2 is not a"),
    ],
)
def test_what_a_cpu_lacks_is_named(name: str, failure_class: FailureClass, phase: str, cause: str) -> None:
    failure = classify(fixture(name, CPU_FIXTURES), -9, "launch")
    assert (failure.failure_class, failure.phase) == (failure_class, phase)
    assert cause in failure.cause


def test_a_hung_fusion_is_named_by_what_it_did_last() -> None:
    failure = logs.stalled(fixture("tp2_fusion"), 180)
    assert failure.failure_class is FailureClass.HANG
    assert "180 s" in failure.cause and "all-reduce fusion" in failure.cause


EXPECTED = {
    "bad_flag": (FailureClass.CONFIG_INVALID, "--no-such-flag"),
    "bad_model": (FailureClass.CONFIG_INVALID, "no such model"),
    "weights_too_big": (FailureClass.OOM_RAISE, "raise mem_fraction_static"),
    "kv_pool_small": (FailureClass.OOM_RAISE, "raise mem_fraction_static"),
    "oom_serving": (FailureClass.OOM_LOWER, "lower mem_fraction_static"),
    "oom_capture": (FailureClass.OOM_LOWER, "cuda_graph_max_bs"),
    "capture": (FailureClass.CAPTURE, "SM90"),
    "nccl": (FailureClass.COLLECTIVE, "NCCL"),
    "tree": (FailureClass.COLLECTIVE, "while CUDA graphs were captured"),
    "watchdog": (FailureClass.COLLECTIVE, "never finished"),
    "draft_size": (FailureClass.DRAFT_MISMATCH, "size mismatch"),
    "draft_vocab": (FailureClass.DRAFT_MISMATCH, "vocab_size=49152"),
    "port": (FailureClass.PORT, "port"),
    "assertion": (FailureClass.CRASH, "AssertionError without a text at scheduler.py:4931"),
    "fusion_sm": (FailureClass.CONFIG_INVALID, "SM90"),
    "scheduler_killed": (FailureClass.KILLED, "scheduler_0"),
    "silent_kill": (FailureClass.KILLED, "SIGKILL"),
    "segfault": (FailureClass.CRASH, "SIGSEGV"),
}


def log_of(death: Death) -> str:
    lines = (
        line.replace("@TP0", "[2026-11-30 01:21:40 TP0]").replace("@ ", "[2026-11-30 01:21:40] ")
        for line in death.lines
    )
    return "\n".join(lines)


@pytest.mark.parametrize("name", sorted(FAILURES))
def test_every_way_to_die_has_its_class(name: str) -> None:
    death = FAILURES[name]
    failure_class, words = EXPECTED[name]
    failure = classify(log_of(death), death.exit_code, "launch")
    assert failure.failure_class is failure_class
    assert words in failure.cause
    shell = classify(log_of(death), 128 - death.exit_code if death.exit_code < 0 else death.exit_code, "launch")
    assert (shell.failure_class, shell.cause) == (failure.failure_class, failure.cause)


def test_exit_137_alone_is_not_out_of_memory() -> None:
    assert classify(log_of(FAILURES["nccl"]), 137, "launch").failure_class is FailureClass.COLLECTIVE


def test_the_first_failing_rank_is_reported_not_its_victims() -> None:
    first = log_of(FAILURES["kv_pool_small"]).replace("TP0", "TP1").rpartition("\n\n")[0]
    victims = log_of(FAILURES["nccl"])
    failure = classify(f"{first}\n\n{victims}", -9, "launch")
    assert (failure.failure_class, failure.rank) == (FailureClass.OOM_RAISE, "TP1")


def test_words_in_a_healthy_log_do_not_decide() -> None:
    text = "[2026-11-30 01:21:40] INFO: prompt said out of memory and NCCL error\n" + log_of(FAILURES["assertion"])
    assert classify(text, -9, "measure").failure_class is FailureClass.CRASH


def test_errors_after_the_sigquit_line_do_not_decide() -> None:
    text = log_of(FAILURES["draft_size"]) + "\nTraceback (most recent call last):\nRuntimeError: NCCL error: late"
    assert classify(text, -9, "launch").failure_class is FailureClass.DRAFT_MISMATCH


def test_an_error_of_the_argument_checks_is_an_invalid_configuration() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/x/sglang/srt/arg_groups/speculative_hook.py", line 1160, in f\n    assert a\nAssertionError'
    )
    failure = classify(text, 1, "launch")
    assert failure.failure_class is FailureClass.CONFIG_INVALID
    assert failure.cause == "AssertionError without a text at speculative_hook.py:1160"


def test_a_command_that_does_not_exist() -> None:
    failure = classify("cannot start sgl: No such file or directory\n", 127, "launch")
    assert failure.failure_class is FailureClass.CONFIG_INVALID
    assert "cannot start sgl" in failure.cause


def failed(failure_class: FailureClass) -> Failure:
    return Failure(failure_class=failure_class, cause="x")


def test_only_some_classes_are_worth_a_second_try_and_what_changes_is_said() -> None:
    stated = EngineConfig(engine="sglang", model="m", mem_fraction_static=0.9)
    lower = second_try(stated, failed(FailureClass.OOM_LOWER))
    assert lower is not None
    assert (lower[0].mem_fraction_static, lower[1]) == (0.8, "mem_fraction_static 0.9 -> 0.8")
    unstated = second_try(EngineConfig(engine="sglang", model="m"), failed(FailureClass.OOM_RAISE))
    assert unstated is not None
    assert (unstated[0].mem_fraction_static, unstated[1]) == (0.95, "mem_fraction_static not stated -> 0.95")
    assert second_try(stated, failed(FailureClass.OOM_RAISE)) is None  # 1.0 is no fraction
    assert second_try(stated, failed(FailureClass.PORT)) == (stated, "the port")
    for never in (FailureClass.CONFIG_INVALID, FailureClass.COLLECTIVE, FailureClass.HANG, FailureClass.DRAFT_MISMATCH):
        assert second_try(stated, failed(never)) is None
