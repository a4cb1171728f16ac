"""Log lines and metrics in SGLang's words, so that what reads SGLang reads this too."""

from __future__ import annotations

import re

from serve.embedded.records import Tally
from serve.embedded.telemetry import Telemetry

# The tolerant pattern for SGLang's decode lines of all releases, without its time stamp.
DECODE = re.compile(
    r"Decode batch(?: \[\d+\])?[.,] #running-req: (?P<run>\d+)(?=.*?gen throughput \(token/s\): (?P<tput>[\d.]+))"
    r"(?:.*?accept len: (?P<length>[\d.]+))?(?:.*?accept rate: (?P<rate>[\d.]+))?"
)


def telemetry(*, speculative: bool = True, model: str = "m") -> Telemetry:
    return Telemetry(model_name=model, speculative=speculative, context_length=100, log_interval=2)


def values(page: str) -> dict[str, float]:
    return {line.split("{")[0]: float(line.split()[-1]) for line in page.splitlines() if not line.startswith("#")}


def test_a_decode_line_comes_every_so_many_steps_with_the_window_s_accept_length() -> None:
    seen = telemetry()
    start, one, two = Tally(10), Tally(10, 3, 1, 2, 4), Tally(10, 4, 2, 2, 8)
    assert "#new-token: 10" in seen.prefilled(10, 0.5, 0)
    assert "input throughput (token/s): 20.00" in seen.prefilled(10, 0.5, 0)
    assert seen.decoded(start, one, 0) is None
    line = seen.decoded(one, two, 3)
    assert line is not None
    found = DECODE.search(line)
    assert found is not None
    assert (found["length"], found["rate"]) == ("2.00", "0.25")  # 4 tokens in 2 steps, 2 of 8 drafts
    assert line.endswith("#queue-req: 3")


def test_without_speculation_no_accept_length_is_said() -> None:
    seen = telemetry(speculative=False)
    seen.prefilled(10, 0.5, 0)
    seen.decoded(Tally(10), Tally(10, 1), 0)
    assert "accept" not in str(seen.decoded(Tally(10, 1), Tally(10, 2), 0))
    assert not [name for name in values(seen.prometheus(running=0, queued=0)) if "spec" in name]
    assert "avg_spec_accept_length" not in seen.internal_state()


def test_unknown_is_left_out_not_zero() -> None:
    state = telemetry().internal_state()
    assert state == {"effective_max_running_requests_per_dp": 1}
    page = values(telemetry().prometheus(running=0, queued=0))
    assert "sglang:spec_accept_length" not in page
    assert page["sglang:spec_verify_calls_total"] == 0


def test_counters_add_up_and_a_flush_starts_the_mean_anew() -> None:
    seen = telemetry()
    seen.finished(Tally(10, 8, 4, 4, 8), aborted=False)
    seen.finished(Tally(5, 4, 1, 3, 3), aborted=True)
    page = values(seen.prometheus(running=1, queued=2))
    assert (
        page.items()
        >= {
            "sglang:prompt_tokens_total": 15,
            "sglang:generation_tokens_total": 12,
            "sglang:spec_verify_calls_total": 5,
            "sglang:num_requests_total": 2,
            "sglang:num_aborted_requests_total": 1,
            "sglang:num_running_reqs": 1,
            "sglang:num_queue_reqs": 2,
        }.items()
    )
    assert seen.internal_state()["avg_spec_accept_length"] == 12 / 5
    seen.flush()
    assert "avg_spec_accept_length" not in seen.internal_state()
    assert values(seen.prometheus(running=0, queued=0))["sglang:generation_tokens_total"] == 12


def test_a_model_s_name_cannot_break_the_metrics_page() -> None:
    assert 'model_name="a\\"b\\\\c"' in telemetry(model='a"b\\c').prometheus(running=0, queued=0)
