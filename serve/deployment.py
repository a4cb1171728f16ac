"""One Ray Serve class for trials and champion: an engine as a child process of its replica.

A trial asks for the engine through `Deployed(...)`: the replica holds the GPUs, the trial holds the
node's `engine_slot`, and load goes straight to the engine's own port.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ray
from ray import serve

from pipeline.config import EngineConfig
from pipeline.errors import EngineError, TeardownError
from pipeline.phases import timed
from pipeline.records import Failure, FailureClass, Launch, TeardownProof
from pipeline.spec import Limits
from serve.engines import plan
from serve.process import EngineProcess, free_port, reap

POLL_S = 0.1
DELETE_S = 120.0  # Serve takes an application away; its controller may have to come back first
TAKEN_AWAY = "taken away"  # a failure's phase: somebody deleted the application, so nothing is to be tried again
_NO_ANSWER = (ray.exceptions.RayError, serve.exceptions.RayServeException, TimeoutError)
PLACEMENT_S = 120.0  # Serve finds a place and starts the replica's process, before the engine starts


@dataclass(frozen=True)
class EngineOptions:
    """Where an engine's log and lease go, its deadlines, and whether the replica waits for it."""

    folder: str
    limits: Limits
    wait: bool = False  # the champion's replica takes no traffic before its engine is ready
    port: int | None = None


class EngineReplica:
    """Owns one engine process from the replica's first moment to its last.

    In a trial (`wait=False`) a failure is state to be asked for: raising would make Serve start the
    same doomed engine again. The champion (`wait=True`) raises, so that Serve does just that.
    """

    def __init__(self, config: dict[str, Any], options: EngineOptions) -> None:
        self._options = options
        self._failure: Failure | None = None
        self._resolved: dict[str, Any] | None = None
        self._proof: TeardownProof | None = None
        self._stopping = threading.Lock()
        folder = Path(options.folder)
        folder.mkdir(parents=True, exist_ok=True)
        engine_config = EngineConfig.model_validate(config)
        self.launch = plan(
            engine_config,
            port=options.port or free_port(),
            gpu_ids=_gpu_ids(),
            inherited=dict(os.environ),
            log_path=str(folder / "engine.log"),
        )
        self._process = EngineProcess(self.launch, options.limits, engine=engine_config.engine, lease_dir=folder)
        # Started here and not in the waiting thread: a child with a death signal dies with the
        # thread that forked it.
        if options.wait:
            self._process.start()
            self._resolved = self._process.wait_ready()
        elif self._keep_failure(self._process.start):
            threading.Thread(target=self._keep_failure, args=(self._wait_ready,), daemon=True).start()

    def _wait_ready(self) -> None:
        self._resolved = self._process.wait_ready()

    def _keep_failure(self, step: Callable[[], None]) -> bool:
        try:
            step()
        except EngineError as error:
            self._failure = error.failure
        return self._failure is None

    def state(self) -> dict[str, Any]:
        """The launch, and what has become of it: resolved settings, a failure, or neither yet."""
        return {"owner": os.getpid(), "launch": self.launch, "resolved": self._resolved, "failure": self._failure}

    def check(self, owner: int | None = None) -> Failure | None:
        """Why the engine no longer answers, or None. Serve replaces a dead replica: `owner` says which one is meant."""
        if owner not in (None, os.getpid()):
            return _replaced(self.launch)
        if self._failure is None:
            try:
                self._process.check()
            except EngineError as error:
                self._failure = error.failure
        return self._failure

    def check_health(self) -> None:
        """Serve's probe. Only the champion is restarted; a trial asks `check` itself."""
        if self._options.wait and (failure := self.check()) is not None:
            raise EngineError(failure)

    def stop(self) -> TeardownProof:
        """Stop the engine and prove it gone; safe to call twice."""
        with self._stopping:
            if self._proof is None:
                self._proof = self._process.stop()
            return self._proof

    def __del__(self) -> None:
        """Serve's shutdown hook."""
        if hasattr(self, "_process"):
            self.stop()


def _replaced(launch: Launch) -> Failure:
    cause = "the engine's Serve replica was killed, and the engine with it"
    return Failure(failure_class=FailureClass.KILLED, cause=cause, phase="engine", log_path=launch.log_path)


def _gpu_ids() -> tuple[int, ...]:
    return tuple(int(gpu) for gpu in ray.get_gpu_ids())


class Deployed:
    """An engine under its own application name, for as long as the `with` block lasts.

    After the block, also one that failed to start, `launch`, `teardown` and `phases_s` tell what
    was started, what was proven gone, and how long each took.

    Raises (entering):
        EngineError: it could not be placed, failed to start, or did not become ready in time.
    Raises (leaving):
        TeardownError: something of it is left; the node must not be used again.
    """

    def __init__(self, config: EngineConfig, options: EngineOptions, *, app_name: str) -> None:
        self.config, self.options, self.app_name = config, options, app_name
        self.launch: Launch | None = None
        self.resolved: dict[str, Any] = {}
        self.teardown: TeardownProof | None = None
        self.phases_s: dict[str, float] = {}
        self._replica: Any = None
        self._owner: int | None = None

    @property
    def base_url(self) -> str:
        """Where the engine itself listens; only inside the block."""
        if self.launch is None:
            raise RuntimeError("the engine is not deployed")
        return self.launch.base_url

    def check(self) -> None:
        """Raise the engine's failure, if it has one."""
        failure = self._ask("check", self._owner)
        if failure is not None:
            raise EngineError(failure)

    def __enter__(self) -> Self:
        try:
            with timed(self.phases_s, "deploy"):
                self._replica = _deploy(application(self.config, self.options), self.app_name)
                _await_place(self.options, self.app_name)
                state = self._ask("state")
                self._owner, self.launch = state["owner"], state["launch"]
            with timed(self.phases_s, "ready"):
                self.resolved = self._await_ready()
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._take_down()

    def _await_ready(self) -> dict[str, Any]:
        while True:
            state = self._ask("state")
            failure = state["failure"] if state["owner"] == self._owner else _replaced(state["launch"])
            if failure is not None:
                raise EngineError(failure)
            if state["resolved"] is not None:
                resolved: dict[str, Any] = state["resolved"]
                return resolved
            time.sleep(POLL_S)  # the engine process keeps its own deadlines

    def _ask(self, method: str, *args: Any) -> Any:
        """The replica's answer, or an EngineError when the replica itself is gone."""
        try:
            return getattr(self._replica, method).remote(*args).result(timeout_s=60)
        except _NO_ANSWER as error:
            raise EngineError(self._gone(error)) from error

    def _gone(self, error: Exception) -> Failure:
        status = _status(self.app_name)
        if status is None or status.status == "DELETING":
            cause, phase = "the engine's Serve application was taken away, or Serve with it", TAKEN_AWAY
        else:
            cause = f"the engine's Serve replica does not answer: {type(error).__name__}"
            phase = "measure" if self.resolved else "launch"
        return Failure(failure_class=FailureClass.KILLED, cause=cause, phase=phase, log_path=self.options.folder)

    def _take_down(self) -> None:
        with timed(self.phases_s, "teardown"):
            self.teardown = _take_down(self._replica, self.options, self.app_name)
        if not self.teardown.proven:
            raise TeardownError(f"{self.app_name}: {', '.join(self.teardown.notes) or 'not proven gone'}")


def application(config: EngineConfig, options: EngineOptions, **deployment_options: Any) -> serve.Application:
    """The engine as a Serve application on the caller's node, holding one GPU a rank."""
    gpus = config.tensor_parallel_size if config.engine == "sglang" else 0
    here = f"node:{ray.util.get_node_ip_address()}"
    settings: dict[str, Any] = {
        "name": "engine",
        "num_replicas": 1,
        "max_ongoing_requests": 8,
        "health_check_period_s": 5,
        "health_check_timeout_s": options.limits.generate_s + 30,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": options.limits.stop_s + options.limits.proof_s,
        "ray_actor_options": {"num_cpus": 0, "num_gpus": gpus, "resources": {here: 0.001}},
    }
    app: serve.Application = serve.deployment(**settings | deployment_options)(EngineReplica).bind(
        config.model_dump(mode="json"), options
    )
    return app


def _deploy(app: serve.Application, name: str) -> Any:
    target = serve.RunTarget(app, name=name, route_prefix=None)
    try:
        (handle,) = serve.run_many([target], wait_for_applications_running=False)
    except _NO_ANSWER as error:
        cause = f"Ray Serve did not take the application: {error}"
        raise EngineError(Failure(failure_class=FailureClass.UNREADY, cause=cause, phase="deploy")) from error
    return handle


def _status(name: str) -> Any:
    """An application's status; None when there is none, or when Serve's controller is not there just now."""
    try:
        return serve.status().applications.get(name)
    except _NO_ANSWER:
        return None


def _await_place(options: EngineOptions, app_name: str) -> None:
    """Wait until the replica's process runs; say why it could not be placed otherwise."""
    deadline = time.monotonic() + PLACEMENT_S
    while True:
        status = _status(app_name)
        state = status.status if status is not None else None
        if state == "RUNNING":
            return
        if state in ("DEPLOY_FAILED", "UNHEALTHY") or time.monotonic() > deadline:
            raise EngineError(_not_placed(status, options))
        time.sleep(POLL_S)


def _not_placed(status: Any, options: EngineOptions) -> Failure:
    said = " ".join(d.message for d in status.deployments.values()) if status is not None else ""
    cause = said or f"Ray Serve found no place for the engine within {PLACEMENT_S:.0f} s: are its GPUs in use?"
    return Failure(failure_class=FailureClass.UNREADY, cause=cause, phase="deploy", log_path=options.folder)


def _take_down(replica: Any, options: EngineOptions, app_name: str) -> TeardownProof:
    """Stop the engine in its replica, delete the application, then look again from outside."""
    began = time.monotonic()
    proof: TeardownProof | None = None
    if replica is not None:
        wait_s = options.limits.stop_s + options.limits.proof_s + 30
        try:
            proof = replica.stop.remote().result(timeout_s=wait_s)
        except _NO_ANSWER:
            proof = None  # the replica died; the lease tells what it left
    gone = delete_app(app_name)
    left = reap(Path(options.folder))
    proof = proof or TeardownProof(group_dead=True, ports_free=True, seconds=0.0, notes=("by its lease",))
    update: Mapping[str, Any] = {
        "app_gone": gone,
        "group_dead": proof.group_dead and not left,
        "seconds": time.monotonic() - began,
        "notes": proof.notes + tuple(left) + (() if gone else (f"Ray Serve still has {app_name}",)),
    }
    return proof.model_copy(update=update)


def start_serve() -> None:
    """Start Serve on this cluster, from the driver: its controller must not lie in a trial's placement group.

    No proxy: trials take their load on the engine's own port, and port 8000 stays the user's.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # importing `ray.serve` has set INFO
    serve.start(proxy_location="Disabled")


def delete_app(name: str) -> bool:
    """Delete an application; True when it is gone, also when it, or Serve itself, never was."""
    deadline = time.monotonic() + DELETE_S
    while True:
        try:
            if name not in stale_apps(name):
                return True
            serve.delete(name)
        except _NO_ANSWER:
            time.sleep(POLL_S)
        if time.monotonic() > deadline:
            return False


def stale_apps(prefix: str) -> list[str]:
    """Names of the applications that begin with `prefix`."""
    try:
        return [name for name in serve.status().applications if name.startswith(prefix)]
    except serve.exceptions.RayServeException:
        return []  # no Serve on this cluster
