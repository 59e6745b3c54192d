"""Scripted judge as an HTTP server of this process; it speaks OpenAI's protocol."""

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from tests.actors.serving import serving_in_a_thread

API_KEY = "the-judge's-key"
MODEL = "tiny-judge"

# (last message, material by name) -> text of the judge, or a status.
Script = Callable[[str, dict[str, str]], str | int]

_FENCED = re.compile(r"<<<([\w ]+) (\w+)>>>\n(.*?)\n<<<end of \1 \2>>>", re.DOTALL)


def material(text: str) -> dict[str, str]:
    """Contents of the fences, by name."""
    return {name: inside for name, _, inside in _FENCED.findall(text)}


class ScriptedJudge:
    """Answer with the verdicts of `script`; count requests and concurrent requests.

    `delay_s` delays each answer, `finish_reason` is its end, and `page` replaces the completion. No
    request is answered before `meets` requests are waiting at once.
    """

    def __init__(self) -> None:
        self.script: Script = lambda text, given: "Score: 10"
        self.bodies: list[dict[str, Any]] = []
        self.delay_s = 0.0
        self.finish_reason = "stop"
        self.page: str | None = None
        self.page_kind = "text/html"
        self.at_once = self.most_at_once = self.meets = 0
        self.url = ""

    @property
    def asked(self) -> list[str]:
        """First message of every request."""
        return [body["messages"][0]["content"] for body in self.bodies]

    async def handle(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {API_KEY}":
            problem = f"wrong key {request.headers.get('Authorization')}"
            return web.json_response({"error": {"message": problem}}, status=401)
        if self.page is not None:
            return web.Response(text=self.page, content_type=self.page_kind)
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": MODEL}]})
        if request.path != "/v1/chat/completions":
            return web.json_response({"error": {"message": "no such path"}}, status=404)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._judged(await request.json())
        finally:
            self.at_once -= 1

    async def _judged(self, body: dict[str, Any]) -> web.Response:
        self.bodies.append(body)
        while self.most_at_once < self.meets:
            await asyncio.sleep(0.01)
        await asyncio.sleep(self.delay_s)
        messages = body["messages"]
        reply = self.script(messages[-1]["content"], material(messages[0]["content"]))
        if isinstance(reply, int):
            message = {"error": {"message": f"status {reply} on purpose, key {API_KEY}"}}
            return web.json_response(message, status=reply, headers={"retry-after-ms": "1"})
        choice = {
            "index": 0,
            "finish_reason": self.finish_reason,
            "message": {"role": "assistant", "content": reply},
        }
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": MODEL}
        return web.json_response({**answer, "choices": [choice]})


@contextmanager
def running_judge() -> Iterator[ScriptedJudge]:
    """Server of a scripted judge."""
    judge = ScriptedJudge()
    with serving_in_a_thread(judge.handle) as address:
        judge.url = f"{address}/v1"
        yield judge
