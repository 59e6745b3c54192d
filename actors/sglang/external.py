"""The SGLang engine for a server that is already running: nothing about it is assumed.

What it serves is asked for; whether it scores at T is for the handshake to find out. It generates
and scores, and its weights are not ours to change.
"""

from __future__ import annotations

import asyncio
import os

from actors.sglang.address import API_KEY_VARIABLE, check_url
from actors.sglang.client import SglangClient
from actors.sglang.engine import SglangEngine, failed
from actors.sglang.requests import NEUTRAL
from distill.errors import DataError, EngineError
from distill.stops import StopTokens

_LARGEST_VOCABULARY = 1 << 22
_DTYPES = ("float32", "bfloat16", "float16")


class ExternalSglangEngine(SglangEngine):
    """An `Engine` on somebody else's SGLang server. The key comes from the environment.

    Args:
        url: http://host:port.
        api_key: the server's key; None takes ISOTHERM_TEACHER_API_KEY, and sends none without it.
        request_deadline_s: longest a request may take.
        stops: where samples end, and whether that is one event; None leaves it to the server.

    Raises:
        ConfigError: `url` is not an address.
    """

    def __init__(
        self,
        *,
        url: str,
        api_key: str | None = None,
        request_deadline_s: float = 1800,
        stops: StopTokens | None = None,
    ) -> None:
        check_url(url)
        client = SglangClient(
            lambda: url.rstrip("/"),
            api_key=api_key or os.environ.get(API_KEY_VARIABLE),
            admin_api_key=None,
            deadline_s=request_deadline_s,
        )
        super().__init__(client, model=url, stops=stops)  # `_introduce` asks for the rest
        self._introduction: asyncio.Task[None] | None = None

    async def _ready(self) -> None:
        """Asks the server, once for all callers, for what every request needs to know."""
        if self._introduction is None or failed(self._introduction):
            self._introduction = asyncio.ensure_future(self._introduce())
        await asyncio.shield(self._introduction)

    async def _introduce(self) -> None:
        info = await self._server_info()
        if "max_req_input_len" not in info:
            raise EngineError(
                f"{self._model} does not answer as an SGLang server does, so it cannot score; an "
                "OpenAI-compatible endpoint can write samples (teacher.samples_from=), beside a "
                "teacher that scores"
            )
        if info.get("tokenizer_path") is None or info.get("is_embedding"):
            raise EngineError(f"{self._model} does not serve a language model with a tokenizer")
        self._note_server(info)
        dtype = str(info.get("dtype"))
        # Unknown means the looser bounds: auto is half precision of some kind.
        self._dtype = dtype if dtype in _DTYPES else "bfloat16"
        self._vocab_size = await self._find_vocab_size()

    async def _find_vocab_size(self) -> int:
        """Vocabulary size by bisection: SGLang refuses a bias on an id outside of its vocabulary.

        It tells nobody the size, and a prompt with an id outside would kill it.
        """
        inside, outside = 0, _LARGEST_VOCABULARY
        while outside - inside > 1:
            middle = (inside + outside) // 2
            params = NEUTRAL | {"max_new_tokens": 1, "logit_bias": {str(middle): 0.0}}
            try:
                await self._client.post(
                    "/generate", {"input_ids": [0], "sampling_params": params}, repeatable=True
                )
                inside = middle
            except DataError:
                outside = middle
        return outside

    async def abort(self) -> int:
        """Does nothing: other runs may have requests there."""
        raise EngineError(f"{self._model} is served elsewhere: its requests are not ours to abort")
