"""An engine of a frozen model whose server takes turns on its GPUs with those of other models.

    start   wait for the turn -> start the server -> first answers to fixed rows (canaries)
    sleep   another waits for the turn -> calls under way end -> release all memory -> give the turn
    wake    a call waits -> wait for the turn -> take memory and weights back -> prove the weights

SGLang copies the weights to main memory when they leave the GPUs, and back. A server that woke with
other weights, or with none, would score as if nothing had happened: so the same rows are scored
after every awakening, before any call that has waited. Answers that differ are the engine's end.

A change of turns costs seconds, so an engine that has the turn keeps it for as long as a change
takes after its last call, and under load for several times as long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from actors.sglang.hosted import HostedSglangEngine
from actors.sglang.server import SglangServer
from actors.sglang.weights import Use
from distill.errors import EngineLost
from distill.handshake.canary import COMPANY, CanaryRows, FirstAnswers

logger = logging.getLogger(__name__)

# T of the canaries; weights are proven at any.
_TEMPERATURE = 0.7
# How often a server that has the turn looks whether others wait for it, seconds.
_LOOK_S = 0.1
# Longest turn under load while others wait, as a multiple of what a change of turns takes.
_LONGEST = 10.0
# A pool of engines sends a request to one that sleeps only where others have so much more to do.
_ASLEEP_QUEUE = 64


class TurnTakingEngine(HostedSglangEngine):
    """A `HostedSglangEngine` that is awake by turns; calls wait while it sleeps.

    Args:
        turn: file of the turn, the same for all engines that share the GPUs.
        settings: those of a `HostedSglangEngine`.
    """

    def __init__(self, *, turn: str, **settings: Any) -> None:
        super().__init__(turn=turn, **settings)
        self._canary: FirstAnswers | None = None
        self._turns: asyncio.Task[None] | None = None
        self._change_s = 0.0  # what falling asleep and waking took last

    async def health(self) -> int:
        """See `Engine.health`.

        Raises:
            EngineLost: its server failed to sleep or to wake, or woke with other weights.
        """
        if self._turns is not None and self._turns.done():
            self._turns.result()
        return await super().health()

    async def queue_length(self) -> int:
        """See `Engine.queue_length`; of an engine that sleeps, as if it were longer."""
        return await super().queue_length() + _ASLEEP_QUEUE * self._session().asleep

    async def close(self) -> None:
        """See `HostedSglangEngine.close`."""
        if self._turns is not None:
            self._turns.cancel()
        await super().close()

    async def _start(self, server: SglangServer) -> None:
        await super()._start(server)
        info = await self._info()
        rows = CanaryRows.of(info, _TEMPERATURE)
        answers = [
            rows.answer(await self._score(rows.with_company(number), Use())) for number in COMPANY
        ]
        self._canary = FirstAnswers(info, rows, answers)
        if why := self._canary.nondeterministic:
            raise EngineLost(f"{self._model} {why}")
        self._turns = asyncio.create_task(self._take_turns(server))

    async def _take_turns(self, server: SglangServer) -> None:
        assert server.turn is not None
        turn, session = server.turn, self._session()
        while True:
            await self._until_wanted(server)
            began = time.monotonic()
            await session.sleep()
            turn.give()
            slept_s = time.monotonic() - began
            await session.held()
            await turn.taken()
            began = time.monotonic()
            await session.wake(self._prove)
            woke_s = time.monotonic() - began
            self._change_s = slept_s + woke_s
            logger.info("%s woke in %.1f s, %.1f s after its turn", self._model, woke_s, slept_s)

    async def _until_wanted(self, server: SglangServer) -> None:
        """Wait until another server waits for the turn, and this one has had its own."""
        assert server.turn is not None
        began = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            idle = self._session().idle_s >= self._change_s
            over = time.monotonic() - began >= _LONGEST * self._change_s
            if (idle or over) and server.turn.wanted:
                return

    async def _prove(self) -> None:
        """Raises EngineLost if the model answers otherwise than before it slept."""
        assert self._canary is not None
        rows = self._canary.rows
        verdict = self._canary.judge(rows.answer(await self._score(rows.requests, Use())))
        if not verdict.good:
            raise EngineLost(
                f"{self._model} woke up other than it fell asleep, by its answers to the same "
                f"rows: {verdict.told()}"
            )
