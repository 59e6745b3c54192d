"""A model behind an OpenAI-compatible endpoint, asked for responses to chats."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distill.errors import ConfigError, EngineError
from distill.sampling import EvalSampling

if TYPE_CHECKING:  # an extra, and slow to import
    from openai import AsyncOpenAI

API_KEY_VARIABLE = "ISOTHERM_ENDPOINT_API_KEY"
# The library insists on a key; servers without keys ignore it.
_NO_KEY = "none"
_RETRIES = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, and whether the model ended it by itself."""

    text: str
    ended: bool


@asynccontextmanager
async def chat_endpoint(
    url: str, model: str, *, timeout_s: float, max_concurrent: int
) -> AsyncIterator[ChatEndpoint]:
    """An endpoint for as long as the block lasts; its key is in ISOTHERM_ENDPOINT_API_KEY.

    Raises:
        ConfigError: the library `openai` is not installed.
    """
    try:
        import openai
    except ImportError as error:
        raise ConfigError(
            f"model={url} is asked through the library `openai`, which is not installed; pip "
            "install 'isotherm[judge]'"
        ) from error
    key = os.environ.get(API_KEY_VARIABLE, "").strip() or _NO_KEY
    async with openai.AsyncOpenAI(
        base_url=url, api_key=key, timeout=timeout_s, max_retries=_RETRIES
    ) as client:
        yield ChatEndpoint(client, url, model, asyncio.Semaphore(max_concurrent))


class ChatEndpoint:
    """See `chat_endpoint`."""

    def __init__(
        self, client: AsyncOpenAI, url: str, model: str, places: asyncio.Semaphore
    ) -> None:
        self._client, self._url, self._model, self._places = client, url, model, places

    async def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: EvalSampling,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Answer:
        """One response.

        Raises:
            EngineError: it does not answer, or not with a message; the words are its own.
        """
        import openai

        asked: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
        } | ({"tools": list(tools)} if tools else {})
        create: Any = self._client.chat.completions.create
        async with self._places:
            try:
                made = await create(**asked)
            except openai.OpenAIError as error:
                said = " ".join(str(error).split())[:200]
                key = os.environ.get(API_KEY_VARIABLE, "").strip()
                raise EngineError(
                    f"{self._model} at {self._url} does not answer ({API_KEY_VARIABLE} is "
                    f"{'set' if key else 'not set'}): {said.replace(key, '***') if key else said}"
                ) from None
        choice = made.choices[0] if getattr(made, "choices", None) else None
        text = None if choice is None else choice.message.content
        if choice is None or not isinstance(text, str):
            raise EngineError(f"{self._model} at {self._url} answered without a text")
        return Answer(text, choice.finish_reason == "stop")
