"""OpenAI-compatible endpoint of one episode, which forwards requests to the policy.

    agent                                  endpoint                               policy
    POST /v1/chat/completions ----------->  Api.read: AgentRequest
         /v1/responses                      Histories.match_request: observation_T
         /v1/completions                    Ask ---------------------------------> sample
                                            a Turn; PendingAnswer.to_message: message
             <----------------------------  Api.body or Api.events of an AgentAnswer

Each episode has its own endpoint on the loopback address, with its own port and key, which is
closed when the episode ends. Requests of an agent may be concurrent. If a client disconnects, its
request is still sampled to the end and recorded: leaving out slow requests would favour short
answers.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from hmac import compare_digest
from typing import Any, TypeVar

import numpy as np
from aiohttp import web

from actors.envs.agent_completions import ChatApi, CompletionsApi
from actors.envs.agent_requests import (
    AgentAnswer,
    AgentChoice,
    AgentRequest,
    Api,
    Body,
    ChatPrompt,
    ClientSampling,
    RefusedRequest,
    check_sampling,
)
from actors.envs.agent_responses import ResponsesApi
from actors.together import together
from distill.chat.responses import response_text
from distill.chat.token_text import token_spans
from distill.engine import Sample
from distill.envs.asking import Ask
from distill.envs.base import Turn
from distill.envs.history import Histories, PendingAnswer
from distill.envs.raw_prompts import PendingText, RawPrompts
from distill.errors import DataError, IsothermError
from distill.types import StopReason, TokenArray, Tokenizer

LOOPBACK = "127.0.0.1"
_LARGEST_BODY = 64 << 20
# Seconds until handlers that still run when the episode has ended are cancelled.
_SHUTDOWN_S = 0.1

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LimitReached(RefusedRequest):
    """Raised for a request that exceeds a limit of the episode."""

    def __init__(self, reason: StopReason, code: str, message: str) -> None:
        super().__init__(message, code=code)
        self.reason = reason


class AgentEndpoint:
    """Endpoint of one episode, served inside `async with`.

    Attributes:
        key: the API key, valid while the endpoint is served.
        turns: sampled turns, in the order of their completion.
        first: request of the first turn; None if there is no turn, or if it is not a chat.
        histories: conversations that the turns belong to.
        limit: limit because of which the latest request was refused; None: the request was
            answered, or there was none.
        broken: future that is done when the engine has failed, with the engine's error.
    """

    def __init__(
        self,
        ask: Ask,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        max_turns: int,
        client_sampling: ClientSampling,
    ) -> None:
        """
        Args:
            max_tokens: exclusive upper limit of the prompt tokens of each turn.
            max_turns: maximum number of samples in an episode.
            client_sampling: see `check_sampling`.
        """
        self._client_sampling: ClientSampling = client_sampling
        self._ask, self._tokenizer = ask, tokenizer
        self._max_tokens, self._max_turns = max_tokens, max_turns
        self.key = secrets.token_urlsafe(24)
        self.turns: list[Turn] = []
        self.first: PendingAnswer | None = None
        self.histories, self._raw_prompts = Histories(tokenizer), RawPrompts(tokenizer)
        self.limit: StopReason | None = None
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._samples = 0
        self._answers: dict[str, asyncio.Task[AgentAnswer]] = {}
        self._active: set[asyncio.Task[AgentAnswer]] = set()
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def base_url(self) -> str:
        return f"http://{LOOPBACK}:{self._port}/v1"

    async def __aenter__(self) -> AgentEndpoint:
        application = web.Application(client_max_size=_LARGEST_BODY, middlewares=[self._guarded])
        for api in (ChatApi(), ResponsesApi(), CompletionsApi()):
            application.router.add_post(api.path, self._handler(api))
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/v1/models/{name:.+}", self._model)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, LOOPBACK, 0)
        await site.start()
        [address] = self._runner.addresses
        self._port = address[1]
        return self

    async def while_served(self, agent: Coroutine[Any, Any, T]) -> T:
        """Await the agent and return its result. An engine failure cancels the agent.

        Raises:
            EngineError: the engine failed.
        """
        running = asyncio.ensure_future(agent)
        try:
            await asyncio.wait({running, self.broken}, return_when=asyncio.FIRST_COMPLETED)
            if self.broken.done():
                self.broken.result()
            return await running
        finally:
            running.cancel()
            await asyncio.wait({running})

    async def __aexit__(self, *_: object) -> None:
        for task in self._active:
            task.cancel()
        await asyncio.gather(*self._active, return_exceptions=True)
        assert self._runner is not None
        await self._runner.cleanup()
        if self.broken.done():
            self.broken.exception()  # marks it as retrieved, so that asyncio logs no warning
        else:
            self.broken.cancel()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and convert errors to responses of the API."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not compare_digest(given.encode(errors="surrogateescape"), self.key.encode()):
            return _refused(401, "the key is not this episode's", code="invalid_api_key")
        try:
            return await handler(request)
        except RefusedRequest as error:
            if isinstance(error, LimitReached):
                self.limit = error.reason
            return _refused(400, str(error), code=error.code, field=error.field)
        except IsothermError as error:
            return _refused(400, str(error), field=error.field)
        except web.HTTPException as error:
            return _refused(error.status, error.reason)
        except ConnectionError:  # the client disconnected before its request was complete
            return _refused(400, "the request is not whole")

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [_model_body("policy")]})

    async def _model(self, request: web.Request) -> web.Response:
        return web.json_response(_model_body(request.match_info["name"]))

    def _handler(self, api: Api) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            raw = await request.read()
            body = _parsed(raw)
            asked = api.read(body)
            check_sampling(body, self._ask.sampling, self._client_sampling)
            answer = await asyncio.shield(self._task(request, raw, asked))
            if not asked.stream:
                return web.json_response(api.body(answer))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            with suppress(ConnectionError):  # the client has disconnected
                await response.prepare(request)
                for event in api.events(answer):
                    await response.write(event.encode() + b"\n\n")
                await response.write_eof()
            return response

        return handle

    def _task(
        self, request: web.Request, raw: bytes, asked: AgentRequest
    ) -> asyncio.Task[AgentAnswer]:
        """Task that answers the request; for a retry, the task of the first attempt.

        A retry has the `Idempotency-Key` of the first attempt. The `openai` library sends this
        header only if configured to, but it sends a retry count: a count above 0 is a retry of the
        latest request with the same body.
        """
        body = blake2b(raw, digest_size=16).hexdigest()
        key = request.headers.get("Idempotency-Key")
        retried = key is not None or request.headers.get("X-Stainless-Retry-Count", "0") != "0"
        name = f"{request.path} " + (f"key {key}" if key is not None else f"body {body}")
        known = self._answers.get(name) if retried else None
        if known is not None and not (known.done() and known.exception()):
            return known
        task = asyncio.create_task(self._answered(asked))
        self._answers[name] = task
        self._active.add(task)
        task.add_done_callback(self._has_ended)
        return task

    def _has_ended(self, task: asyncio.Task[AgentAnswer]) -> None:
        self._active.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: after a disconnect nothing awaits the task

    async def _answered(self, asked: AgentRequest) -> AgentAnswer:
        questions = [self._question(prompt) for prompt in asked.prompts]
        for question in questions:
            if len(question.observation_T) >= self._max_tokens:
                raise LimitReached(
                    StopReason.LENGTH,
                    "context_length_exceeded",
                    f"the request is {len(question.observation_T)} tokens; fewer than "
                    f"{self._max_tokens} fit",
                )
        wanted = asked.choices * len(questions)
        if self._samples + wanted > self._max_turns:
            raise LimitReached(
                StopReason.TURNS,
                "turn_limit_exceeded",
                f"the episode has used {self._samples} of its {self._max_turns} turns "
                f"(env.max_turns), and this request is {wanted}",
            )
        self._samples += wanted
        samples = await self._sampled(asked, questions)
        self.limit = None
        choices = [
            self._choice(asked, question, sample)
            for question, its_samples in zip(questions, samples, strict=True)
            for sample in its_samples
        ]
        prompt_tokens = sum(len(question.observation_T) for question in questions)
        return AgentAnswer(request=asked, choices=choices, prompt_tokens=prompt_tokens)

    def _question(self, prompt: ChatPrompt | str | list[int]) -> PendingAnswer | PendingText:
        if isinstance(prompt, ChatPrompt):
            return self.histories.match_request(prompt.messages, prompt.tools)
        return self._raw_prompts.encode_prompt(prompt)

    async def _sampled(
        self, asked: AgentRequest, questions: Sequence[PendingAnswer | PendingText]
    ) -> Sequence[Sequence[Sample]]:
        try:
            return await together(
                *(
                    self._ask(
                        question.observation_T,
                        num_samples=asked.choices,
                        max_new_tokens=asked.max_tokens,
                    )
                    for question in questions
                )
            )
        except IsothermError:
            raise
        except Exception as error:  # from the engine: the episode cannot continue
            if not self.broken.done():
                self.broken.set_exception(error)
            raise

    def _choice(
        self, asked: AgentRequest, question: PendingAnswer | PendingText, whole: Sample
    ) -> AgentChoice:
        observation_T = question.observation_T
        sample = self._stopped(observation_T, whole, asked.stops)
        if not self.turns and isinstance(question, PendingAnswer):
            self.first = question
        self.turns.append(
            Turn(observation_T=observation_T, sample=sample, bonuses_T=None, trained=True)
        )
        message = question.to_message(sample, asked.stops)
        pieces_T = self._pieces_T(sample) if asked.logprobs else ()
        return AgentChoice(message=message, sample=sample, pieces_T=pieces_T)

    def _stopped(self, observation_T: TokenArray, sample: Sample, stops: tuple[str, ...]) -> Sample:
        """Cut a sample after the token that completes the first stop text.

        The result is a valid sample, because its own tokens determine where it ends.
        """
        text = response_text(self._tokenizer, observation_T, sample) if stops else ""
        if not any(stop in text for stop in stops):
            return sample
        text, _, ends_T = token_spans(self._tokenizer, sample.tokens_T.tolist())
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        length = int(np.argmax(ends_T >= min(ends))) + 1 if ends else len(sample.tokens_T)
        return _first_tokens(sample, length)

    def _pieces_T(self, sample: Sample) -> list[str]:
        text, starts_T, ends_T = token_spans(self._tokenizer, sample.tokens_T.tolist())
        return [text[start:end] for start, end in zip(starts_T, ends_T, strict=True)]


def _parsed(raw: bytes) -> Body:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise DataError("the body must be a JSON object")
    return body


def _first_tokens(sample: Sample, length: int) -> Sample:
    """The first `length` tokens of a sample."""
    cut = len(sample.tokens_T) - length
    if cut <= 0:
        return sample
    experts_NLK, top_ids_TK = sample.experts_NLK, sample.top_ids_TK
    return replace(
        sample,
        tokens_T=sample.tokens_T[:length],
        logprobs_T=sample.logprobs_T[:length],
        versions_T=sample.versions_T[:length],
        stop_reason=StopReason.DONE,
        top_ids_TK=None if top_ids_TK is None else top_ids_TK[:length],
        experts_NLK=None if experts_NLK is None else experts_NLK[:-cut],
    )


def _model_body(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "isotherm"}


def _refused(
    status: int, message: str, *, code: str | None = None, field: str | None = None
) -> web.Response:
    kind = "invalid_request_error"
    error = {"message": message, "type": kind, "param": field, "code": code}
    return web.json_response({"error": error}, status=status)
