"""Engine whose server takes turns on its GPUs with the servers of other engines.

    start   wait for the turn -> start the server
    sleep   another server waits for the turn -> score canary rows, if the weights are new
            -> calls in progress end -> release all memory -> give the turn
    wake    a call or new weights wait -> wait for the turn -> resume memory and weights
            -> verify the weights

SGLang copies the weights to main memory when a server sleeps, and back when it wakes. A server that
woke with other weights, or with none, would answer without an error. So the canary rows are scored
again after every wake, before any waiting call is served. If the answers differ, the engine fails.

The number and the duration of turn changes are metrics (`turns`).

A turn change takes seconds. So an engine keeps the turn until it has been idle for as long as a
change takes. Without such a pause it keeps the turn up to a limit, which is larger while samples
are in progress: a step has many samples, and until the last one has ended they keep the batch full.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from actors.sglang.config import SglangConfig
from actors.sglang.hosted import HostedSglangEngine
from actors.sglang.server import SglangServer
from actors.sglang.weights import Use
from distill.engine import WeightSource
from distill.errors import EngineLost
from distill.gpu_turn import GpuTurn
from distill.handshake.canary import FILLER_ROWS, CanaryAnswers, CanaryRows
from distill.sampling import UNSCALED

logger = logging.getLogger(__name__)

# Seconds between checks whether another server waits for the turn.
_LOOK_S = 0.1
# Longest turn without a pause while others wait, as a multiple of the duration of a turn change:
# for scoring, and while samples are in progress.
_LONGEST, _LONGEST_SAMPLING = 10.0, 100.0
# Added to the queue length of a sleeping engine: a pool sends it a request only if the queues of
# the other engines are longer by this number.
_ASLEEP_QUEUE = 64


class TurnTakingEngine(HostedSglangEngine):
    """A `HostedSglangEngine` that is awake by turns; calls and new weights wait while it sleeps.

    All engines that share the GPUs have the same file as their turn (`config.turn`).
    """

    def __init__(self, config: SglangConfig, *, server: SglangServer | None = None) -> None:
        super().__init__(config, server=server)
        self._canary: tuple[int | None, CanaryAnswers] | None = None  # weight version, its answers
        self._turns: asyncio.Task[None] | None = None
        self._sleeping = asyncio.Lock()  # held while the server sleeps, sleep and wake included
        self._change_s = 0.0  # duration of the last sleep and wake, without the time between them
        self._spent: defaultdict[str, float] = defaultdict(float)  # since the last call of `turns`

    async def health(self) -> int:
        """See `Engine.health`.

        Raises:
            EngineLost: the server failed to sleep or to wake, or woke with other weights.
        """
        self._require_turns()
        return await super().health()

    async def queue_length(self) -> int:
        """See `Engine.queue_length`. A sleeping engine reports a longer queue."""
        return await super().queue_length() + _ASLEEP_QUEUE * self._session().asleep

    async def turns(self) -> dict[str, float]:
        """Metrics `turns/*` of this engine since the last call of this method."""
        spent = {"turns/changes": 0.0, "turns/seconds": 0.0, "turns/proof": 0.0} | self._spent
        self._spent.clear()
        return spent

    async def load_weights(self, weights: WeightSource, version: int) -> float:
        """See `Engine.load_weights`."""
        async with self._awake():
            return await super().load_weights(weights, version)

    async def weight_checksums(self) -> list[dict[str, str]]:
        """See `EmbeddedEngine.weight_checksums`."""
        async with self._awake():
            return await super().weight_checksums()

    async def close(self) -> None:
        """See `HostedSglangEngine.close`."""
        if self._turns is not None:
            self._turns.cancel()
        await super().close()

    async def _start(self) -> None:
        await super()._start()
        await self._info()  # caches properties of the server while it is awake
        assert self.server.turn is not None
        self._turns = asyncio.create_task(self._share_gpus(self.server.turn))

    def _require_turns(self) -> None:
        """Raise the exception that ended the task that takes turns, if it has ended."""
        if self._turns is not None and self._turns.done():
            self._turns.result()

    @asynccontextmanager
    async def _awake(self) -> AsyncIterator[None]:
        """Context manager that keeps the server awake."""
        await self._ready()
        with self._session().waiters.call():
            await self._sleeping.acquire()
        try:
            self._require_turns()
            yield
        finally:
            self._sleeping.release()

    async def _share_gpus(self, turn: GpuTurn) -> None:
        session = self._session()
        while True:
            await self._until_wanted(turn)
            async with self._sleeping:
                if self._canary is None or self._canary[0] != session.version:
                    with self._measuring("turns/seconds"), self._measuring("turns/proof"):
                        self._canary = session.version, await self._answers()
                began = time.monotonic()
                with self._measuring("turns/seconds"):
                    await session.sleep(whole=True)
                turn.release()
                slept_s = time.monotonic() - began
                await session.waiters.wait_for_call()
                await turn.acquire_async()
                began = time.monotonic()
                with self._measuring("turns/seconds"):
                    await session.wake(self._prove)
                woke_s = time.monotonic() - began
                self._spent["turns/changes"] += 1
            self._change_s = slept_s + woke_s
            logger.info("%s fell asleep in %.1f s and woke in %.1f s", self._model, slept_s, woke_s)

    @contextmanager
    def _measuring(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._spent[name] += time.monotonic() - began

    async def _until_wanted(self, turn: GpuTurn) -> None:
        """Wait until another server waits for the turn and this server may give it up."""
        session, began = self._session(), time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            longest = (_LONGEST_SAMPLING if session.sampling else _LONGEST) * self._change_s
            over = time.monotonic() - began >= longest
            if (over or session.idle_s >= self._change_s) and turn.wanted:
                return

    async def _answers(self) -> CanaryAnswers:
        """Score the canary rows with the current weights, before the server sleeps."""
        info = await self._info()
        rows = CanaryRows.of(info, UNSCALED)
        answers = [
            rows.answer(await self._score(rows.with_filler(number), Use()))
            for number in FILLER_ROWS
        ]
        first = CanaryAnswers(info, rows, answers)
        if why := first.nondeterministic:
            raise EngineLost(f"{self._model} {why}")
        return first

    async def _prove(self) -> None:
        """Raise EngineLost if the answers to the canary rows differ from those before the sleep."""
        assert self._canary is not None
        _, first = self._canary
        with self._measuring("turns/proof"):
            scores = await self._score(first.rows.requests, Use())
        if why := first.judge(first.rows.answer(scores)).why:
            raise EngineLost(
                f"{self._model} scores the same rows differently after its sleep: {why}"
            )
