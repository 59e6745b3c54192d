"""Request bodies for SGLang's /generate. Pure; the answers: answers.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from actors.sglang.plugin.hooks import UNSCALED_SWITCH
from distill.engine import GenerateRequest, ScoreRequest
from distill.sampling import UNSCALED, EvalSampling, Sampling


def sampling_body(
    request: GenerateRequest, limit: int, *, stop_ids: frozenset[int] | None, seeded: bool
) -> dict[str, Any]:
    """The request's samples, of `limit` tokens at most; `seeded` gives each a seed of its own."""
    prompt = request.prompt_tokens_T.tolist()
    params: dict[str, Any] = _decoder(request.sampling) | {"max_new_tokens": limit}
    if stop_ids:
        params["stop_token_ids"] = sorted(stop_ids)
    body: dict[str, Any] = {"return_logprob": True}
    if seeded:
        seeds = [_seed(request, g) for g in range(request.num_samples)]
        body["input_ids"] = [prompt for _ in seeds]
        body["sampling_params"] = [params | {"sampling_seed": seed} for seed in seeds]
    else:  # SGLang computes the prompt once for all of them
        body["input_ids"] = [prompt]
        body["sampling_params"] = params | {"n": request.num_samples}
    return body


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


def passes_of(request: ScoreRequest) -> list[float]:
    """The temperatures that need a pass of their own; T = 1 comes with any other, if there is one.

    If it does not come along after all, it is asked for afterwards. The likeliest tokens never come
    along at another T than the pass's own.
    """
    alone = [t for t in request.temperatures if t != UNSCALED]
    if request.top_k:
        alone.insert(0, request.temperatures[0])
    return list(dict.fromkeys(alone)) or [UNSCALED]


def top_k_of(request: ScoreRequest, temperature: float) -> int:
    """Number of likeliest tokens to request in the pass at this temperature."""
    return request.top_k if temperature == request.temperatures[0] else 0


def scoring_body(passes: Sequence[tuple[ScoreRequest, float]]) -> dict[str, Any]:
    """Log-probs of given tokens, each request at the temperature beside it."""
    return {
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
        "top_logprobs_num": [top_k_of(request, t) for request, t in passes],
    }


def forced_body(asked: Sequence[tuple[ScoreRequest, float, int]]) -> dict[str, Any]:
    """One sampled token after each context, and the log-prob of the token that is there.

    Args:
        asked: (request, T, position of the token).
    """
    return {
        "input_ids": [request.tokens_T[:position].tolist() for request, _, position in asked],
        "sampling_params": [{"temperature": t, "max_new_tokens": 1} for _, t, _ in asked],
        "return_logprob": True,
        "token_ids_logprob": [[int(request.tokens_T[position])] for request, _, position in asked],
    }
