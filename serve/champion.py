"""The champion's replica: the trial's engine class and the pass-through, in one process.

A new configuration arrives as Serve's `user_config`, which Serve hands to the living replica. It drains,
stops its engine, starts the new one on the same GPUs and answers 503 with `Retry-After` meanwhile,
or passes requests to a bridge: the same configuration, proven on other GPUs. An engine that fails
to start is followed by the old one, without help from outside.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ray import serve

from pipeline.errors import EngineError
from pipeline.records import TeardownProof
from serve.deployment import EngineOptions, EngineReplica
from serve.keys import KeyRing
from serve.portable import localized
from serve.proxy import PassThrough
from serve.service import ChampionSpec, ProxySettings, Switch

log = logging.getLogger("ray.serve")
POLL_S = 0.05
ROTATION_S = 2.0  # the server in front hears this much later that a replica is in or out of the rotation


class Champion:
    """One engine, and the ASGI app in front of it. Keys come from the environment, never from Serve's state."""

    def __init__(self) -> None:
        self._proxy = PassThrough(ProxySettings(echo_request_id=False), KeyRing.from_environment(os.environ))
        self._spec: ChampionSpec | None = None
        self._engine: EngineReplica | None = None
        self._switching = False
        self._switch: Switch | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: EngineError | None = None
        self._launches = 0
        self._one_change = asyncio.Lock()
        # An engine dies with the thread that forked it, so one thread lives as long as the replica.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    def __serve_build_asgi_app__(self) -> PassThrough:
        """Serve's hook for an ASGI app made in the replica."""
        return self._proxy

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's hook: the first call starts the engine, later ones change it.

        Raises:
            EngineError: no engine runs now, neither the new nor the old; Serve replaces the replica.
        """
        wanted = ChampionSpec.model_validate(user_config)
        self._proxy.configure(wanted.proxy)
        if self._spec is None:
            await self._start(wanted)
            _take_turns()  # after the start: the engines' thread lives, and it and they keep the usual policy
        elif wanted.config != self._spec.config:
            # Serve takes a replica out of the rotation until this returns. With others there, that is
            # wanted; alone, its callers would hang, where they should hear for how long.
            self._switching = True
            alone = await asyncio.to_thread(_replicas) < 2
            if not alone:
                await asyncio.sleep(ROTATION_S)
            self._task = asyncio.create_task(self._change(wanted))
            if not alone:
                await self._task

    def status(self) -> dict[str, Any]:
        """What runs, and how the last change went."""
        return {
            "config_id": self._spec.config.config_id if self._spec else None,
            "resolved": self._engine.state()["resolved"] if self._engine else None,
            "launch": self._engine.launch if self._engine else None,
            "switching": self._switching,
            "switch": self._switch,
        }

    async def check_health(self) -> None:
        """Serve's probe: a dead or mute engine makes Serve replace the replica."""
        if self._failure is not None:
            raise self._failure
        if self._engine is None or self._switching:
            return
        failure = await asyncio.to_thread(self._engine.check)
        if failure is not None and not self._switching:
            raise EngineError(failure)

    async def __del__(self) -> None:
        """Serve's shutdown hook."""
        await self._proxy.close()
        if self._engine is not None:
            await self._in_thread(self._engine.stop)

    # -- engines -------------------------------------------------------------------------------

    async def _start(self, spec: ChampionSpec) -> None:
        """Start an engine, wait until it has proven itself, and send requests to it."""
        self._launches += 1
        folder = Path(spec.folder) / f"{os.getpid()}-{self._launches:03d}"
        here = localized(spec.config).model_dump(mode="json")
        make = partial(EngineReplica, here, EngineOptions(str(folder), spec.limits))
        engine: EngineReplica = await self._in_thread(make)
        while (state := engine.state())["resolved"] is None:
            if state["failure"] is not None:
                await self._in_thread(engine.stop)
                raise EngineError(state["failure"])
            await asyncio.sleep(POLL_S)  # the engine process keeps its own deadlines
        self._engine, self._spec = engine, spec
        self._proxy.send_to(engine.launch.base_url)

    async def _stop(self) -> TeardownProof:
        assert self._engine is not None
        engine, self._engine = self._engine, None
        proof: TeardownProof = await self._in_thread(engine.stop)
        if not proof.proven:
            log.warning("the old engine left something behind: %s", ", ".join(proof.notes))
        return proof

    async def _change(self, new: ChampionSpec) -> None:
        async with self._one_change:
            self._switching = True  # also when an earlier change has just ended
            try:
                assert self._spec is not None
                self._switch = await self._replace(self._spec, new)
                log.info("champion %s: %s", self._switch.outcome, self._switch.model_dump_json())
            except EngineError as error:
                self._failure = error  # neither engine runs: the next health check tells Serve
            finally:
                self._switching = False

    async def _replace(self, old: ChampionSpec, new: ChampionSpec) -> Switch:
        began = time.monotonic()
        before = self._proxy.target
        bridge = self._divert(old, new)
        drained = before is None or await self._proxy.drained(before, new.drain_s)
        await self._stop()
        failure = await self._start_or_go_back(old, new)
        without = 0.0 if bridge else time.monotonic() - began
        if bridge is not None:
            await self._proxy.drained(bridge, new.drain_s)
        outcome: Literal["switched", "rolled back"] = "rolled back" if failure else "switched"
        return Switch(
            outcome=outcome,
            asked=new.config.config_id,
            seconds=time.monotonic() - began,
            seconds_without_service=without,
            drained=drained,
            failure=failure,
        )

    def _divert(self, old: ChampionSpec, new: ChampionSpec) -> Any:
        if new.bridge is None:
            self._proxy.pause("the model is being replaced", old.drain_s + new.expected_start_s)
            return None
        self._proxy.send_to(new.bridge)
        return self._proxy.target

    async def _start_or_go_back(self, old: ChampionSpec, new: ChampionSpec) -> str | None:
        try:
            await self._start(new)
        except EngineError as error:
            log.exception("the new champion did not start; going back")
            await self._start(old)
            return str(error)
        return None

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _replicas() -> int:
    """How many replicas this deployment has now; what its configuration says is not kept up by autoscaling."""
    here = serve.get_replica_context()
    states = serve.status().applications[here.app_name].deployments[here.deployment].replica_states
    return sum(count for state, count in states.items() if state in ("RUNNING", "UPDATING"))


def _take_turns() -> None:
    """Let the event loop wait for a core instead of interrupting the engine or the client at every chunk.

    Where cores are free nothing changes. Where all are busy, waking up for every chunk costs four switches of
    process a token; waiting until another's turn ends (a few ms) lets chunks pile up in the socket, to be
    taken at once. On two cores that halves the CPU time a token, flat out.
    """
    with suppress(OSError):  # a sandbox may forbid it: only speed is lost
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
