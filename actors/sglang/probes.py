"""Facts about an SGLang server that are found out by requests, or derived from /server_info."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from actors.sglang.answers import answers_of, read_echo
from actors.sglang.client import SglangClient
from actors.sglang.plugin.hooks import LISTED_KEY, STATES_KEY
from actors.sglang.requests import NEUTRAL, Chunks, scoring_body
from distill.engine import ScoreRequest
from distill.errors import DataError
from distill.tokenizer import PROBE_CHAT, PROBE_TEXTS, TokenizerProbe

logger = logging.getLogger(__name__)

_LARGEST_VOCABULARY = 1 << 22


class Plugin(NamedTuple):
    """Abilities of a server's plugin; all False without one."""

    scores_at_t: bool
    lists: bool
    states: bool


async def probe_plugin(client: SglangClient) -> Plugin:
    tokens_T = np.zeros(2, np.int32)
    asked = ScoreRequest(
        tokens_T=tokens_T,
        start=1,
        temperatures=(0.5,),
        given_NK=tokens_T[:1, None],
        states_N=np.ones(1, np.bool_),
    )
    content = await client.post("/generate", scoring_body([(asked, 0.5)]))
    [answer] = answers_of(content, 1)
    if read_echo(answer) is None:
        return Plugin(False, False, False)
    return Plugin(True, LISTED_KEY in answer["meta_info"], STATES_KEY in answer["meta_info"])


async def probe_tokenizer(client: SglangClient) -> TokenizerProbe:
    texts = await client.post(
        "/v1/tokenize", {"prompt": list(PROBE_TEXTS), "add_special_tokens": False}
    )
    chat: tuple[int, ...] | None = None
    try:
        answer = await client.post(
            "/v1/tokenize", {"messages": list(PROBE_CHAT), "add_generation_prompt": True}
        )
        chat = tuple(answer["tokens"])
    except DataError as error:  # the model has no chat template
        logger.info("a server cannot render chats: %s", error)
    return TokenizerProbe(texts=tuple(tuple(ids) for ids in texts["tokens"]), chat=chat)


async def find_vocab_size(client: SglangClient) -> int:
    """Find the vocabulary size by bisection.

    SGLang does not report the size, but rejects a logit bias on an id outside the vocabulary. A
    prompt with such an id would crash the server.
    """
    inside, outside = 0, _LARGEST_VOCABULARY
    while outside - inside > 1:
        middle = (inside + outside) // 2
        params = NEUTRAL | {"max_new_tokens": 1, "logit_bias": {str(middle): 0.0}}
        try:
            await client.post("/generate", {"input_ids": [0], "sampling_params": params})
            inside = middle
        except DataError:
            outside = middle
    return outside


def prefill_chunks(info: Mapping[str, Any]) -> Chunks:
    return Chunks(int(info.get("chunked_prefill_size") or 0), int(info.get("page_size") or 1))


def longest_states(info: Mapping[str, Any]) -> int | None:
    """`EngineInfo.longest_states` of a server without the plugin."""
    returned = info.get("enable_return_hidden_states")
    if not (returned or info.get("return_hidden_states_mode") == "full"):
        return 0
    chunks = prefill_chunks(info)
    return chunks.tokens // chunks.page * chunks.page if chunks.tokens > 0 else None
