"""Engine without a model: the next token's distribution is a seeded hash of the whole prefix.

Every token before a position counts, so a wrong context, order or temperature changes log-probs.
"""

import zlib
from collections.abc import Sequence

import numpy as np

from distill.engine import EngineInfo, GenerateRequest, Sample, Score, ScoreRequest
from distill.types import FloatArray, StopReason, TokenArray, TopLogprobs
from tests.tiny import VOCAB_SIZE


class PrefixEngine:
    """Model-free engine; equal salts are equal models. `scored` has the requests of each call."""

    def __init__(self, salt: int) -> None:
        self._salt = salt
        self.scored: list[list[ScoreRequest]] = []

    def distribution_V(self, prefix_T: TokenArray, temperature: float) -> FloatArray:
        """log softmax(z / T) of the token after `prefix_T`."""
        seed = zlib.crc32(prefix_T.astype(np.int32).tobytes())
        logits_V = np.random.default_rng([self._salt, seed]).normal(scale=2, size=VOCAB_SIZE)
        scaled_V = logits_V / temperature
        return (scaled_V - np.logaddexp.reduce(scaled_V)).astype(np.float32)

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        return [self._sample(request, g) for g in range(request.num_samples)]

    def _sample(self, request: GenerateRequest, g: int) -> Sample:
        rng = np.random.default_rng([request.seed, g])
        chain_T, length = request.prompt_tokens_T, request.sampling.max_new_tokens
        logprobs, top_ids = [], []
        for _ in range(length):
            log_p_V = self.distribution_V(chain_T, request.sampling.temperature)
            p_V = np.exp(log_p_V.astype(np.float64))
            token = rng.choice(VOCAB_SIZE, p=p_V / p_V.sum())
            chain_T = np.append(chain_T, np.int32(token))
            logprobs.append(log_p_V[token])
            top_ids.append(np.argsort(-log_p_V)[: request.top_k])
        return Sample(
            tokens_T=chain_T[-length:], logprobs_T=np.array(logprobs, np.float32),
            versions_T=np.zeros(length, np.int32), stop_reason=StopReason.LENGTH,
            top_ids_TK=np.array(top_ids, np.int32) if request.top_k else None,
        )  # fmt: skip

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        self.scored.append(list(requests))
        return [self.answer(request) for request in requests]

    def answer(self, request: ScoreRequest) -> Score:
        positions = range(request.start, len(request.tokens_T))

        def distributions_NV(temperature: float) -> FloatArray:
            return np.stack(
                [self.distribution_V(request.tokens_T[:p], temperature) for p in positions]
            )

        targets_N1 = request.tokens_T[request.start :, None]
        first_NV = distributions_NV(request.temperatures[0])
        others_NV, given = first_NV.copy(), request.given_NK
        if given is not None:
            np.put_along_axis(others_NV, given, -np.inf, axis=1)
        ids_NK = np.argsort(-others_NV, axis=1)[:, : request.top_k].astype(np.int32)
        if given is not None:
            ids_NK = np.concatenate([given, ids_NK], axis=1)
        return Score(
            logprobs_by_temperature=tuple(
                np.take_along_axis(distributions_NV(t), targets_N1, axis=1)[:, 0]
                for t in request.temperatures
            ),
            top=None
            if request.listed == 0
            else TopLogprobs(
                ids_NK=ids_NK, logprobs_NK=np.take_along_axis(first_NV, ids_NK, axis=1)
            ),
        )

    async def decode_score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        raise NotImplementedError

    async def info(self) -> EngineInfo:
        raise NotImplementedError
