"""Client of a model behind an OpenAI-compatible endpoint, which returns text.

    .../v1, .../v1/chat/completions    answers chats; a plain text becomes a user message
    .../v1/completions                 continues texts

Transient failures (no connection, timeouts, 408, 409, 429, 5xx) are retried after the server's
Retry-After, or with exponential back-off. Permanent ones (a rejected key, an unknown model, a
rejected prompt) fail immediately.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from actors.sglang.address import split_address
from distill.chat.template import request_messages
from distill.errors import ConfigError, DataError, EngineError
from distill.libraries import require_library
from distill.sampling import EvalSampling, Sampling

if TYPE_CHECKING:  # an extra, and slow to import
    import httpx
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "ISOTHERM_ENDPOINT_API_KEY"
# The library requires a key; servers without keys ignore it.
NO_KEY = "none"
_COMPLETIONS, _CHAT = "/completions", "/chat/completions"
_MAY_PASS = (408, 409, 429)
_REFUSED_KEY = (401, 403)
_FIRST_PAUSE_S = 0.5
_UNNOTICED_S = 2.0  # longest pause before an attempt that is not logged
LONGEST_PAUSE_S = 60.0
_SHOWN = 200
# Tags of an HTML page, and those whose content is no text of the page.
_MARKUP = re.compile(r"<(head|script|style)\b.*?(?:</\1>|\Z)|<[^<>]*>", re.IGNORECASE | re.DOTALL)
LARGEST_ANSWER = 64 << 20
# Some models reject the first name, with an error that mentions the second.
_LIMIT, _NEWER_LIMIT = "max_tokens", "max_completion_tokens"

# A text, or a chat.
Shown = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, and the reason why it ended: stop, length, or None if the endpoint gives none."""

    text: str
    reason: str | None

    @property
    def ended(self) -> bool:
        """True if the model ended it before the token limit."""
        return self.reason == "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """Time and retry limits for one answer.

    Attributes:
        attempt_s: time limit of one attempt, in seconds.
        all_s: time limit of all attempts of one answer, pauses included, in seconds.
        attempts: maximum number of attempts; None: limited by `all_s` only.
        max_unusable: number of unusable answers (`UnusableAnswer`) after which the request fails.
    """

    attempt_s: float
    all_s: float
    attempts: int | None = None
    max_unusable: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointAddress:
    """Address of a text model: its URL and name, with the settings that define them.

    Attributes:
        url: http(s)://host[:port], with the path of the API if that is not /v1.
        name: name of the model at the endpoint.
        url_setting, name_setting: names of the settings that hold the two, for error messages.
        key_variable: environment variable of the endpoint's key, in the process that asks.

    Raises:
        ConfigError: the URL is not an address, or contains a user, a password or a query, which
            would be printed; or the name is blank.
    """

    url: str
    name: str
    url_setting: str
    name_setting: str
    key_variable: str = API_KEY_VARIABLE

    @staticmethod
    def of(setting: str, text: str) -> EndpointAddress:
        """The endpoint of a setting that holds `NAME@http://host/v1`."""
        name, at, rest = text.partition("@http")
        if not at or not name.strip():
            raise ConfigError(
                f"{setting} must be NAME@http://host/v1: the model's name at the endpoint, and the "
                "endpoint's address",
                field=setting,
            )
        return EndpointAddress(
            url=f"http{rest}", name=name, url_setting=setting, name_setting=setting
        )

    def __post_init__(self) -> None:
        check_url(self.url_setting, self.url, self.key_variable)
        if not self.name.strip():
            raise ConfigError(
                f"{self.name_setting} is blank; give the model's name at {self.url_setting}="
                f"{self.url}",
                field=self.name_setting,
            )

    @property
    def completes(self) -> bool:
        """True if the endpoint continues texts; False if it answers chats."""
        path = urlsplit(self.url).path.rstrip("/")
        return path.endswith(_COMPLETIONS) and not path.endswith(_CHAT)

    @property
    def base_url(self) -> str:
        url = self.url.rstrip("/").removesuffix(_COMPLETIONS if self.completes else _CHAT)
        return url if urlsplit(url).path else f"{url}/v1"

    def __str__(self) -> str:
        return f"{self.name} at {self.url_setting}={self.url}"


def check_url(setting: str, url: str, key_variable: str) -> None:
    """Raise ConfigError unless `url` has the form http(s)://host[:port][/path]."""
    if "@" in url or "?" in url or "#" in url:  # first: other errors print the address
        raise ConfigError(
            f"{setting} contains a user, a password or a query, which would be written to "
            f"config.json; give the server's key in {key_variable}, and write http://host:port/v1",
            field=setting,
        )
    if split_address(url) is None:
        raise ConfigError(f"{setting}={url} is not an address; write http://host:port/v1")


def read_key(variable: str) -> str:
    """Read an API key from an environment variable; an empty string if it is not set.

    Raises:
        ConfigError: the key cannot be sent in a header; the library's error would print it.
    """
    key = os.environ.get(variable, "").strip()
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{variable} contains characters that are not valid in a key; set it again",
            field=variable,
        )
    return key


def in_a_line(error: BaseException, key: str) -> str:
    """Format an error's message as one line, shortened, with the key replaced by ***.

    If a proxy or another server answered with an HTML page, only its text is kept.
    """
    words = f"{error} ({error.__cause__})" if error.__cause__ else str(error)
    if "<html" in words.lower():
        words = _MARKUP.sub(" ", words)
    words = " ".join(words.split())
    return (words.replace(key, "***") if key else words)[:_SHOWN]


class EndpointRefused(EngineError):
    """A permanent failure: the endpoint rejects the key, the model or the prompt."""

    def __init__(self, words: str, status: int) -> None:
        super().__init__(words)
        self.status = status


class UnusableAnswer(EngineError):
    """An unusable answer: it has no text, or was ended by a filter."""


class EndpointUnavailable(EngineError):
    """A transient failure; `wait_s` is the pause that the server requests before a retry."""

    def __init__(self, words: str, wait_s: float | None = None) -> None:
        super().__init__(words)
        self.wait_s = wait_s


@asynccontextmanager
async def text_endpoint(
    address: EndpointAddress, *, limits: AnswerLimits, max_concurrent: int
) -> AsyncIterator[TextEndpoint]:
    """Context manager for an open endpoint. Raises the errors of `TextEndpoint.open`."""
    endpoint = TextEndpoint.open(address, limits=limits, max_concurrent=max_concurrent)
    async with endpoint.client:
        yield endpoint


def _client(address: EndpointAddress) -> AsyncOpenAI:
    """Create a client that follows no redirects, which would send prompts to another host, and
    limits the size of answers."""
    require_library("openai", f"{address.url_setting}={address.url}", "isotherm[judge]")
    import openai

    return openai.AsyncOpenAI(
        base_url=address.base_url,
        api_key=read_key(address.key_variable) or NO_KEY,
        timeout=None,  # `_tried` limits each attempt; the library's timeout limits single reads
        max_retries=0,
        # The library's default client is closed by the garbage collector, in any running loop.
        http_client=openai.DefaultAsyncHttpxClient(
            follow_redirects=False,
            headers={"Accept-Encoding": "identity"},  # `_bound` counts bytes before decompression
            event_hooks={"response": [_bound]},
        ),
    )


async def _bound(response: httpx.Response) -> None:
    """Make the body of a response raise DecodingError beyond `LARGEST_ANSWER` bytes."""
    import httpx

    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise httpx.DecodingError(
            "the answer is compressed, although compression was not requested"
        )
    inner = response.stream

    class BoundedStream(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            assert isinstance(inner, httpx.AsyncByteStream)
            size = 0
            async for part in inner:
                size += len(part)
                if size > LARGEST_ANSWER:
                    raise httpx.DecodingError(
                        f"the answer is larger than {LARGEST_ANSWER >> 20} MiB"
                    )
                yield part

        async def aclose(self) -> None:
            assert isinstance(inner, httpx.AsyncByteStream)
            await inner.aclose()

    response.stream = BoundedStream()


@dataclass(frozen=True, slots=True, eq=False)
class TextEndpoint:
    """An open endpoint, for one event loop. Whoever opens it closes its `client`."""

    client: AsyncOpenAI
    address: EndpointAddress
    limits: AnswerLimits
    places: asyncio.Semaphore
    outage: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def open(
        cls, address: EndpointAddress, *, limits: AnswerLimits, max_concurrent: int
    ) -> TextEndpoint:
        """Open an endpoint; its key is read from the address's `key_variable`.

        Raises:
            ConfigError: the library `openai` is not installed, or the key is invalid.
        """
        return cls(_client(address), address, limits, asyncio.Semaphore(max_concurrent))

    async def models(self) -> Any:
        """Return the answer to GET .../models, in one attempt. Raises EngineError on failure."""
        return await self._tried(self.client.get("/models", cast_to=object))

    async def answer(
        self,
        shown: Shown,
        sampling: Sampling,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Answer:
        """Request one response to a text or a chat.

        Raises:
            EndpointRefused: the endpoint rejects the request; the message includes its reason.
            UnusableAnswer: `AnswerLimits.max_unusable` answers were unusable.
            EngineError: there was no answer within the limits of `AnswerLimits`; the message
                includes the last failure.
        """
        asked, troubles = self._asked(shown, sampling, tools), ["the first attempt has not ended"]
        async with self.places:
            try:
                async with asyncio.timeout(self.limits.all_s):
                    return await self._attempts(asked, troubles)
            except TimeoutError:
                raise EngineError(
                    f"{self.address} gave no answer within {self.limits.all_s:g} s, for all "
                    f"attempts; of the last: {troubles[-1]}"
                ) from None

    def _asked(
        self, shown: Shown, sampling: Sampling, tools: Sequence[Mapping[str, Any]] | None
    ) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "model": self.address.name,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if isinstance(sampling, EvalSampling) else 1.0,
            _LIMIT: sampling.max_new_tokens,
        }
        if self.address.completes:
            if not isinstance(shown, str):
                raise DataError(
                    f"{self.address} continues plain text, but a prompt is a chat, which needs "
                    f"the model's template; leave {_COMPLETIONS} out of the address"
                )
            return {**asked, "prompt": shown}
        chat = [{"role": "user", "content": shown}] if isinstance(shown, str) else shown
        return {**asked, "messages": request_messages(chat)} | (
            {"tools": list(tools)} if tools else {}
        )

    async def _attempts(self, asked: Mapping[str, Any], troubles: list[str]) -> Answer:
        done, unusable, pause_s = 0, 0, _FIRST_PAUSE_S
        while True:
            done += 1
            try:
                return await self._ask(asked)
            except EndpointRefused as error:
                if _NEWER_LIMIT not in str(error) or _LIMIT not in asked:
                    raise
                asked = {_NEWER_LIMIT if n == _LIMIT else n: v for n, v in asked.items()}
            except UnusableAnswer:
                unusable += 1
                if unusable >= self.limits.max_unusable:
                    raise
            except EndpointUnavailable as error:
                troubles.append(str(error))
                if done >= (self.limits.attempts or math.inf):
                    raise
                if pause_s > _UNNOTICED_S and not self.outage.is_set():
                    self.outage.set()
                    logger.warning("%s; it is tried again for %g s", error, self.limits.all_s)
                await asyncio.sleep(pause_s if error.wait_s is None else error.wait_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _ask(self, asked: Mapping[str, Any]) -> Answer:
        resource: Any = (
            self.client.completions if self.address.completes else self.client.chat.completions
        )
        answer = await self._tried(resource.create(**asked))
        self.outage.clear()
        return self._read(answer)

    async def _tried(self, request: Awaitable[Any]) -> Any:
        import openai

        try:
            async with asyncio.timeout(self.limits.attempt_s):
                return await request
        except TimeoutError:
            raise EndpointUnavailable(
                f"{self.address} did not answer within {self.limits.attempt_s:g} s"
            ) from None
        except (openai.OpenAIError, ValueError) as error:  # ValueError: the body is not JSON
            raise self._engine_error(error) from None  # the original message may contain the key

    def _engine_error(self, error: Exception) -> EngineError:
        import openai

        variable = self.address.key_variable
        key = read_key(variable)
        reason = in_a_line(error, key)
        status = error.status_code if isinstance(error, openai.APIStatusError) else None
        if status in _REFUSED_KEY:  # without the server's message: some repeat the key
            return EndpointRefused(
                f"{self.address} refuses the key (HTTP {status}; {variable} is "
                f"{'set' if key else 'not set'}); set it to the server's key on every machine "
                "that samples",
                status,
            )
        if status == 404:
            return EndpointRefused(
                f"{self.address}: the path or the model {self.address.name} does not exist (HTTP "
                f"404): {reason}",
                status,
            )
        if status is not None and status < 500 and status not in _MAY_PASS:
            return EndpointRefused(f"{self.address} refuses the request: {reason}", status)
        return EndpointUnavailable(f"{self.address} does not answer: {reason}", _retry_after(error))

    def _read(self, made: Any) -> Answer:
        completes = self.address.completes
        choices = getattr(made, "choices", None)  # a proxy's error page is a string
        choice = choices[0] if isinstance(choices, list) and choices else None
        body = choice if completes else getattr(choice, "message", None)
        if body is None:
            raise EndpointUnavailable(
                f"{self.address} returned no choice; the API may be at another path than "
                f"{self.address.base_url}"
            )
        reason = getattr(choice, "finish_reason", None)
        text = getattr(body, "text" if completes else "content", None)
        if not isinstance(text, str) or not text.strip():
            raise UnusableAnswer(
                f"{self.address} answered without a text (finish_reason={reason}), asked "
                f"{self.limits.max_unusable} times: one that thinks may need a larger "
                "max_new_tokens before it says anything, or nothing is to be said to the prompt"
            )
        if reason not in ("stop", "length", None):
            raise UnusableAnswer(
                f"{self.address} returned an incomplete answer (finish_reason={reason}), ended "
                "by a filter or a tool call"
            )
        return Answer(text, reason)


def _retry_after(error: Exception) -> float | None:
    """Pause before the next attempt from the Retry-After headers, in seconds, or None."""
    headers: Mapping[str, str] = getattr(getattr(error, "response", None), "headers", {})
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            pause_s = float(headers[name]) * scale
        except (KeyError, ValueError):  # a date, or nothing
            continue
        if not math.isnan(pause_s):
            return min(max(pause_s, 0.0), LONGEST_PAUSE_S)
    return None
