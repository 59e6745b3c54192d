"""HTTP server that answers like SGLang, and on request like one that has gone wrong."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.actors.serving import serving

API_KEY = "the-key"
VOCAB_SIZE = 50

Answer = dict[str, Any]
Spoil = Callable[[Any], Any]


def proper_answer(tokens: list[int], params: dict[str, Any], body: Answer, i: int) -> Answer:
    """Answer of SGLang, with made-up log-probs."""
    length = params["max_new_tokens"]
    meta: Answer = {
        "finish_reason": {"type": "length", "length": length},
        "output_token_logprobs": [[-1.5, 7, None]] * length,
        "weight_version": "3",
        "weight_versions": [{"version": "3", "start": 0, "end": length}],
    }
    if "logprob_start_len" in body:
        start = body["logprob_start_len"][i]
        rows = [[-0.5 * params["temperature"], t, None] for t in tokens[start:]]
        rows[0][0] = None
        meta["input_token_logprobs"] = rows
        meta["input_logprob_temperature"] = [params["temperature"]]
        if k := body["top_logprobs_num"][i]:
            top = [[-1.5 - params["temperature"] - j, 20 + j, None] for j in range(k)]
            meta["input_top_logprobs"] = [None, *[top for _ in tokens[start + 1 :]]]
    if "token_ids_logprob" in body:
        meta["output_token_ids_logprobs"] = [[[-2.5, body["token_ids_logprob"][i][0], None]]]
    return {"output_ids": [7] * length, "meta_info": meta}


def _biased(body: Answer) -> int:
    """Largest token id with a bias; -1 without."""
    params = body["sampling_params"]
    bias = (params.get("logit_bias") if isinstance(params, dict) else None) or {}
    return max(map(int, bias), default=-1)


class MisbehavingServer:
    """Count requests; pass each answer through `spoil`; use one of `failures` per request."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.spoil: Spoil = lambda answer: answer
        # A status to answer with, "hang" or "drop"; in order, then it behaves.
        self.failures: list[int | str] = []
        # Answers of /server_info and /v1/tokenize; empty for a server that is no SGLang.
        self.introduces: Answer = {}
        self.scored: list[list[int]] = []  # the prompts of each call that asks for log-probs
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked[request.path] += 1
        if request.headers.get("Authorization") != f"Bearer {API_KEY}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        failure = self.failures.pop(0) if self.failures else None
        if failure == "hang":
            await asyncio.sleep(3600)
        if failure == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if isinstance(failure, int):
            return web.Response(status=failure, text=f"status {failure} on purpose")
        if request.path in self.introduces:
            return web.json_response(self.introduces[request.path])
        if request.path != "/generate":
            return web.json_response(self.spoil({"weight_version": "3"}))
        body = await request.json()
        if _biased(body) >= VOCAB_SIZE:
            return web.Response(status=400, text="logit_bias outside of the vocabulary")
        if "logprob_start_len" in body:
            self.scored.append([len(tokens) for tokens in body["input_ids"]])
        content = self.spoil(self.answer_generate(body))
        if isinstance(content, str):
            return web.Response(text=content)
        return web.json_response(content)

    def answer_generate(self, body: Answer) -> Any:
        params = body["sampling_params"]
        answers = []
        prompts = body["input_ids"]
        for i, tokens in enumerate(prompts if isinstance(prompts[0], list) else [prompts]):
            own = params[i] if isinstance(params, list) else params
            answers += [proper_answer(tokens, own, body, i)] * own.get("n", 1)
        return answers

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with serving(self.handle) as self.url:
            yield
