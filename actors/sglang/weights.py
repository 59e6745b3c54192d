"""Weight updates of an SGLang server with requests in flight: versions never mix unnoticed.

    check -> pause -> begin -> load, bucket by bucket -> end -> continue
                               with the last bucket: flush the prefix cache, set the new version

`on_weight_update` determines what happens to samples in progress:

    continue   They continue: SGLang takes them off the batch and recomputes their context with the
               new weights. Each token's version tells which weights sampled it.
    restart    They are discarded and sampled again from the start with the new weights.
    finish     The load waits until they have ended; new requests wait for the load.
    in_place   They continue with the cached context of the older weights; nothing is recomputed.
               Tokens sampled after the push then belong to no single version: the recorded
               log-probs are those of the sampling, and no model can reproduce them. SGLang cannot
               flush its prefix cache while requests run, so requests that begin after a load use
               a separate cache key (`extra_key`), and all their tokens have one version.

In each case the load waits until scoring in progress has ended, so that all requests of one scoring
call use the same weights.

If engine and learner share a GPU, the engine sleeps while the learner computes:

    sleep   pause -> release weights, cache and captured graphs
    load    resume the weights' memory -> begin -> load -> end -> resume the rest -> continue

    wake    resume all memory, with the weights as before -> continue -> verify the weights

Until the load or wake has ended every request waits, in this process or in the server's queue, so
no request is served with released or uninitialised memory. `in_place` cannot sleep, because its
samples need the cache. Engines that take turns wake with the weights that SGLang has kept in main
memory (actors/sglang/turns.py).

Adapters are loaded in addition to the older ones (actors/sglang/adapters.py): nothing is paused,
and each call keeps the adapter that it began with.

If a load (actors/sglang/weight_loads.py) fails after it has begun to write, the server may hold
parts of two versions (torn weights). Requests then fail until a complete load succeeds or the
engine is restarted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from actors.sglang.adapters import Adapters, CallCounter
from actors.sglang.client import SglangClient
from actors.sglang.config import OnWeightUpdate
from actors.sglang.weight_loads import Shapes, WeightLoads
from distill.engine import ModelSource, Sample, WeightSource
from distill.errors import EngineError, EngineLost
from distill.types import StopReason
from distill.weights.adapter import AdapterTensors
from distill.weights.model_weights import BUCKET_BYTES

# SGLang's pause mode for each setting of on_weight_update.
_PAUSES: Mapping[OnWeightUpdate, str] = {
    "continue": "retract",
    "restart": "abort",
    "finish": "retract",
    "in_place": "in_place",
}
# SGLang's tags of released memory: resumed before a load, and after it.
_WEIGHTS, _REST = ("weights",), ("kv_cache", "cuda_graph")

_T = TypeVar("_T")


class Use(NamedTuple):
    """Weights that a call uses from its first request to its last.

    Attributes:
        fields: request fields that select the adapter or a separate prefix cache.
        version: version of all tokens of the call; None: the server's answers contain it.
    """

    fields: Mapping[str, str] = {}
    version: int | None = None


class WeightSession:
    """Weight loads of one server: serialises them, and coordinates them with the requests.

    Attributes:
        version: weight version of the last load; None: the weights that the server started with.
        waiters: calls that wait until the server is awake, or until a load has ended.
    """

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
            shapes: returns names and shapes of the model's tensors; called at the first load.
            bucket_bytes: maximum bytes that a rank loads from memory in one request.
        """
        self._client = client
        self._on_weight_update: OnWeightUpdate = on_weight_update
        self.version: int | None = None
        self._loads = WeightLoads(
            self._client,
            shapes,
            bucket_bytes=bucket_bytes,
            flushes=on_weight_update != "in_place",
        )
        self.lendings = self._loads.lendings
        self._adapters = Adapters(self._client)
        self._loading = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self.waiters = CallCounter()
        self._generations, self._scorings = CallCounter(), CallCounter()
        self._count = 0  # number of loads and sleeps
        self._released: frozenset[str] = frozenset()
        self._still_since = 0.0  # time.perf_counter() of the last pause

    @contextmanager
    def _use(self, traffic: CallCounter) -> Iterator[Use]:
        """Context manager for a call: counts the call and yields the weights that it uses."""
        with traffic.call(), self._adapters.use() as fields:
            if fields:
                yield Use(fields, self._adapters.version)
            elif self._on_weight_update == "in_place":  # the cache holds prefixes of older weights
                yield Use({"extra_key": f"load-{self._count}"})
            else:
                yield Use()

    @property
    def adapter_version(self) -> int | None:
        """Version of the adapter that new requests use, which the server does not report."""
        return self._adapters.version

    @property
    def loading(self) -> bool:
        """True during a load, sleep, wake or checksum."""
        return self._loading.locked()

    @property
    def asleep(self) -> bool:
        """True from `sleep` until a load or `wake` has resumed all memory."""
        return bool(self._released)

    @property
    def idle_s(self) -> float:
        """Seconds since the last call ended; 0 while a call is in progress."""
        return min(self._scorings.idle_s, self._generations.idle_s)

    @property
    def sampling(self) -> bool:
        return self._generations.in_progress

    async def generate(self, send: Callable[[Use], Awaitable[list[Sample]]]) -> list[Sample]:
        """Run a generation; with `restart`, repeat it if a load aborted it."""
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
        """Run a scoring, which no load interrupts."""
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

    async def checksums(self) -> list[dict[str, str]]:
        """Digests of each rank's parameters, by name.

        Raises:
            EngineError: the server has no weights checker, or its weights are torn.
        """
        async with self._loading:
            self._check_whole()
            answer = await self._client.order(
                "/weights_checker", {"action": "checksum", "selector": "target"}
            )
        ranks = answer.get("ranks") if isinstance(answer, dict) else None
        if not ranks:
            raise EngineError(f"/weights_checker answered without checksums: {answer}")
        return [rank["checksums"] for rank in ranks]

    async def load(self, weights: WeightSource, version: int) -> float:
        """Load weights; afterwards no new request uses prefixes cached from other weights.

        Returns:
            Seconds for which generation was paused; 0 for an adapter.

        Raises:
            EngineError: the weights do not match the model (the server keeps its current weights),
                or did not arrive completely (the error says that the engine must be restarted).
        """
        if isinstance(weights, AdapterTensors):
            await self._adapters.load(weights, version)
            self.version = version
            return 0.0
        with self._loads.in_progress(weights):
            async with self._loading:
                await self._loads.prepare(weights)
                self._open.clear()
                try:
                    await self._quiet()
                    return await self._paused(weights, version)
                finally:
                    self._open.set()

    async def sleep(self, *, whole: bool = False) -> None:
        """Make the server release its GPU memory; requests wait until the server is awake again.

        With `whole`, wait until samples in progress have ended, whatever `on_weight_update` is.

        Raises:
            EngineError: the server did not release its memory and continues to serve; or it is
                unknown whether it did, and the server must be restarted.
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
                self._open.set()  # waiting requests continue, or fail if the weights are torn
                raise

    async def wake(self, prove: Callable[[], Awaitable[None]]) -> None:
        """Make the server resume all memory, with the weights that it kept in main memory.

        Args:
            prove: verifies the weights with requests of its own, before any waiting request is
                served.

        Raises:
            EngineError: the server failed, or `prove` raised; the server must be restarted.
        """
        async with self._loading:
            try:
                await self._take_back((*_WEIGHTS, *_REST))
                await self._client.order("/continue_generation", {})
                await prove()
            except BaseException as error:
                self._loads.torn = str(error) or "the server's wake-up was interrupted"
                raise
            finally:
                self._open.set()

    async def _quiet(self, *, whole: bool = False) -> None:
        """Wait for the requests in progress that a load must not interrupt."""
        await self._scorings.wait_until_idle()
        if whole or self._on_weight_update == "finish":
            await self._generations.wait_until_idle()
        self._count += 1

    async def _pause(self) -> None:
        """Pause generation, unless the server sleeps and is already paused."""
        if self._released:
            return
        self._still_since = time.perf_counter()
        await self._client.order("/pause_generation", {"mode": _PAUSES[self._on_weight_update]})

    async def _release(self) -> None:
        try:
            await self._client.order("/release_memory_occupation", {"tags": [*_WEIGHTS, *_REST]})
        except BaseException:
            self._loads.torn = (
                "it is unknown whether the server has released its weights: push all weights, or "
                "restart the engine"
            )
            raise
        self._released = frozenset((*_WEIGHTS, *_REST))

    async def _take_back(self, tags: Sequence[str]) -> None:
        """Resume released memory. It is uninitialised, except weights that SGLang has backed up."""
        if not self._released.isdisjoint(tags):
            await self._client.order("/resume_memory_occupation", {"tags": list(tags)})
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
                    "the server has released its weights, and no complete weights have arrived: "
                    "push again, or restart the engine (a resumed run restarts it)"
                )
            raise
        finally:
            try:
                if self._loads.torn is not None:
                    await self._client.order("/abort_request", {"rid": "", "abort_all": True})
            finally:
                if not self._released:
                    await self._client.order("/continue_generation", {})
        return time.perf_counter() - self._still_since
