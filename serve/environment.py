"""Variables that Ray and Serve read when they are imported: set them first, import Ray after."""

from __future__ import annotations

import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

SLOT = "engine_slot"  # a Ray resource, one a node: a trial has the node's GPUs to itself
METRICS_PORT, STATS_PORT, FALLBACK_PORT = 9101, 8404, 8500  # Ray's defaults


def _free(wanted: int) -> int:
    """The wanted port, or any other when it is taken."""
    for port in (wanted, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("0.0.0.0", port))  # noqa: S104 - HAProxy listens there, and cannot be told otherwise
            return int(probe.getsockname()[1])
    raise OSError("no free port")


def serve_environment(port: int, *, haproxy: bool = True) -> dict[str, str]:
    """Variables that Ray must see before it starts.

    HAProxy in front of the replicas costs a third of the latency of Serve's own proxy. Its files go
    to a folder of this user and port, since the default is shared by everybody on the machine. The
    pass-through never blocks, so it shares the replica's event loop: a thread of its own would cost
    every chunk a hop, and two thirds of the throughput flat out on two cores.
    """
    shape = {
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serve.middleware.middlewares",
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_worker_niceness": "0",  # Ray's 15 would have engine, replica and HAProxy give way to everything else
    }
    if not haproxy:
        return {**shape, "RAY_SERVE_ENABLE_HA_PROXY": "0"}
    folder = Path(tempfile.gettempdir()) / f"fv-{os.getuid()}-{port}"  # Ray adds 57 letters; sockets take 97
    return {
        **shape,
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        # HAProxy does not start while another one on this machine holds its own two ports.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free(METRICS_PORT)),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free(STATS_PORT)),
        # Where HAProxy turns to while no replica answers. Ray opens it with SO_REUSEPORT: two services on one
        # machine would share it, and one would get requests of the other.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(_free(FALLBACK_PORT)),
    }
