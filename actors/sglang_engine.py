"""The `Engine` that is an SGLang server: one that this process hosts, or one already running.

    generate       POST /generate, return_logprob: tokens, log-probs at T, a version for each token
    score          POST /generate, logprob_start_len: given tokens, at the T of each request
    decode_score   POST /generate, one sampled token a position, token_ids_logprob
    load_weights   pause, load, flush, new version, continue (actors/sglang_weights.py)

Stock SGLang does not divide given tokens' logits by T. The plugin (actors/sglang_plugin.py) does,
and echoes the T it applied; what echoes another T than was asked for is refused here. A server
without an echo is taken as it is: whether it scores at T is for the handshake to find out.

SGLang draws its samples from one generator for all requests, so `GenerateRequest.seed` is heeded
only by a server that runs with --enable-deterministic-inference.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from actors.sglang_http import SglangClient
from actors.sglang_plugin import TEMPERATURE_KEY, UNSCALED_KEY, UNSCALED_SWITCH
from actors.sglang_server import SglangServer
from actors.sglang_weights import WeightSession
from distill.errors import DataError, EngineError
from distill.interfaces import (
    EngineInfo,
    GenerateRequest,
    Sample,
    Score,
    ScoreRequest,
    TensorLayout,
    WeightSource,
    check_token_ids,
)
from distill.sampling import UNSCALED, EvalSampling, Sampling
from distill.tokenizer import PROBE_CHAT, PROBE_TEXTS, TokenizerProbe
from distill.types import FloatArray, StopReason, TokenArray

logger = logging.getLogger(__name__)


class SglangEngine:
    """An `Engine` (distill/interfaces.py) over HTTP.

    Args:
        client: of the server.
        server: the process, where this engine hosts it; it is ended with the engine.
        model: the checkpoint that is served, as its host names it.
        vocab_size: ids below it may be sent: a larger one would kill the server.
        context_length: most tokens of a chain.
        dtype: compute precision.
        stop_ids: ids that end a generation; None leaves them to the server.
        weights: how new weights get in; None for a server that is not ours to change.
        seeded: the server runs deterministically and heeds each request's seed.
    """

    def __init__(
        self,
        client: SglangClient,
        *,
        server: SglangServer | None,
        model: str,
        vocab_size: int,
        context_length: int,
        dtype: str,
        stop_ids: frozenset[int] | None,
        weights: WeightSession | None,
        seeded: bool,
    ) -> None:
        self._client = client
        self.server = server
        self._model = model
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._dtype = dtype
        self._stop_ids = stop_ids
        self._weights = weights
        self._seeded = seeded
        self._starting: asyncio.Task[None] | None = None
        self._in_flight = 0

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        """See `Engine.generate`."""
        await self._ready()
        prompt_T = request.prompt_tokens_T
        check_token_ids(prompt_T, self._vocab_size, "GenerateRequest.prompt_tokens_T")
        room = self._context_length - len(prompt_T)
        if room < 1:
            raise DataError(
                f"a prompt of {len(prompt_T)} tokens leaves no room for an answer in the model's "
                f"context of {self._context_length}; shorten or condense it"
            )
        limit = min(request.sampling.max_new_tokens, room)
        if self._weights is None:
            return await self._sample(request, limit)
        return await self._weights.generate(partial(self._sample, request, limit))

    async def _sample(self, request: GenerateRequest, limit: int) -> list[Sample]:
        prompt = request.prompt_tokens_T.tolist()
        copies = range(request.num_samples)
        body: dict[str, Any] = {"return_logprob": True}
        if self._seeded:
            body["input_ids"] = [prompt for _ in copies]
            body["sampling_params"] = [
                self._sampling_params(request, limit) | {"sampling_seed": _seed(request, g)}
                for g in copies
            ]
        else:  # SGLang computes the prompt once for all of them
            n = {"n": request.num_samples}
            body["input_ids"] = [prompt]
            body["sampling_params"] = self._sampling_params(request, limit) | n
        self._in_flight += request.num_samples
        try:
            answers = _answers(await self._client.post("/generate", body), request.num_samples)
        finally:
            self._in_flight -= request.num_samples
        return [_sample(answer) for answer in answers]

    def _sampling_params(self, request: GenerateRequest, limit: int) -> dict[str, Any]:
        params: dict[str, Any] = _decoder(request.sampling) | {"max_new_tokens": limit}
        if self._stop_ids:
            params["stop_token_ids"] = sorted(self._stop_ids)
        return params

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """See `Engine.score`.

        The plugin returns unscaled log-probs of the same pass, so a request at (T, 1) costs one.
        """
        await self._ready()
        for request in requests:
            self._check_chain(request)
        if not requests:
            return []
        if self._weights is None:
            return await self._score(requests)
        return await self._weights.score(partial(self._score, requests))

    async def _score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        passes = [(i, t) for i, request in enumerate(requests) for t in _passes(request)]
        found = await self._prefill([(requests[i], t) for i, t in passes])
        by_request: list[dict[float, FloatArray]] = [{} for _ in requests]
        for (i, t), (scaled_N, unscaled_N) in zip(passes, found, strict=True):
            by_request[i][t] = scaled_N
            if unscaled_N is not None:
                by_request[i].setdefault(UNSCALED, unscaled_N)
        missing = [
            (i, t)
            for i, request in enumerate(requests)
            for t in request.temperatures
            if t not in by_request[i]
        ]
        if missing:  # a server without the plugin, or a chain prefilled in several chunks
            again = await self._prefill([(requests[i], t) for i, t in missing])
            for (i, t), (scaled_N, _) in zip(missing, again, strict=True):
                by_request[i][t] = scaled_N
        return [
            Score(logprobs_by_temperature=tuple(by_request[i][t] for t in request.temperatures))
            for i, request in enumerate(requests)
        ]

    async def _prefill(
        self, passes: Sequence[tuple[ScoreRequest, float]]
    ) -> list[tuple[FloatArray, FloatArray | None]]:
        """(log-probs at T, log-probs unscaled if they came along) of each pass."""
        body = {
            "input_ids": [request.tokens_T.tolist() for request, _ in passes],
            "sampling_params": [
                {
                    "temperature": t,
                    "max_new_tokens": 1,
                    "custom_params": {UNSCALED_SWITCH: UNSCALED in request.temperatures},
                }
                for request, t in passes
            ],
            "return_logprob": True,
            # The first entry that SGLang returns has no log-prob.
            "logprob_start_len": [request.start - 1 for request, _ in passes],
        }
        answers = _answers(await self._client.post("/generate", body, repeatable=True), len(passes))
        return [
            (
                _input_logprobs(answer, request, t, self._vocab_size),
                _unscaled_logprobs(answer, request),
            )
            for answer, (request, t) in zip(answers, passes, strict=True)
        ]

    async def decode_score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """See `Engine.decode_score`."""
        await self._ready()
        for request in requests:
            self._check_chain(request)
        asked = [
            (i, t, position)
            for i, request in enumerate(requests)
            for t in request.temperatures
            for position in range(request.start, len(request.tokens_T))
        ]
        if not asked:
            return []
        read = partial(self._read_off_decode, requests, asked)
        return await (read() if self._weights is None else self._weights.score(read))

    async def _read_off_decode(
        self, requests: Sequence[ScoreRequest], asked: Sequence[tuple[int, float, int]]
    ) -> list[Score]:
        """Log-probs of the tokens `asked` for: (index of the request, T, position)."""
        chains = [request.tokens_T.tolist() for request in requests]
        body = {
            "input_ids": [chains[i][:position] for i, _, position in asked],
            "sampling_params": [{"temperature": t, "max_new_tokens": 1} for _, t, _ in asked],
            "return_logprob": True,
            "token_ids_logprob": [[chains[i][position]] for i, _, position in asked],
        }
        answers = _answers(await self._client.post("/generate", body, repeatable=True), len(asked))
        found: dict[tuple[int, float], list[float]] = {}
        for (i, t, position), answer in zip(asked, answers, strict=True):
            value = _forced_logprob(answer, chains[i][position])
            found.setdefault((i, t), []).append(value)
        return [
            Score(
                logprobs_by_temperature=tuple(
                    np.asarray(found[i, t], np.float32) for t in request.temperatures
                )
            )
            for i, request in enumerate(requests)
        ]

    def _check_chain(self, request: ScoreRequest) -> None:
        check_token_ids(request.tokens_T, self._vocab_size, "ScoreRequest.tokens_T")
        if len(request.tokens_T) > self._context_length:
            raise DataError(
                f"a chain of {len(request.tokens_T)} tokens exceeds the model's context of "
                f"{self._context_length}"
            )

    async def load_weights(self, weights: WeightSource, version: int) -> float:
        """See `Engine.load_weights`.

        Raises:
            EngineError: the server refuses the weights, or is not ours to change.
        """
        await self._ready()
        return await self._session().load(weights, version)

    async def weight_ranks(self, layout: Sequence[TensorLayout]) -> int:
        """Ranks of a weight group that this engine takes: its tensor parallelism.

        Raises:
            EngineError: these tensors are not the model's; no group is to be formed.
        """
        await self._ready()
        return await self._session().ranks(layout)

    def _session(self) -> WeightSession:
        if self._weights is None:
            raise EngineError(f"{self._model} is served elsewhere: its weights cannot be replaced")
        return self._weights

    async def info(self) -> EngineInfo:
        """See `Engine.info`."""
        await self._ready()
        answer = await self._client.get("/model_info")
        if not isinstance(answer, dict):
            raise EngineError("the server's /model_info is not a JSON object")
        return EngineInfo(
            kind="sglang" if self.server is not None else "sglang (external)",
            model=self._model,
            vocab_size=self._vocab_size,
            context_length=self._context_length,
            weight_version=_version(answer.get("weight_version")),
            dtype=self._dtype,
            eos_token_ids=None if self._stop_ids is None else tuple(sorted(self._stop_ids)),
            tokenizer=await self._probe_tokenizer(),
            temperature_scaling=await self._describe_scaling(),
        )

    async def _probe_tokenizer(self) -> TokenizerProbe:
        texts = await self._client.post(
            "/v1/tokenize",
            {"prompt": list(PROBE_TEXTS), "add_special_tokens": False},
            repeatable=True,
        )
        chat: tuple[int, ...] | None = None
        try:
            answer = await self._client.post(
                "/v1/tokenize",
                {"messages": list(PROBE_CHAT), "add_generation_prompt": True},
                repeatable=True,
            )
            chat = tuple(answer["tokens"])
        except DataError:  # the model has no chat template
            logger.info("%s has no chat template that its server can render", self._model)
        return TokenizerProbe(texts=tuple(tuple(ids) for ids in texts["tokens"]), chat=chat)

    async def _describe_scaling(self) -> str:
        body = {
            "input_ids": [0, 0],
            "sampling_params": {"temperature": 0.5, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        [answer] = _answers([await self._client.post("/generate", body, repeatable=True)], 1)
        if _echo(answer) is None:
            return "not announced by the server"
        return "isotherm's plugin in the server"

    async def abort(self) -> int:
        """See `Engine.abort`."""
        await self._ready()
        samples = self._in_flight
        await self._client.admin("/abort_request", {"rid": "", "abort_all": True})
        return samples

    async def close(self) -> None:
        """Ends the server, where this engine hosts it."""
        await self._client.close()
        if self.server is not None:
            self.server.stop()

    async def _ready(self) -> None:
        """Waits for a hosted server's start, once for all callers."""
        if self.server is None:
            return
        if self._starting is None:
            self._starting = asyncio.ensure_future(self.server.ready())
        await asyncio.shield(self._starting)
        if not self.server.running:
            raise EngineError(self.server.obituary())


def _decoder(sampling: Sampling) -> dict[str, float]:
    """SGLang's names for a decoder. Every default that a server could be given is overridden."""
    params = {"temperature": sampling.temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    if isinstance(sampling, EvalSampling):
        params |= {"top_p": sampling.top_p, "top_k": sampling.top_k or -1}
    return params


def _seed(request: GenerateRequest, g: int) -> int:
    """Sample g's own seed, as SGLang takes it: 31 bits."""
    entropy = np.random.SeedSequence([request.seed % (1 << 64), g])
    return int(entropy.generate_state(1, np.uint32)[0] >> 1)


def _passes(request: ScoreRequest) -> list[float]:
    """The temperatures that need a pass of their own; T = 1 comes with any other, if there is one.

    If it does not come along after all, it is asked for afterwards.
    """
    scaled = [t for t in request.temperatures if t != UNSCALED]
    return list(dict.fromkeys(scaled)) or [UNSCALED]


def _answers(content: Any, expected: int) -> list[Mapping[str, Any]]:
    """The list of answers of a batch request. Raises EngineError if it is anything else."""
    if not isinstance(content, list) or not all(
        isinstance(answer, dict) and isinstance(answer.get("meta_info"), dict) for answer in content
    ):
        raise EngineError(f"the server's answer is not SGLang's: {str(content)[:200]}")
    if len(content) != expected:
        raise EngineError(f"the server answered {len(content)} of {expected} requests")
    return content


def _sample(answer: Mapping[str, Any]) -> Sample:
    meta = answer["meta_info"]
    logprobs_T, tokens_T = _columns(meta, "output_token_logprobs")
    if tokens_T.tolist() != list(answer.get("output_ids") or []):
        raise EngineError(
            f"the server returned {len(tokens_T)} output log-probs for "
            f"{len(answer.get('output_ids') or [])} tokens, or of others"
        )
    reason = _stop_reason(meta)
    if len(tokens_T) == 0 and reason is not StopReason.ABORTED:
        raise EngineError("the server returned a sample without a token")
    return Sample(
        tokens_T=tokens_T,
        logprobs_T=_finite(logprobs_T, "output_token_logprobs"),
        versions_T=_versions(meta, len(tokens_T)),
        stop_reason=reason,
    )


def _columns(meta: Mapping[str, Any], name: str) -> tuple[FloatArray, TokenArray]:
    """(log-probs, token ids) of a list of [log-prob, id, text]."""
    rows = meta.get(name)
    if not isinstance(rows, list):
        raise EngineError(f"the server returned no {name}")
    try:
        logprobs = np.asarray([np.nan if row[0] is None else row[0] for row in rows], np.float32)
        return logprobs, np.asarray([row[1] for row in rows], np.int32)
    except (TypeError, ValueError, IndexError) as error:
        raise EngineError(f"the server's {name} cannot be read: {str(rows)[:200]}") from error


def _finite(logprobs_N: FloatArray, what: str) -> FloatArray:
    if not np.isfinite(logprobs_N).all():
        where = int(np.argmin(np.isfinite(logprobs_N)))
        raise EngineError(
            f"the server's {what} hold {logprobs_N[where]} at {where} of {len(logprobs_N)}"
        )
    return logprobs_N


def _input_logprobs(
    answer: Mapping[str, Any], request: ScoreRequest, temperature: float, vocab_size: int
) -> FloatArray:
    """Log-probs of the scored tokens; the first entry is the context's last token, without one."""
    echo = _echo(answer)
    if echo is not None and echo != np.float32(temperature):
        raise EngineError(
            f"the server scored at temperature {echo:g}, asked was {temperature:g}; restart it "
            "with isotherm's plugin of this version"
        )
    logprobs_N, tokens_N = _columns(answer["meta_info"], "input_token_logprobs")
    expected_N = request.tokens_T[request.start - 1 :]
    # SGLang reports the vocabulary's last id as 0 here; the log-prob is the last id's.
    expected_N = np.where(expected_N == vocab_size - 1, 0, expected_N)
    if not np.array_equal(np.where(tokens_N == vocab_size - 1, 0, tokens_N), expected_N):
        raise EngineError(
            f"the server returned {len(tokens_N)} input log-probs for {len(expected_N)} tokens, or "
            "of others"
        )
    return _finite(logprobs_N[1:], "input_token_logprobs")


def _echo(answer: Mapping[str, Any]) -> np.float32 | None:
    """The temperature that the plugin says it applied; None from a server without it."""
    echo = answer["meta_info"].get(TEMPERATURE_KEY)
    if isinstance(echo, list):
        echo = next((value for value in echo if value is not None), None)
    return None if echo is None else np.float32(echo)


def _unscaled_logprobs(answer: Mapping[str, Any], request: ScoreRequest) -> FloatArray | None:
    """What the plugin found at T = 1 in the same pass; None if it is not all there."""
    found = answer["meta_info"].get(UNSCALED_KEY)
    # One entry for the one token that was sampled; null where it was not asked for.
    if not (isinstance(found, list) and len(found) == 1 and isinstance(found[0], list)):
        return None
    if len(found[0]) != len(request.tokens_T) - request.start:
        return None  # prefilled in several chunks: this is the last one's
    return _finite(np.asarray(found[0], np.float32), UNSCALED_KEY)


def _forced_logprob(answer: Mapping[str, Any], token: int) -> float:
    rows = answer["meta_info"].get("output_token_ids_logprobs")
    try:
        [[[logprob, token_id, *_]]] = rows
    except (TypeError, ValueError) as error:
        raise EngineError(f"the server's output_token_ids_logprobs are {rows!r}") from error
    if token_id != token or logprob is None or not np.isfinite(logprob):
        raise EngineError(f"the server's log-prob of token {token} is {logprob!r} of {token_id}")
    return float(logprob)


def _stop_reason(meta: Mapping[str, Any]) -> StopReason:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind == "abort":
        code = reason.get("status_code") if isinstance(reason, dict) else None
        if code is not None and int(code) >= 400:  # ended by a failure of the server
            raise EngineError(f"the server ended a sample: {reason}")
        return StopReason.ABORTED
    if kind == "stop":
        return StopReason.EOS
    if kind == "length":
        return StopReason.LENGTH
    raise EngineError(f"the server ended a sample with the unknown reason {reason!r}")


def _versions(meta: Mapping[str, Any], length: int) -> TokenArray:
    """The weight version that sampled each token, from the spans that SGLang reports."""
    spans = meta.get("weight_versions")
    if not isinstance(spans, list):
        return np.full(length, _version(meta.get("weight_version")), np.int32)
    versions_T = np.full(length, -1, np.int32)
    for span in spans:
        versions_T[span["start"] : span["end"]] = _version(span["version"])
    if (versions_T < 0).any():
        raise EngineError(f"the server's weight versions {spans} do not cover {length} tokens")
    return versions_T


def _version(text: Any) -> int:
    """Servers that nobody pushes weights to call their only version what they like."""
    try:
        return int(text)
    except (TypeError, ValueError):
        return 0
