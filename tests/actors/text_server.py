"""OpenAI-compatible endpoint as an HTTP server of this process: chats and completions."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.actors.serving import serving_in_a_thread

API_KEY = "the-endpoint's-key"
MODEL = "tiny-writer"


@dataclass(frozen=True, slots=True)
class Says:
    """Text and finish reason of a response."""

    text: str | None
    finish_reason: str | None = "stop"


# A response, a status, or seconds to hang.
Answering = Says | int | float


class TextServer:
    """Answer each request with `script` of its body; refuse other keys and models.

    `failures` are answered first, in order. `limit` is the finish reason of the longest answer, and
    `retry_after_ms` is sent with errors.
    """

    def __init__(self) -> None:
        self.script: Callable[[dict[str, Any]], Answering] = lambda body: Says("yes")
        self.failures: list[Answering] = []
        self.chats: list[dict[str, Any]] = []
        self.completions: list[dict[str, Any]] = []
        self.limit = "max_tokens"
        self.retry_after_ms = "1"
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        if (given := request.headers.get("Authorization")) != f"Bearer {API_KEY}":
            return self._error(401, f"wrong key {given}")
        bodies = {"/v1/chat/completions": self.chats, "/v1/completions": self.completions}.get(
            request.path
        )
        if bodies is None:
            return self._error(404, f"no such path {request.path}")
        body = await request.json()
        if body["model"] != MODEL:
            return self._error(404, f"no such model {body['model']}")
        bodies.append(body)
        if self.limit not in body:
            return self._error(400, f"Unsupported parameter. Use '{self.limit}' instead.")
        answering = self.failures.pop(0) if self.failures else self.script(body)
        if isinstance(answering, float):
            await asyncio.sleep(answering)
            answering = Says("late")
        if isinstance(answering, int):
            return self._error(answering, f"status {answering} on purpose, key {API_KEY}")
        return _response(answering, chat=bodies is self.chats)

    def _error(self, status: int, message: str) -> web.Response:
        headers = {"retry-after-ms": self.retry_after_ms}
        return web.json_response({"error": {"message": message}}, status=status, headers=headers)


def _response(answer: Says, *, chat: bool) -> web.Response:
    choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason}
    if chat:
        choice["message"] = {"role": "assistant", "content": answer.text}
    else:
        choice["text"] = answer.text
    kind = "chat.completion" if chat else "text_completion"
    return web.json_response(
        {"id": "1", "object": kind, "created": 1, "model": MODEL, "choices": [choice]}
    )


@contextmanager
def running_text_server() -> Iterator[TextServer]:
    server = TextServer()
    with serving_in_a_thread(server.handle) as address:
        server.url = f"{address}/v1"
        yield server
