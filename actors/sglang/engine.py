"""`Engine` over an SGLang server, which this process hosts (hosted.py) or not (external.py).

    generate       POST /generate, return_logprob: tokens, log-probs at T, a version for each token
    score          POST /generate, logprob_start_len: given tokens, at the T of each request;
                   top_logprobs_num: the likeliest tokens as well; custom_params: log-probs of
                   listed tokens and hidden states, which the plugin returns as bytes; a server
                   without the plugin returns hidden states as numbers (return_hidden_states)
    decode_score   POST /generate, one sampled token per position, token_ids_logprob
    load_weights   pause, load, flush, new version, continue (actors/sglang/weights.py); or load an
                   adapter in addition to the older ones (actors/sglang/adapters.py)

Stock SGLang does not divide given tokens' logits by T. The plugin (actors/sglang/plugin/hooks.py)
does, and echoes the T that it applied; an answer that echoes another T than requested is rejected.
Answers without an echo are accepted: the handshake checks whether the server scores at T.

SGLang draws the samples of all requests from one generator, so only a server that runs
deterministically (according to its /server_info) respects `GenerateRequest.seed`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from actors.sglang.answers import (
    answers_of,
    read_experts,
    read_forced,
    read_hidden_states,
    read_input_logprobs,
    read_sample,
    read_top,
    read_unscaled,
    read_version,
)
from actors.sglang.client import FirstRequests, SglangClient
from actors.sglang.probes import (
    Plugin,
    longest_states,
    prefill_chunks,
    probe_plugin,
    probe_tokenizer,
)
from actors.sglang.requests import (
    bounded,
    forced_body,
    in_pass,
    passes_of,
    sampling_body,
    scoring_body,
)
from actors.sglang.weights import Use, WeightSession
from actors.together import together
from distill.engine import (
    EngineInfo,
    GenerateRequest,
    Sample,
    Score,
    ScoreRequest,
    WeightSource,
    check_chains,
    check_prompt,
)
from distill.errors import EngineError, EngineLost
from distill.pace import SLOWEST_PREFILL_S, SLOWEST_TOKEN_S, Pace
from distill.routing import MixtureShape
from distill.sampling import UNSCALED
from distill.states import HiddenStates
from distill.stops import StopTokens
from distill.types import FloatArray, TopLogprobs
from distill.weights.lending import LentBucket

_ABORT_AGAIN_S = 0.2
# SGLang normally answers /health within about one second.
_SILENCE_S = 5.0


class _Prefilled(NamedTuple):
    """Result of one prefill: log-probs at its T; None for parts that the server did not return."""

    scaled_N: FloatArray
    unscaled_N: FloatArray | None
    top: TopLogprobs | None
    states: HiddenStates | None


class SglangEngine:
    """An `Engine` (distill/engine.py) over HTTP.

    Args:
        client: client of the server.
        model: served checkpoint, as the server names it.
        vocab_size: upper bound of the ids that may be sent: a larger one would crash the server.
        context_length: maximum number of tokens of a chain.
        dtype: compute precision.
        stops: tokens that end samples, and whether they count as one event; None: the server's own.
        weights: loads new weights; None for a server whose weights must not be replaced.
        mixture: shape of the model's mixture of experts, if the server returns routed experts.
        first_request_s: time in seconds that the server may be unresponsive during the first
            request of a kind.
    """

    kind: ClassVar[str] = "sglang"

    def __init__(
        self,
        client: SglangClient,
        *,
        model: str,
        stops: StopTokens | None,
        vocab_size: int = 0,
        context_length: int = 0,
        dtype: str = "float32",
        weights: WeightSession | None = None,
        mixture: MixtureShape | None = None,
        first_request_s: float = 600.0,
    ) -> None:
        self._client = client
        self._model = model
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._dtype = dtype
        self._stops = stops
        self._event = () if stops is None else stops.event
        self._weights = weights
        self._seeded = False  # set from /server_info when the server is ready
        self._mixture = mixture
        self._in_flight: dict[asyncio.Future[None], int] = {}  # call -> samples at the server
        self._queued = 0  # samples and chains in calls of this engine
        self._beats = 0
        self._first = FirstRequests(first_request_s)
        self._plugin: asyncio.Task[Plugin] | None = None
        self._in_chunks = asyncio.Lock()  # one request at a time in `_prefill_in_chunks`
        self._decoding, self._prefilling = Pace(SLOWEST_TOKEN_S), Pace(SLOWEST_PREFILL_S)

    @contextmanager
    def _carrying(self, number: int) -> Iterator[None]:
        self._queued += number
        try:
            yield
        finally:
            self._queued -= number

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        """See `Engine.generate`."""
        with self._carrying(request.num_samples):
            await self._ready()
            limit = check_prompt(
                request, self._vocab_size, self._context_length, self._event,
                records_experts=self._mixture is not None,
            )  # fmt: skip
            if self._weights is None:
                return await self._sample(request, limit, Use())
            return await self._weights.generate(partial(self._sample, request, limit))

    async def _sample(self, request: GenerateRequest, limit: int, use: Use) -> list[Sample]:
        body = sampling_body(request, limit, stops=self._stops, seeded=self._seeded)
        body |= use.fields
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._in_flight[ended] = request.num_samples
        try:
            began = time.monotonic()
            with self._first.sending("sampling"):
                samples = await self._client.exchange(
                    "/generate",
                    lambda: body,
                    partial(self._read_samples, request, use),
                    allowance_s=self._decoding.allowance_s(limit),
                )
        finally:
            del self._in_flight[ended]
            ended.set_result(None)
        longest = max(len(sample.tokens_T) for sample in samples)
        self._decoding.note(time.monotonic() - began, longest)
        return samples

    def _read_samples(self, request: GenerateRequest, use: Use, content: Any) -> list[Sample]:
        samples = []
        for answer in answers_of(content, request.num_samples):
            sample = read_sample(answer, self._event, request.top_k, use.version)
            if request.experts:
                assert self._mixture is not None
                routed = len(request.prompt_tokens_T) + len(sample.tokens_T) - 1
                experts_NLK = read_experts(answer, max(0, routed - request.known), self._mixture)
                sample = replace(sample, experts_NLK=experts_NLK)
            samples.append(sample)
        return samples

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """See `Engine.score`.

        The plugin also returns unscaled log-probs, so a request at (T, 1) takes one pass.
        """
        with self._carrying(len(requests)):
            await self._ready()
            check_chains(requests, self._vocab_size, self._context_length, self._event)
            if not requests:
                return []
            if self._weights is None:
                return await self._score(requests, Use())
            return await self._weights.score(partial(self._score, requests))

    async def _score(self, requests: Sequence[ScoreRequest], use: Use) -> list[Score]:
        passes = [(i, t) for i, request in enumerate(requests) for t in passes_of(request)]
        found = await self._prefill([(in_pass(requests[i], t), t) for i, t in passes], use)
        by_request: list[dict[float, FloatArray]] = [{} for _ in requests]
        tops: list[TopLogprobs | None] = [None for _ in requests]
        states: list[HiddenStates | None] = [None for _ in requests]
        for (i, t), prefilled in zip(passes, found, strict=True):
            by_request[i][t] = prefilled.scaled_N
            tops[i] = tops[i] if prefilled.top is None else prefilled.top
            states[i] = states[i] if prefilled.states is None else prefilled.states
            if prefilled.unscaled_N is not None:
                by_request[i].setdefault(UNSCALED, prefilled.unscaled_N)
        missing = [
            (i, t)
            for i, request in enumerate(requests)
            for t in request.temperatures
            if t not in by_request[i]
        ]
        if missing:  # a server without the plugin
            left = [(replace(in_pass(requests[i], t), states_N=None), t) for i, t in missing]
            again = await self._prefill(left, use)
            for (i, t), prefilled in zip(missing, again, strict=True):
                by_request[i][t] = prefilled.scaled_N
        version = use.version
        if version is None and self._weights is not None:
            version = self._weights.version
        return [
            Score(
                logprobs_by_temperature=tuple(by_request[i][t] for t in request.temperatures),
                top=tops[i],
                version=version,
                states=states[i],
            )
            for i, request in enumerate(requests)
        ]

    async def _prefill(
        self, passes: Sequence[tuple[ScoreRequest, float]], use: Use
    ) -> list[_Prefilled]:
        """Compute log-probs of each request's tokens at the paired T, by prefill on the server.

        The passes are split into several HTTP requests so that each answer has a bounded size.
        """
        states = any(request.states_N is not None for request, _ in passes)
        if states and not (await self._known_plugin()).states:
            return await self._prefill_in_chunks(passes, use)
        parts = [passes[part] for part in bounded(passes, self._event)]
        return await self._prefill_parts(parts, use)

    async def _prefill_in_chunks(
        self, passes: Sequence[tuple[ScoreRequest, float]], use: Use
    ) -> list[_Prefilled]:
        """`_prefill` with hidden states, on a server without the plugin.

        Such a server returns hidden states only for the last prefill chunk of a prompt. So the
        prompts of one HTTP request must fit into one chunk, and requests are sent one at a time.
        """
        chunks, made = prefill_chunks(await self._client.server_info()), []
        for part in bounded(passes, self._event, chunks):
            async with self._in_chunks if chunks.tokens > 0 else nullcontext():
                made += await self._prefill_parts([passes[part]], use, plugin=False)
        return made

    async def _prefill_parts(
        self,
        parts: Sequence[Sequence[tuple[ScoreRequest, float]]],
        use: Use,
        *,
        plugin: bool = True,
    ) -> list[_Prefilled]:
        """Send each part as one HTTP request, all concurrently."""
        began = time.monotonic()
        tokens = sum(len(request.tokens_T) for part in parts for request, _ in part)
        with self._first.sending("scoring"):
            made = await together(
                *(
                    self._client.exchange(
                        "/generate",
                        lambda part=part: (
                            scoring_body(part, self._event, plugin=plugin) | dict(use.fields)
                        ),
                        partial(self._read_prefilled, part),
                        repeatable=True,
                        allowance_s=self._prefilling.allowance_s(tokens),
                    )
                    for part in parts
                )
            )
        self._prefilling.note(time.monotonic() - began, tokens)
        return [each for one in made for each in one]

    def _read_prefilled(
        self, passes: Sequence[tuple[ScoreRequest, float]], content: Any
    ) -> list[_Prefilled]:
        answers = answers_of(content, len(passes))
        return [
            _Prefilled(
                read_input_logprobs(answer, request, t, self._vocab_size, self._event),
                read_unscaled(answer, request),
                read_top(answer, request, request.top_k, self._vocab_size, self._event),
                read_hidden_states(answer, request, self._dtype),
            )
            for answer, (request, t) in zip(answers, passes, strict=True)
        ]

    async def decode_score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """See `Engine.decode_score`. Listed tokens are ignored: only given tokens are scored."""
        await self._ready()
        check_chains(requests, self._vocab_size, self._context_length, self._event)
        asked = [
            (i, t, position)
            for i, request in enumerate(requests)
            for t in request.temperatures
            for position in range(request.start, len(request.tokens_T))
        ]
        if not asked:
            return []
        read = partial(self._read_off_decode, requests, asked)
        return await (read(Use()) if self._weights is None else self._weights.score(read))

    async def _read_off_decode(
        self, requests: Sequence[ScoreRequest], asked: Sequence[tuple[int, float, int]], use: Use
    ) -> list[Score]:
        """Log-probs of the tokens in `asked`: (index of the request, T, position)."""
        body = forced_body([(requests[i], t, position) for i, t, position in asked], self._event)
        body |= use.fields
        with self._first.sending("scoring by decode"):
            content = await self._client.post("/generate", body)
        answers = answers_of(content, len(asked))
        found: dict[tuple[int, float], list[float]] = {}
        for (i, t, position), answer in zip(asked, answers, strict=True):
            value = read_forced(answer, int(requests[i].tokens_T[position]), self._event)
            found.setdefault((i, t), []).append(value)
        return [
            Score(
                logprobs_by_temperature=tuple(
                    np.asarray(found[i, t], np.float32) for t in request.temperatures
                )
            )
            for i, request in enumerate(requests)
        ]

    async def load_weights(self, weights: WeightSource, version: int) -> float:
        """See `Engine.load_weights`.

        Raises:
            EngineError: the server rejects the weights, or its weights must not be replaced.
        """
        await self._ready()
        return await self._session().load(weights, version)

    async def sleep(self) -> None:
        """Release the server's GPU memory until weights are loaded; requests wait until then.

        Raises:
            EngineError: the server failed to release it, or its weights must not be replaced.
        """
        await self._ready()
        await self._session().sleep()

    async def load_bucket(self, push: str, number: int, handles: Sequence[LentBucket]) -> None:
        """Load a bucket of the current `LentWeights`, with one handle for each rank.

        Returns when no rank reads the bucket any more.

        Raises:
            EngineError: the bucket was not loaded.
        """
        await self._ready()
        await self._session().lendings.of(push).put(number, handles)

    async def end_push(self, push: str, why: str) -> None:
        """End a push of lent buckets: no more buckets will follow. `why` is the reason."""
        self._session().lendings.end(why, push)

    async def weight_checksums(self) -> list[dict[str, str]]:
        """See `EmbeddedEngine.weight_checksums`. Computed by the server, one dict for each rank."""
        await self._ready()
        return await self._session().checksums()

    def _session(self) -> WeightSession:
        if self._weights is None:
            raise EngineError(
                f"{self._model} is an external server: its weights cannot be replaced"
            )
        return self._weights

    async def info(self) -> EngineInfo:
        """See `Engine.info`."""
        await self._ready()
        return await self._info()

    async def _info(self) -> EngineInfo:
        answer = await self._client.get("/model_info")
        version = None if self._weights is None else self._weights.adapter_version
        plugin = await self._known_plugin()
        if not isinstance(answer, dict):
            raise EngineError("the server's /model_info is not a JSON object")
        return EngineInfo(
            kind=self.kind,
            model=self._model,
            vocab_size=self._vocab_size,
            context_length=self._context_length,
            weight_version=(
                read_version(answer.get("weight_version")) if version is None else version
            ),
            dtype=self._dtype,
            eos_token_ids=None if self._stops is None else self._stops.ids,
            stop_event=self._event,
            tokenizer=await probe_tokenizer(self._client),
            temperature_scaling=(
                "isotherm's plugin in the server"
                if plugin.scores_at_t
                else "not announced by the server"
            ),
            scores_given=plugin.lists,
            longest_states=(
                None if plugin.states else longest_states(await self._client.server_info())
            ),
            scores_at_t=plugin.scores_at_t,
        )

    async def _known_plugin(self) -> Plugin:
        """Abilities of the server's plugin, probed once."""

        async def probe() -> Plugin:
            with self._first.sending("scoring"):
                return await probe_plugin(self._client)

        if self._plugin is None or failed(self._plugin):
            self._plugin = asyncio.ensure_future(probe())
        return await asyncio.shield(self._plugin)

    async def health(self) -> int:
        """See `Engine.health`.

        SGLang answers /health only after its scheduler has produced output since the request: for a
        running request, or a token sampled for this purpose. So each answer counts as progress. A
        sleeping server counts as live too, because it waits for the learner. So does a server that
        does not answer during the first request of a kind, because it may be compiling kernels
        (`FirstRequests`).
        """
        await self._ready()
        if self._weights is not None and self._weights.asleep and not self._weights.loading:
            self._beats += 1
            return self._beats
        if self._weights is not None and self._weights.loading:
            return self._beats  # generation is paused
        await self._require_life()
        self._beats += 1
        return self._beats

    async def _require_life(self) -> None:
        """Raise EngineLost unless the scheduler works or may be compiling kernels."""
        asked = asyncio.ensure_future(self._client.get("/health"))
        try:
            while not (await asyncio.wait([asked], timeout=_SILENCE_S))[0]:
                if self._first.in_progress:
                    return
            asked.result()
        except EngineError as error:
            if not self._first.in_progress:
                raise EngineLost(str(error)) from error
        finally:
            asked.cancel()

    async def queue_length(self) -> int:
        """See `Engine.queue_length`."""
        return self._queued

    async def abort(self) -> int:
        """See `Engine.abort`.

        The abort is repeated until every call has ended: the scheduler aborts only the requests
        that it has received, and others may still be in transit.
        """
        await self._ready()
        samples, calls = sum(self._in_flight.values()), set(self._in_flight)
        while calls:
            await self._client.order("/abort_request", {"rid": "", "abort_all": True})
            _, calls = await asyncio.wait(calls, timeout=_ABORT_AGAIN_S)
        return samples

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()

    async def _ready(self) -> None:
        """Wait until the server accepts requests, before each request of a caller."""

    def _note_server(self, info: Mapping[str, Any]) -> None:
        """Read the maximum length of a chain, and whether samples need seeds, from /server_info.

        The cache may be smaller than the context. A deterministic server uses the same seed for
        all samples without one, so all members of a group would be equal. Several flags make a
        server deterministic, --rl-on-policy-target among them.
        """
        self._context_length = int(info["max_req_input_len"]) - 1
        self._seeded = bool(info.get("enable_deterministic_inference"))


def failed(task: asyncio.Task[Any]) -> bool:
    """True if the task has ended without a result."""
    return task.done() and (task.cancelled() or task.exception() is not None)
