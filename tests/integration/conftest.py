"""One Ray cluster for all these tests: starting one costs ten seconds. Two nodes' worth of pretended GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.environment import serve_environment
from tests.fakes.running import free_port

PORT = free_port()
FAKE = Path(__file__).parent.parent / "fakes" / "sglang_server.py"
GPUS = 4
# Ray and Serve read these when they are imported.
os.environ.update(serve_environment(PORT), RAY_AUTH_MODE="disabled")
# Two workers look at the same moment: each takes ports of its own.
OWN = ("HAPROXY_METRICS_PORT", "HAPROXY_STATS_PORT", "FALLBACK_PROXY_HTTP_PORT")
os.environ.update({f"RAY_SERVE_{name}": str(free_port()) for name in OWN})


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[str]:
    """A local cluster whose SGLang is the fake one; yields the endpoint's address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTVERIFY_SGLANG_COMMAND", f"{sys.executable} {FAKE}")
        yield from _cluster()


def _cluster() -> Iterator[str]:
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    # As `pipeline.cluster` does it, but with an endpoint; the slot is where a study's trials would run.
    env = {"env_vars": {"PYTHONPATH": str(FAKE.parent.parent.parent)}}
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=2, num_gpus=GPUS, resources={"engine_slot": 1},
             runtime_env=env)  # fmt: skip
    try:
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=PORT))
        yield f"http://127.0.0.1:{PORT}"
    finally:
        serve.shutdown()
        ray.shutdown()
