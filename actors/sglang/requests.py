"""Request bodies for SGLang's /generate, built by pure functions. answers.py parses the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from actors.sglang.plugin.hooks import LISTED_SWITCH, STATES_SWITCH, UNSCALED_SWITCH
from actors.sglang.plugin.listed_steps import LISTED_OUTPUT_SWITCH
from actors.sglang.plugin.row_temperatures import Listed
from distill.engine import GenerateRequest, ScoreRequest
from distill.sampling import UNSCALED, EvalSampling, Sampling
from distill.stops import StopTokens, merged

# SGLang's defaults of all sampling parameters that change probabilities or end samples. Requests
# set them explicitly, because a server may have other defaults (--preferred-sampling-params).
NEUTRAL: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "min_new_tokens": 0,
    "ignore_eos": False,
    "stop": None,
    "stop_regex": None,
    "stop_token_ids": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "custom_params": None,
}


def sampling_body(
    request: GenerateRequest, limit: int, *, stops: StopTokens | None, seeded: bool
) -> dict[str, Any]:
    """Body of a sampling request, for samples of up to `limit` tokens.

    With `seeded`, each sample gets its own seed. If the stop tokens are one event, the log-probs of
    all stop tokens are requested with each sampled token. The plugin returns these log-probs and
    the likeliest tokens as bytes in base64. Servers without the plugin return the likeliest tokens
    in base64 if they support it (SGLang 0.5.23).
    """
    prompt = request.prompt_tokens_T.tolist()
    params: dict[str, Any] = _decoder(request.sampling) | {"max_new_tokens": limit}
    if stops is not None and stops.ids:
        params["stop_token_ids"] = list(stops.ids)
    body: dict[str, Any] = {"return_logprob": True}
    if stops is not None and stops.event:
        body["token_ids_logprob"] = list(stops.event)
    if request.top_k:
        body["top_logprobs_num"] = request.top_k + merged(() if stops is None else stops.event)
        body["return_flat_raw_output_top_logprobs"] = True
        body["return_flat_raw_top_logprobs_b64"] = True
    if "token_ids_logprob" in body or request.top_k:
        params["custom_params"] = {LISTED_OUTPUT_SWITCH: True}
    if request.experts:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.known}
    if seeded:
        seeds = [_seed(request, g) for g in range(request.num_samples)]
        body["input_ids"] = [prompt for _ in seeds]
        body["sampling_params"] = [params | {"sampling_seed": seed} for seed in seeds]
    else:  # SGLang prefills the prompt once for all samples
        body["input_ids"] = [prompt]
        body["sampling_params"] = params | {"n": request.num_samples}
    return body


def _decoder(sampling: Sampling) -> dict[str, Any]:
    """Sampling settings under SGLang's names."""
    params = NEUTRAL | {"temperature": sampling.temperature}
    if isinstance(sampling, EvalSampling):
        params |= {"top_p": sampling.top_p, "top_k": sampling.top_k or -1}
    return params


def _seed(request: GenerateRequest, g: int) -> int:
    """Seed of sample g: 31 bits, as SGLang requires."""
    entropy = np.random.SeedSequence([request.seed % (1 << 64), g])
    return int(entropy.generate_state(1, np.uint32)[0] >> 1)


def passes_of(request: ScoreRequest) -> list[float]:
    """Temperatures that need a separate pass: all, except T = 1 if there is another temperature.

    Log-probs at T = 1 are returned with any other pass, or requested afterwards if the server does
    not return them. Listed tokens are returned only at the temperature of the pass. Hidden states
    have no temperature and are returned with the first pass.
    """
    alone = [t for t in request.temperatures if t != UNSCALED]
    if request.listed:
        alone.insert(0, request.temperatures[0])
    return list(dict.fromkeys(alone)) or [UNSCALED]


def in_pass(request: ScoreRequest, temperature: float) -> ScoreRequest:
    """The request for one of its passes.

    Listed tokens are requested in the pass at the request's first temperature, hidden states in the
    first pass.
    """
    if temperature != request.temperatures[0]:
        request = replace(request, given_NK=None, top_k=0)
    if request.states_N is not None and temperature != passes_of(request)[0]:
        request = replace(request, states_N=None)
    return request


# Bytes of an answer for each scored row, for each of its listed tokens (int32 and float32 in
# base64), and for its hidden state (8,192 values of two bytes); and the maximum number of bytes of
# an answer to several passes.
_ROW_BYTES, _LISTED_BYTES, _STATE_BYTES, ANSWER_BYTES = 40, 11, 22_000, 16 << 20


class Chunks(NamedTuple):
    """Prefill chunks of a server.

    Attributes:
        tokens: maximum number of tokens in a chunk; 0: prompts are not split.
        page: number of tokens in a page; prompts occupy whole pages.
    """

    tokens: int
    page: int

    def share(self, length: int) -> float:
        """Share of a chunk that a prompt of `length` tokens occupies."""
        return -(-length // self.page) * self.page / self.tokens if self.tokens > 0 else 0.0


_WHOLE = Chunks(0, 1)


def bounded(
    passes: Sequence[tuple[ScoreRequest, float]],
    event: tuple[int, ...] = (),
    chunks: Chunks = _WHOLE,
) -> list[slice]:
    """Split a list of passes into slices, each for one HTTP request.

    The answer to a slice has up to `ANSWER_BYTES` bytes, and its prompts fit into one prefill
    chunk. A slice of a single pass may exceed both limits.
    """
    cuts, filled, of_chunk = [0], 0, 0.0
    for i, (request, _) in enumerate(passes):
        share = chunks.share(len(request.tokens_T))
        listed = request.listed + (len(event) if request.listed else 0)
        each = _ROW_BYTES + listed * _LISTED_BYTES + (request.states_N is not None) * _STATE_BYTES
        size = (len(request.tokens_T) - request.start) * each
        if i > cuts[-1] and (filled + size > ANSWER_BYTES or of_chunk + share > 1):
            cuts.append(i)
            filled, of_chunk = 0, 0.0
        filled += size
        of_chunk += share
    return [slice(a, b) for a, b in pairwise([*cuts, len(passes)])]


# Request the likeliest tokens as two blocks of int32 and float32 instead of nested lists: a third
# of the bytes, and no parsing of numbers. An SGLang without this option answers with lists.
_IN_BLOCKS = {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}


def scoring_body(
    passes: Sequence[tuple[ScoreRequest, float]],
    event: tuple[int, ...] = (),
    *,
    plugin: bool = True,
) -> dict[str, Any]:
    """Body of a scoring request: log-probs of given tokens, each request at the paired temperature.

    The log-probs of the event's tokens are requested at each position as well, and enough likeliest
    tokens that k remain after the event's tokens are merged into one outcome. The plugin handles
    `given_NK` with the likeliest other tokens, and hidden states. Without `plugin`, SGLang's own
    hidden states are requested, as lists of numbers.
    """
    more: dict[str, Any] = {"token_ids_logprob": list(event)} if event else {}
    likeliest = [0 if r.given_NK is not None else r.top_k for r, _ in passes]
    if any(likeliest):
        more |= _IN_BLOCKS
    if not plugin and any(request.states_N is not None for request, _ in passes):
        more["return_hidden_states"] = True
    return more | {
        "input_ids": [request.tokens_T.tolist() for request, _ in passes],
        "sampling_params": [
            NEUTRAL
            | {
                "temperature": t,
                "max_new_tokens": 1,
                "custom_params": {
                    UNSCALED_SWITCH: list(event) if UNSCALED in request.temperatures else None
                }
                | ({} if request.states_N is None else {STATES_SWITCH: True})
                | _listed(request, event),
            }
            for request, t in passes
        ],
        "return_logprob": True,
        # One position earlier: the first entry that SGLang returns contains no log-prob.
        "logprob_start_len": [request.start - 1 for request, _ in passes],
        "top_logprobs_num": [k and k + merged(event) for k in likeliest],
    }


def _listed(request: ScoreRequest, event: tuple[int, ...]) -> dict[str, Any]:
    """Plugin parameter with the given tokens, followed by all tokens of the event."""
    if request.given_NK is None:
        return {}
    events_NE = np.tile(np.asarray(event, np.int32), (len(request.given_NK), 1))
    ids_NK = np.concatenate([request.given_NK, events_NE], axis=1)
    listed = Listed(request.start - 1, torch.from_numpy(ids_NK), request.top_k)
    return {LISTED_SWITCH: listed.to_json()}


def outcome_of(token: int, event: tuple[int, ...]) -> list[int]:
    """Tokens that form one outcome with `token`: the event's if it contains `token`."""
    return list(event) if token in event else [token]


def forced_body(
    asked: Sequence[tuple[ScoreRequest, float, int]], event: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Body of a request that decodes one token after each context.

    The answer contains the log-prob of the given token at that position.

    Args:
        asked: (request, T, position of the given token).
    """
    return {
        "input_ids": [request.tokens_T[:position].tolist() for request, _, position in asked],
        "sampling_params": [NEUTRAL | {"temperature": t, "max_new_tokens": 1} for _, t, _ in asked],
        "return_logprob": True,
        "token_ids_logprob": [
            outcome_of(int(request.tokens_T[position]), event) for request, _, position in asked
        ],
    }
