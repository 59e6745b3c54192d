"""Weight updates of an SGLang server with requests in flight: versions never mix unnoticed.

    check -> pause -> begin -> load, bucket by bucket -> end -> continue
                               with the last: drop the prefix cache, new version

What becomes of samples under way is `on_weight_update`:

    continue   they go on: SGLang takes them off the batch and computes their context again under
               the new weights. Each token's version tells which weights sampled it.
    restart    they are thrown away and sampled again, whole, from the new weights.
    finish     the load waits until they have ended; new requests wait for the load.
    in_place   they go on with the cached context of the older weights, and nothing is computed
               again. Tokens sampled after the push are then of no single version: their log-probs
               are those that they were sampled with, and no model's that one could score them by.
               SGLang cannot drop its prefix cache while requests run, so requests that begin after
               a load look for prefixes under a key of their own: they are of their version alone.

Scoring that is under way ends first in each case: the requests of one call see the same weights.

Where engine and learner share a GPU, the engine sleeps while the learner computes:

    sleep   pause -> release weights, cache and captured graphs
    load    take the weights' memory back -> begin -> load -> end -> take the rest back -> continue

    wake    take all memory back, with the weights as they were -> continue -> prove them

Until then every request waits, here or in the server's queue: nothing is served by weights that are
no longer there, nor by memory that holds none yet. `in_place` cannot sleep: its samples would need
the cache. Engines that take turns wake with the weights that SGLang has kept in main memory
(actors/sglang/turns.py).

An adapter is loaded beside the older ones instead (actors/sglang/adapters.py): nothing is paused,
and each call goes on with the adapter that it began with.

How the weights come is a matter of where the learner is (actors/sglang/weight_loads.py). Where a
load fails after it has begun to write, the server may hold parts of two versions: nothing is
generated or scored with those; requests fail until a whole load succeeds, or the engine is started
again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from actors.sglang.adapters import Adapters, Traffic
from actors.sglang.admin import ServerAdmin
from actors.sglang.client import SglangClient
from actors.sglang.config import OnWeightUpdate
from actors.sglang.weight_loads import Shapes, WeightLoads
from distill.engine import ModelSource, Sample, WeightSource
from distill.errors import EngineError, EngineLost
from distill.types import StopReason
from distill.weights.adapter import AdapterTensors
from distill.weights.model_weights import BUCKET_BYTES

# SGLang's words for what becomes of samples under way.
_PAUSES: Mapping[OnWeightUpdate, str] = {
    "continue": "retract",
    "restart": "abort",
    "finish": "retract",
    "in_place": "in_place",
}
# What a sleeping server has released, in SGLang's words: taken back before a load, and after it.
_WEIGHTS, _REST = ("weights",), ("kv_cache", "cuda_graph")

_T = TypeVar("_T")


class Use(NamedTuple):
    """Weights that a call uses from its first request to its last.

    Attributes:
        fields: fields of its requests, which select the adapter, or keep cached prefixes apart.
        version: version of all its tokens; None: the server's answers tell.
    """

    fields: Mapping[str, str] = {}
    version: int | None = None


class WeightSession:
    """Serialises loads, and decides what happens to the requests under way meanwhile."""

    def __init__(
        self,
        client: SglangClient,
        on_weight_update: OnWeightUpdate,
        shapes: Callable[[], Shapes],
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """
        Args:
            shapes: names and shapes of the model's tensors; asked for at the first load.
            bucket_bytes: most that a rank takes from memory at once.
        """
        self._admin = ServerAdmin(client)
        self._on_weight_update: OnWeightUpdate = on_weight_update
        # Of the weights that were loaded last; None: those it started with.
        self.version: int | None = None
        self._loads = WeightLoads(
            self._admin,
            shapes,
            bucket_bytes=bucket_bytes,
            flushes=on_weight_update != "in_place",
        )
        self.lendings = self._loads.lendings
        self._adapters = Adapters(self._admin)
        self._loading = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self.waiters = Traffic()  # calls that wait for it to wake, or for a load
        self._generations, self._scorings = Traffic(), Traffic()
        self._count = 0  # of loads
        self._released: frozenset[str] = frozenset()
        self._still_since = 0.0  # generation stands still

    @contextmanager
    def _use(self, traffic: Traffic) -> Iterator[Use]:
        """Context of a call: the weights that it uses."""
        with traffic.call(), self._adapters.use() as fields:
            if fields:
                yield Use(fields, self._adapters.version)
            elif self._on_weight_update == "in_place":  # older weights have cached prefixes
                yield Use({"extra_key": f"load-{self._count}"})
            else:
                yield Use()

    @property
    def adapter_version(self) -> int | None:
        """Version of the adapter that serves new requests, which the server does not know."""
        return self._adapters.version

    @property
    def loading(self) -> bool:
        """True while new weights are on their way into the server."""
        return self._loading.locked()

    @property
    def asleep(self) -> bool:
        """True from `sleep` until a load has taken all memory back."""
        return bool(self._released)

    @property
    def idle_s(self) -> float:
        """Seconds since the last call ended; 0 while one is under way."""
        return min(self._scorings.idle_s, self._generations.idle_s)

    @property
    def sampling(self) -> bool:
        """True while samples are under way."""
        return self._generations.under_way

    async def generate(self, send: Callable[[Use], Awaitable[list[Sample]]]) -> list[Sample]:
        """Runs a generation; under `restart`, again if a load has cut it short."""
        while True:
            await self._admission()
            loads = self._count
            with self._use(self._generations) as use:
                samples = await send(use)
            self._check_whole()
            cut = any(sample.stop_reason is StopReason.ABORTED for sample in samples)
            if not (cut and self._on_weight_update == "restart" and self._count != loads):
                return samples

    async def score(self, send: Callable[[Use], Awaitable[_T]]) -> _T:
        """Runs a scoring, which no load interrupts."""
        await self._admission()
        with self._use(self._scorings) as use:
            return await send(use)

    async def _admission(self) -> None:
        with self.waiters.call():
            while not self._open.is_set():
                await self._open.wait()
        self._check_whole()

    @property
    def torn(self) -> str | None:
        """Reason why the server's weights are not those of a single version; None if they are."""
        return self._loads.torn

    def _check_whole(self) -> None:
        if self.torn is not None:
            raise EngineLost(self.torn)

    async def ranks(self) -> int:
        """The server's tensor parallelism."""
        return (await self._admin.facts()).ranks

    async def checksums(self) -> list[dict[str, str]]:
        """Digests of the parameters of each rank, by name, of weights that are whole.

        Raises:
            EngineError: the server has no weights checker, or its weights are torn.
        """
        async with self._loading:
            self._check_whole()
            answer = await self._admin.order(
                "/weights_checker", {"action": "checksum", "selector": "target"}
            )
        ranks = answer.get("ranks") if isinstance(answer, dict) else None
        if not ranks:
            raise EngineError(f"/weights_checker answered without checksums: {answer}")
        return [rank["checksums"] for rank in ranks]

    async def load(self, weights: WeightSource, version: int) -> float:
        """Returns once the server holds the weights, and uses no prefix that others have cached.

        Returns the seconds for which generation stood still: none for an adapter.

        Raises:
            EngineError: the weights do not fit (the server goes on with those it had), or did not
                arrive whole (the error says that the engine must be restarted).
        """
        if isinstance(weights, AdapterTensors):
            await self._adapters.load(weights, version)
            self.version = version
            return 0.0
        with self._loads.under_way(weights):
            async with self._loading:
                await self._loads.prepare(weights)
                self._open.clear()
                try:
                    await self._quiet()
                    return await self._paused(weights, version)
                finally:
                    self._open.set()

    async def sleep(self, *, whole: bool = False) -> None:
        """Has the server release its GPU memory; requests wait until it is awake again.

        Args:
            whole: samples under way end first, whatever becomes of them at a load.

        Raises:
            EngineError: it did not: it serves on, or, where it cannot be known, must be restarted.
        """
        async with self._loading:
            if self._released:
                return
            self._open.clear()
            try:
                await self._quiet(whole=whole)
                await self._pause()
                await self._release()
            except BaseException:
                self._open.set()  # who waits learns of it
                raise

    async def wake(self, prove: Callable[[], Awaitable[None]]) -> None:
        """Have the server take all memory back, with the weights that it has kept.

        Args:
            prove: checks the weights by requests of its own before any other is served.

        Raises:
            EngineError: the server failed, or its weights are not proven: it must be restarted.
        """
        async with self._loading:
            try:
                await self._take_back((*_WEIGHTS, *_REST))
                await self._admin.order("/continue_generation", {})
                await prove()
            except BaseException as error:
                self._loads.torn = str(error) or "its awakening was cut short"
                raise
            finally:
                self._open.set()

    async def _quiet(self, *, whole: bool = False) -> None:
        """Waits for the requests under way that no load interrupts."""
        await self._scorings.ended()
        if whole or self._on_weight_update == "finish":
            await self._generations.ended()
        self._count += 1

    async def _pause(self) -> None:
        """Stops generation, if it does not stand still already."""
        if self._released:
            return
        self._still_since = time.perf_counter()
        await self._admin.order("/pause_generation", {"mode": _PAUSES[self._on_weight_update]})

    async def _release(self) -> None:
        try:
            await self._admin.order("/release_memory_occupation", {"tags": [*_WEIGHTS, *_REST]})
        except BaseException:
            self._loads.torn = (
                "the server did not say whether it has released its weights: push whole ones, or "
                "restart the engine"
            )
            raise
        self._released = frozenset((*_WEIGHTS, *_REST))

    async def _take_back(self, tags: Sequence[str]) -> None:
        """Memory that was released; it holds nothing yet."""
        if not self._released.isdisjoint(tags):
            await self._admin.order("/resume_memory_occupation", {"tags": list(tags)})
            self._released -= frozenset(tags)

    async def _paused(self, weights: ModelSource, version: int) -> float:
        await self._pause()
        slept = self.asleep
        try:
            await self._take_back(_WEIGHTS)
            await self._loads.write(weights, version)
            await self._take_back(_REST)
            self.version, self._loads.torn = version, None
        except BaseException:
            if slept and self._loads.torn is None:
                self._loads.torn = (
                    "the server has released its weights, and no others have arrived whole: push "
                    "again, or restart the engine (a resumed run starts it anew)"
                )
            raise
        finally:
            try:
                if self._loads.torn is not None:
                    await self._admin.order("/abort_request", {"rid": "", "abort_all": True})
            finally:
                if not self._released:
                    await self._admin.order("/continue_generation", {})
        return time.perf_counter() - self._still_since
