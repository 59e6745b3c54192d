"""Engines behind Ray, as the `Engine` that actors expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distill.interfaces import (
    EngineInfo,
    GenerateRequest,
    Sample,
    Score,
    ScoreRequest,
    WeightSource,
)


class EnginePool:
    """One `Engine` made of several identical ones: each request goes to the least busy.

    Pickles, and counts only the requests sent through this copy of it.
    """

    def __init__(self, handles: Sequence[Any]) -> None:
        """`handles` are Ray actor handles of plain engine classes."""
        assert handles, "an engine pool needs an engine"
        self._handles = list(handles)
        self._load = [0] * len(handles)

    def each(self) -> list[EnginePool]:
        """Every engine by itself, for what must not be left to one of them (the handshake)."""
        return [EnginePool([handle]) for handle in self._handles]

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        return await self._send("generate", request.num_samples, request)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return await self._send("score", len(requests), list(requests))

    async def decode_score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return await self._send("decode_score", len(requests), list(requests))

    async def load_weights(self, weights: WeightSource, version: int) -> float:
        return max([await handle.load_weights.remote(weights, version) for handle in self._handles])

    async def info(self) -> EngineInfo:
        return await self._handles[0].info.remote()

    async def abort(self) -> int:
        return sum([await handle.abort.remote() for handle in self._handles])

    async def _send(self, method: str, weight: int, argument: Any) -> Any:
        i = min(range(len(self._handles)), key=self._load.__getitem__)
        self._load[i] += weight
        try:
            return await getattr(self._handles[i], method).remote(argument)
        finally:
            self._load[i] -= weight
