"""SGLang engine for an external server that is already running.

The engine requests the server's properties; the handshake checks whether the server scores at T.
The engine generates and scores, and never changes the server's weights.
"""

from __future__ import annotations

import asyncio
import os

from actors.sglang.address import API_KEY_VARIABLE, check_url
from actors.sglang.client import SglangClient
from actors.sglang.engine import SglangEngine, failed
from actors.sglang.probes import find_vocab_size
from distill.errors import EngineError
from distill.stops import StopTokens

_DTYPES = ("float32", "bfloat16", "float16")


class ExternalSglangEngine(SglangEngine):
    """An `Engine` over an external SGLang server.

    Args:
        url: http://host:port.
        api_key: the server's key; None: the environment variable ISOTHERM_TEACHER_API_KEY, or no
            key if the variable is not set.
        request_deadline_s: time limit of a request in seconds.
        stops: tokens that end samples, and whether they count as one event; None: the server's own.

    Raises:
        ConfigError: `url` is not an address.
    """

    kind = "sglang (external)"

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
        super().__init__(client, model=url, stops=stops)  # `_introduce` sets the rest
        self._introduction: asyncio.Task[None] | None = None

    async def _ready(self) -> None:
        """Request the server's properties, once for all callers; repeated after a failure."""
        if self._introduction is None or failed(self._introduction):
            self._introduction = asyncio.ensure_future(self._introduce())
        await asyncio.shield(self._introduction)

    async def _introduce(self) -> None:
        info = await self._client.server_info(again=True)
        if "max_req_input_len" not in info:
            raise EngineError(
                f"{self._model} is not an SGLang server, so it cannot score; an OpenAI-compatible "
                "endpoint can write samples (teacher.samples_from=), in addition to a teacher that "
                "scores"
            )
        if info.get("tokenizer_path") is None or info.get("is_embedding"):
            raise EngineError(f"{self._model} does not serve a language model with a tokenizer")
        self._note_server(info)
        dtype = str(info.get("dtype"))
        # "auto" is some half precision; bfloat16 has the looser bounds.
        self._dtype = dtype if dtype in _DTYPES else "bfloat16"
        self._vocab_size = await find_vocab_size(self._client)

    async def abort(self) -> int:
        """Raise EngineError: an abort would also end requests of other clients of the server."""
        raise EngineError(
            f"{self._model} is an external server: an abort would end requests of other clients"
        )
