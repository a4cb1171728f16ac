"""Clients that never stop asking while something happens to the endpoint, and what became of every answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp


class Load:
    """Counts answers: whole ones, errors that said so, and broken ones that did not."""

    def __init__(self, endpoint: str, streams: int) -> None:
        self.url, self.streams = f"{endpoint}/v1/chat/completions", streams
        self.whole = self.told = 0
        self.broken: list[str] = []
        self.retry_after: list[str] = []

    async def during(self, work: Any) -> Any:
        """Ask from all streams while `work` runs in a thread, then let the last answers end."""
        task = asyncio.create_task(asyncio.to_thread(work))
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:
            await asyncio.gather(*(self._ask(client, task) for _ in range(self.streams)))
        return await task

    async def _ask(self, client: aiohttp.ClientSession, work: asyncio.Task[Any]) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "go on"}], "max_tokens": 60, "stream": True}
        while not work.done():
            try:
                async with client.post(self.url, json=body) as answer:
                    self._judge(answer, await answer.read())
            except aiohttp.ClientError as error:
                self.broken.append(repr(error))
            await asyncio.sleep(0.1)

    def _judge(self, answer: aiohttp.ClientResponse, body: bytes) -> None:
        if answer.status == 200 and body.endswith(b"data: [DONE]\n\n"):
            self.whole += 1
            return
        last = body.rsplit(b"data: ", 1)[-1]
        try:
            told = bool(json.loads(last)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            told = False
        self.told += told
        self.retry_after += [answer.headers["retry-after"]] if "retry-after" in answer.headers else []
        if not told:
            self.broken.append(f"{answer.status} {body[-200:]!r}")
