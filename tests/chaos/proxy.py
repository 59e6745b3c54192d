"""Proxy in front of a real SGLang teacher server that corrupts answers on their way."""

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
from aiohttp import web

from actors.sglang.config import SglangConfig
from actors.sglang.hosted import HostedSglangEngine
from tests.waiting import DEADLINE_S

_HANG_S = 3.0
_KINDS = ("truncated", "nan", "null", "too few tokens", "too few rows", "status 500", "hangs")
_HOP = {"content-length", "transfer-encoding", "connection", "host", "content-encoding"}


class SpoilingProxy:
    """Pass all requests to `target`; corrupt a share of the answers to /generate."""

    def __init__(self, target: str, seed: int) -> None:
        self._target, self._random = target, random.Random(seed)
        self.share = 0.0
        self.spoilt: Counter[str] = Counter()
        self.passed = 0
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._up.wait(DEADLINE_S), "the proxy does not start"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(self._open())
        self._up.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.run_until_complete(self._session.close())

    async def _open(self) -> web.AppRunner:
        # A kept connection may be closed by the server just when it is used again.
        connector = aiohttp.TCPConnector(force_close=True)
        self._session = aiohttp.ClientSession(connector=connector)
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return runner

    async def _handle(self, request: web.Request) -> web.Response:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        async with self._session.request(
            request.method,
            self._target + request.path_qs,
            data=await request.read(),
            headers=headers,
        ) as answer:
            status, body = answer.status, await answer.read()
        if request.path == "/generate" and status == 200 and self._random.random() < self.share:
            kind = self._random.choice(_KINDS)
            self.spoilt[kind] += 1
            status, body = await self._spoil(kind, body)
        else:
            self.passed += 1
        return web.Response(status=status, body=body, content_type="application/json")

    async def _spoil(self, kind: str, body: bytes) -> tuple[int, bytes]:
        if kind == "status 500":
            return 500, b'{"error": {"message": "out of luck"}}'
        if kind == "truncated":
            return 200, body[: len(body) // 2]
        if kind == "hangs":
            await asyncio.sleep(_HANG_S)
            return 200, body
        content = json.loads(body)
        answers = content if isinstance(content, list) else [content]
        if kind == "too few rows":
            return 200, json.dumps(answers[:-1]).encode()
        for answer in answers:
            _spoil_logprobs(kind, answer["meta_info"])
        return 200, json.dumps(content).encode()


def _spoil_logprobs(kind: str, meta: dict[str, Any]) -> None:
    name = "input_token_logprobs" if meta.get("input_token_logprobs") else "output_token_logprobs"
    rows = meta[name]
    if kind == "too few tokens":
        del rows[-1]
    else:
        rows[-1][0] = float("nan") if kind == "nan" else None


@contextmanager
def served_teacher(model: str, seed: int) -> Iterator[tuple[SpoilingProxy, str]]:
    """Start a server for `model`; yield the proxy's address and the server's key."""
    config = SglangConfig(model=model, device="cpu", start_deadline_s=DEADLINE_S)
    engine = HostedSglangEngine(config)
    server = engine.server
    try:
        asyncio.run(_ready(engine))
        proxy = SpoilingProxy(server.url, seed)
        proxy.start()
        try:
            yield proxy, server.api_key
        finally:
            proxy.stop()
    finally:
        server.stop()


async def _ready(engine: HostedSglangEngine) -> None:
    await engine.info()
    await engine._client.close()
