"""HTTP client of an SGLang server, with pooled connections, deadlines and typed errors.

A request is retried only if that is safe: if nothing was sent yet (connection refused), or if the
request has no side effects (scoring, status queries). Sampling is never repeated after it started.

Large bodies are serialised and parsed in a thread, one at a time, so that the event loop can keep
answering heartbeats. Parsing JSON and base64 holds the GIL from the first byte to the last, so the
size of answers is bounded as well (`actors.sglang.requests.bounded`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import orjson

from distill.errors import DataError, EngineError, EngineLost

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
Body = Mapping[str, Any]

_RETRIES = 3
_BACK_OFF_S = 0.2
# Below the server's 5 s keep-alive timeout, so that a reused connection is never half closed.
_KEEPALIVE_S = 2.0
# Bytes. Four times the largest expected answer: 128k tokens with 64 likeliest each, as lists.
LARGEST_ANSWER = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Properties of a server that determine how weights are loaded.

    Attributes:
        ranks: degree of tensor parallelism.
        has_own_draft: True if the draft model of speculative decoding is part of the served model's
            checkpoint.
        has_other_draft: True if the draft model has a checkpoint of its own.
        adapters: maximum number of LoRA adapters that the server holds; 0: LoRA is disabled.
    """

    ranks: int
    has_own_draft: bool
    has_other_draft: bool
    adapters: int

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> ServerFacts:
        drafts = info.get("speculative_algorithm") is not None
        draft = info.get("speculative_draft_model_path")
        own = draft is None or draft == info.get("model_path")
        return cls(
            ranks=int(info.get("tp_size") or 1),
            has_own_draft=drafts and own,
            has_other_draft=drafts and not own,
            adapters=int(info.get("max_loaded_loras") or 0) if info.get("enable_lora") else 0,
        )

    @property
    def selector(self) -> dict[str, str]:
        """Selector of the server's models that a load updates; a separate draft is excluded.

        A separate draft has tensors with the same names (`layers.0...`), so it would load the
        policy's weights.
        """
        return {"selector": "all" if self.has_own_draft else "target"}


class SglangClient:
    """A client of one server, for one event loop.

    Args:
        url: returns `http://host:port`; called for every request.
        api_key: key for generating and scoring; None: requests carry no key.
        admin_api_key: key for weight loads, pausing and aborting.
        deadline_s: time limit of a request in seconds, retries included; a request's
            `allowance_s` is added to it.
        exit_report: returns the reason why the server exited, for error messages.
    """

    def __init__(
        self,
        url: Callable[[], str],
        *,
        api_key: str | None,
        admin_api_key: str | None,
        deadline_s: float,
        exit_report: Callable[[], str] | None = None,
    ) -> None:
        self._url = url
        self._api_key, self._admin_api_key = api_key, admin_api_key
        self._deadline_s = deadline_s
        self._exit_report = exit_report
        self._session: aiohttp.ClientSession | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="sglang answers")
        # One body at a time. The answers of a group arrive together, and every read from a socket
        # may wait until the reader thread releases the GIL: without the lock, one iteration of the
        # event loop would wait once for each readable socket.
        self._receiving = asyncio.Lock()
        self._info: Mapping[str, Any] | None = None

    async def get(self, path: str) -> Any:
        """Send a GET and return its JSON; retried on failure."""
        return await self._request(path, None, key=self._api_key, repeatable=True)

    async def server_info(self, *, again: bool = False) -> Mapping[str, Any]:
        """Answer to GET /server_info, requested once unless `again` is True.

        Raises:
            EngineError: the answer is not a JSON object.
        """
        if self._info is None or again:
            info = await self.get("/server_info")
            if not isinstance(info, dict):
                raise EngineError("the server's /server_info is not a JSON object")
            self._info = info
        return self._info

    async def facts(self) -> ServerFacts:
        return ServerFacts.of(await self.server_info())

    async def post(self, path: str, body: Body) -> Any:
        """Send a POST without side effects and return its JSON; retried on failure.

        Raises:
            DataError: the server rejects the request as invalid (status 400 or 422).
            EngineLost: the server cannot be reached, or takes longer than the deadline.
            EngineError: the server rejects the key, redirects, or fails.
        """
        return await self._request(path, _bytes(body), key=self._api_key, repeatable=True)

    async def exchange(
        self,
        path: str,
        body: Callable[[], Body],
        read: Callable[[Any], Value],
        *,
        repeatable: bool = False,
        allowance_s: float = 0,
    ) -> Value:
        """Send a POST and return `read(JSON of the answer)`; `body` and `read` run in a thread.

        Args:
            repeatable: the request has no side effects and may be retried.
            allowance_s: seconds added to the deadline, for the request's tokens or bytes.

        Raises the errors of `post`, `body` and `read`.
        """
        payload = await self._aside(lambda: _bytes(body()))
        return await self._request(
            path, payload, key=self._api_key, repeatable=repeatable, allowance_s=allowance_s,
            read=read,
        )  # fmt: skip

    async def _aside(self, function: Callable[[], Value]) -> Value:
        return await asyncio.get_running_loop().run_in_executor(self._reader, function)

    async def order(self, path: str, body: Body, *, allowance_s: float = 0) -> Any:
        """Send an administrative POST and return its JSON.

        Args:
            allowance_s: as for `exchange`.

        Raises:
            EngineError: the request failed, or the server refused it.
        """
        try:
            answer = await self._request(
                path, _bytes(body), key=self._admin_api_key, repeatable=False,
                allowance_s=allowance_s,
            )  # fmt: skip
        except DataError as error:  # status 400: a refusal with its reason
            raise EngineError(str(error)) from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{path} was refused: {answer.get('message', answer)}")
        return answer

    async def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _request(
        self,
        path: str,
        payload: bytes | None,
        *,
        key: str | None,
        repeatable: bool,
        allowance_s: float = 0,
        read: Callable[[Any], Any] | None = None,
    ) -> Any:
        deadline_s = self._deadline_s + allowance_s
        try:
            async with asyncio.timeout(deadline_s):
                status, content = await self._attempts(path, payload, key, repeatable)
                if read is None:
                    return self._checked(path, status, content)
                return await self._aside(
                    lambda: _uncollected(lambda: read(self._checked(path, status, content)))
                )
        except TimeoutError:
            raise EngineLost(
                f"{self._url()}{path} did not answer within {deadline_s:.0f} s: the server "
                f"hangs or is overloaded.{self._why()}"
            ) from None

    async def _attempts(
        self, path: str, payload: bytes | None, key: str | None, repeatable: bool
    ) -> tuple[int, bytes]:
        for attempt in range(_RETRIES + 1):
            last = attempt == _RETRIES
            try:
                status, content = await self._send(path, payload, key)
            except aiohttp.ClientConnectorError as error:
                if last:
                    raise self._unreachable(path, error) from error
            except aiohttp.ClientError as error:
                if last or not repeatable:
                    raise self._unreachable(path, error) from error
            else:
                if not (status >= 500 and repeatable) or last:
                    return status, content
            logger.warning("%s%s failed (try %d); trying again", self._url(), path, attempt + 1)
            await asyncio.sleep(_BACK_OFF_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _send(self, path: str, payload: bytes | None, key: str | None) -> tuple[int, bytes]:
        method = "GET" if payload is None else "POST"
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        session = self._open_session()
        async with (
            session.request(
                method, self._url() + path, data=payload, headers=headers, allow_redirects=False
            ) as response,
            self._receiving,
        ):
            return response.status, await self._body(path, response)

    async def _body(self, path: str, response: aiohttp.ClientResponse) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in response.content.iter_any():
            size += len(part)
            if size > LARGEST_ANSWER:
                raise EngineError(
                    f"{self._url()}{path} answers with more than {LARGEST_ANSWER >> 20} MiB, the "
                    "largest answer that is accepted"
                )
            parts.append(part)
        return b"".join(parts)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Unlimited pool: rollouts wait in the server's queue. `_request` applies the deadline.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session

    def _checked(self, path: str, status: int, content: bytes) -> Any:
        text = content[:500].decode(errors="replace")
        if status in (401, 403):
            raise EngineError(
                f"{self._url()}{path} refused the key (status {status}); give the server's own key "
                "in the environment variable ISOTHERM_TEACHER_API_KEY"
            )
        if status in (400, 422):
            raise DataError(f"{self._url()}{path} refused the request: {text}")
        if 300 <= status < 400:  # not followed: prompts must not reach another host
            raise EngineError(
                f"{self._url()}{path} redirects (status {status}); give the address of the server "
                "itself"
            )
        if status >= 400:
            raise EngineError(
                f"{self._url()}{path} failed with status {status}: {text}.{self._why()}"
            )
        if not content:
            return None
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError:
            # Some administrative answers are a line of text.
            return text

    def _unreachable(self, path: str, error: Exception) -> EngineLost:
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        reason = str(cause) or type(cause).__name__
        return EngineLost(f"{self._url()}{path} cannot be reached ({reason}).{self._why()}")

    def _why(self) -> str:
        return f" {self._exit_report()}" if self._exit_report is not None else ""


class FirstRequests:
    """Patience for the first request of each kind, during which a server compiles CUDA kernels.

    SGLang compiles a kernel when a batch first needs it, in the loop of its scheduler. For minutes
    it produces no token, and `/health`, which waits for a token, fails. Sampling and scoring need
    different kernels. So the first request of each kind may take as long as a start.

    Args:
        patience_s: longest time in seconds until the first answer to a kind of request.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._answered: set[str] = set()
        self._since: dict[str, float] = {}  # kind without an answer -> time of its first request

    @contextmanager
    def sending(self, kind: str) -> Iterator[None]:
        """Context manager for a request; leaving it without an error counts as an answer."""
        if kind not in self._answered:
            self._since.setdefault(kind, time.monotonic())
        yield
        self._answered.add(kind)
        self._since.pop(kind, None)

    @property
    def in_progress(self) -> bool:
        """True while a first request is in progress and `patience_s` has not passed."""
        now = time.monotonic()
        return any(now - since < self._patience_s for since in self._since.values())


def _uncollected(read: Callable[[], Value]) -> Value:
    """Call `read` with garbage collection disabled.

    The rows of an answer are many short-lived lists. Their allocation would trigger collections
    that scan all objects of the process.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return read()
    finally:
        if enabled:
            gc.enable()


def _bytes(body: Body) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
