"""Weight updates of an SGLang server with requests in flight: versions never mix unnoticed.

    check -> pause -> begin -> load, bucket by bucket -> end -> continue
                               with the last: drop the prefix cache, new version

What becomes of samples under way is `in_flight`:

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

Between the two every request waits, here or in the server's queue: nothing is served by weights
that are no longer there, nor by memory that holds none yet. `in_place` cannot sleep: its samples
would need the cache.

How the weights come is a matter of where the learner is:

    SharedTensors         in memory that this machine's processes share: this process opens it, and
                          the server reads it as the learner wrote it
                          (actors/sglang/plugin/weight_loader.py)
    PackedTensors         in this process's memory: copied into such a block first
    WeightDelta           what changed since the last ones: patched into a block that keeps those
    CheckpointDirectory   files that the server reads by itself
    CollectiveBroadcast   a torch.distributed group that the server's ranks join, once
                          (actors/sglang/weight_group.py)

Everything that can be known to be wrong is refused before the server is touched. Where a load
fails later, the server may hold parts of two versions: nothing is generated or scored with those;
requests fail until a whole load succeeds, or the engine is started again.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias, TypeVar

from actors.sglang.client import SglangClient
from actors.sglang.flags import InFlight
from actors.sglang.plugin.weight_loader import LOADER, serialized_order
from actors.sglang.weight_checks import ServerFacts, Shapes, check_shapes
from actors.sglang.weight_group import NOT_RECEIVED, ServerGroup
from distill.engine import CheckpointDirectory, CollectiveBroadcast, Sample, WeightSource
from distill.errors import CheckpointError, DataError, EngineError, EngineLost
from distill.models.checkpoint_names import pushed_shapes
from distill.models.loading import weight_files
from distill.pace import loading_s
from distill.types import StopReason
from distill.weights.delta import ReceivedWeights, WeightDelta
from distill.weights.model_weights import BUCKET_BYTES, HeldWeights
from distill.weights.shared_memory import SharedBlock, SharedTensors
from distill.weights.tensors import PackedTensors, TensorLayout, first_non_finite

# SGLang's words for what becomes of samples under way.
_PAUSES: Mapping[InFlight, str] = {
    "continue": "retract",
    "restart": "abort",
    "finish": "retract",
    "in_place": "in_place",
}
# What a sleeping server has released, in SGLang's words: taken back before a load, and after it.
_WEIGHTS, _REST = ("weights",), ("kv_cache", "cuda_graph")

# What a load is of, once a change of weights has become those.
_Whole: TypeAlias = PackedTensors | SharedTensors | CheckpointDirectory | CollectiveBroadcast

_T = TypeVar("_T")


class _Traffic:
    """Calls under way."""

    def __init__(self) -> None:
        self._calls = 0
        self._ended = asyncio.Event()
        self._ended.set()

    @contextmanager
    def call(self) -> Iterator[None]:
        self._calls += 1
        self._ended.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if self._calls == 0:
                self._ended.set()

    async def ended(self) -> None:
        await self._ended.wait()


class WeightSession:
    """Serialises loads, and decides what happens to the requests under way meanwhile."""

    def __init__(
        self,
        client: SglangClient,
        in_flight: InFlight,
        shapes: Callable[[], Shapes],
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """
        Args:
            shapes: names and shapes of the model's tensors; asked for at the first load.
            bucket_bytes: most that a rank takes from memory at once.
        """
        self._client = client
        self._bucket_bytes = bucket_bytes
        self._shapes = cache(shapes)
        self._in_flight: InFlight = in_flight
        self._block = SharedBlock()
        self._received = ReceivedWeights()
        self._server: ServerFacts | None = None
        self._group = ServerGroup(self._order)
        # Of the weights that were loaded last; None: those it started with.
        self.version: int | None = None
        # Why the server's weights are of no single version; None while they are.
        self._torn: str | None = None
        self._loading = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._generations, self._scorings = _Traffic(), _Traffic()
        self._loads = 0
        self._released: frozenset[str] = frozenset()
        self._still_since = 0.0  # generation stands still

    @property
    def cache_namespace(self) -> dict[str, str]:
        """Fields of a request that keep it from prefixes which older weights have cached."""
        return {"extra_key": f"load-{self._loads}"} if self._in_flight == "in_place" else {}

    @property
    def _flushes(self) -> bool:
        """A load drops every cached prefix."""
        return self._in_flight != "in_place"

    @property
    def loading(self) -> bool:
        """True while new weights are on their way into the server."""
        return self._loading.locked()

    @property
    def asleep(self) -> bool:
        """True from `sleep` until a load has taken all memory back."""
        return bool(self._released)

    async def generate(self, send: Callable[[], Awaitable[list[Sample]]]) -> list[Sample]:
        """Runs a generation; under `restart`, again if a load has cut it short."""
        while True:
            await self._admission()
            loads = self._loads
            with self._generations.call():
                samples = await send()
            self._check_whole()
            cut = any(sample.stop_reason is StopReason.ABORTED for sample in samples)
            if not (cut and self._in_flight == "restart" and self._loads != loads):
                return samples

    async def score(self, send: Callable[[], Awaitable[_T]]) -> _T:
        """Runs a scoring, which no load interrupts."""
        await self._admission()
        with self._scorings.call():
            return await send()

    async def _admission(self) -> None:
        while not self._open.is_set():
            await self._open.wait()
        self._check_whole()

    def _check_whole(self) -> None:
        if self._torn is not None:
            raise EngineLost(self._torn)

    async def ranks(self, layout: Sequence[TensorLayout]) -> int:
        """The server's tensor parallelism. Raises EngineError if these are not its tensors."""
        check_shapes({tensor.name: tensor.shape for tensor in layout}, self._shapes())
        self._group.expect(layout)
        return (await self._facts()).ranks

    async def checksums(self) -> list[dict[str, str]]:
        """Digests of the parameters of each rank, by name, of weights that are whole.

        Raises:
            EngineError: the server has no weights checker, or its weights are torn.
        """
        async with self._loading:
            self._check_whole()
            answer = await self._order(
                "/weights_checker", {"action": "checksum", "selector": "target"}
            )
        ranks = answer.get("ranks") if isinstance(answer, dict) else None
        if not ranks:
            raise EngineError(f"/weights_checker answered without checksums: {answer}")
        return [rank["checksums"] for rank in ranks]

    async def load(self, weights: WeightSource, version: int) -> float:
        """Returns once the server holds the weights, and uses no prefix that others have cached.

        Returns the seconds for which generation stood still.

        Raises:
            EngineError: the weights do not fit (the server goes on with those it had), or did not
                arrive whole (the error says that the engine must be restarted).
        """
        async with self._loading:
            if isinstance(weights, WeightDelta):
                weights = await asyncio.to_thread(self._received.take, weights)
            await self._check(weights)
            if isinstance(weights, CollectiveBroadcast):
                await self._group.join(weights)
            self._open.clear()
            try:
                await self._quiet()
                return await self._paused(weights, version)
            finally:
                self._open.set()

    async def sleep(self) -> None:
        """Has the server release its GPU memory; requests wait until weights have been loaded.

        Raises:
            EngineError: it did not: it serves on, or, where it cannot be known, must be restarted.
        """
        async with self._loading:
            if self._released:
                return
            self._open.clear()
            try:
                await self._quiet()
                await self._pause()
                await self._release()
            except BaseException:
                self._open.set()  # who waits learns of it
                raise

    async def _quiet(self) -> None:
        """Waits for the requests under way that no load interrupts."""
        await self._scorings.ended()
        if self._in_flight == "finish":
            await self._generations.ended()
        self._loads += 1

    async def _pause(self) -> None:
        """Stops generation, if it does not stand still already."""
        if self._released:
            return
        self._still_since = time.perf_counter()
        await self._order("/pause_generation", {"mode": _PAUSES[self._in_flight]})

    async def _release(self) -> None:
        try:
            await self._order("/release_memory_occupation", {"tags": [*_WEIGHTS, *_REST]})
        except BaseException:
            self._torn = (
                "the server did not say whether it has released its weights: push whole ones, or "
                "restart the engine"
            )
            raise
        self._released = frozenset((*_WEIGHTS, *_REST))

    async def _take_back(self, tags: Sequence[str]) -> None:
        """Memory that was released; it holds nothing yet."""
        if not self._released.isdisjoint(tags):
            await self._order("/resume_memory_occupation", {"tags": list(tags)})
            self._released -= frozenset(tags)

    async def _check(self, weights: _Whole) -> None:
        """A server would load what it knows, keep the rest, and die of the first NaN it samples."""
        if isinstance(weights, CollectiveBroadcast):
            self._group.check(weights)
        elif isinstance(weights, CheckpointDirectory):
            try:
                found = await asyncio.to_thread(pushed_shapes, weights.path)
            except CheckpointError as error:
                raise EngineError(f"{error}; the engine goes on with the weights it had") from error
            check_shapes(found, self._shapes())
            if (await self._facts()).has_other_draft:  # SGLang loads the directory into both
                raise EngineError(
                    "weights=disk would load the policy into its draft model as well; use "
                    "weights=auto"
                )
        elif isinstance(weights, SharedTensors):  # its writer has looked at the values
            check_shapes(weights.shapes, self._shapes())
        else:
            tensors = dict(weights.unpack())
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            check_shapes(shapes, self._shapes())
            bad = await asyncio.to_thread(first_non_finite, tensors)
            if bad is not None:
                raise EngineError(f"{bad!r} is not finite in the bundle; the old weights stay")

    async def _paused(self, weights: _Whole, version: int) -> float:
        if isinstance(weights, PackedTensors):  # this copy needs no pause
            await asyncio.to_thread(self._block.write, HeldWeights(dict(weights.unpack())))
        await self._pause()
        slept = self.asleep
        try:
            await self._take_back(_WEIGHTS)
            if isinstance(weights, CheckpointDirectory):
                await self._from_disk(weights, version)
            elif isinstance(weights, CollectiveBroadcast):
                await self._from_collective(weights, version)
            else:
                shared = weights if isinstance(weights, SharedTensors) else self._block.share()
                # A server that could not open it would die; this process does not outlive it.
                with shared.held() as held:
                    await self._from_memory(held, version)
            await self._take_back(_REST)
            self.version, self._torn = version, None
        except BaseException:
            if slept and self._torn is None:
                self._torn = (
                    "the server has released its weights, and no others have arrived whole: push "
                    "again, or restart the engine (a resumed run starts it anew)"
                )
            raise
        finally:
            try:
                if self._torn is not None:
                    await self._order("/abort_request", {"rid": "", "abort_all": True})
            finally:
                if not self._released:
                    await self._order("/continue_generation", {})
        return time.perf_counter() - self._still_since

    async def _from_disk(self, weights: CheckpointDirectory, version: int) -> None:
        body = {
            "model_path": weights.path,
            "weight_version": str(version),
            "flush_cache": self._flushes,
        }
        with self._writing(version):
            nbytes = sum(file.stat().st_size for file in weight_files(weights.path))
            await self._order("/update_weights_from_disk", body, allowance_s=loading_s(nbytes))

    async def _from_memory(self, shared: SharedTensors, version: int) -> None:
        facts = await self._facts()
        portions = shared.portions(self._bucket_bytes)
        await self._order("/begin_weight_update", facts.selector)
        with self._writing(version):
            try:
                for portion in portions:
                    order = base64.b64encode(serialized_order(portion)).decode()
                    # Each tensor-parallel rank opens the memory for itself, and takes its own part.
                    body = {
                        "serialized_named_tensors": [order] * facts.ranks,
                        "load_format": LOADER,
                        **facts.selector,
                        **self._ending(version, last=portion is portions[-1]),
                    }
                    await self._order("/update_weights_from_tensor", body)
            finally:
                await self._order("/end_weight_update", {})

    def _ending(self, version: int, *, last: bool) -> dict[str, Any]:
        """Fields of a bucket's order: with the last one the caches are dropped, once."""
        if not last:
            return {"flush_cache": False}
        return {"flush_cache": self._flushes, "weight_version": str(version)}

    async def _from_collective(self, weights: CollectiveBroadcast, version: int) -> None:
        selector = (await self._facts()).selector
        await self._order("/begin_weight_update", selector)
        with self._writing(version) as written:
            try:
                await asyncio.to_thread(self._group.announce, weights, version)
                for bucket, last in self._group.orders(weights):
                    body = bucket | selector | self._ending(version, last=last)
                    await self._order("/update_weights_from_distributed", body)
                    written.append(len(written))
            except EngineError:
                await self._group.leave()
                raise
            finally:
                await self._order("/end_weight_update", {})

    @contextmanager
    def _writing(self, version: int) -> Iterator[list[int]]:
        """Context of a write: if it fails, the server's weights are torn.

        Yields a list for the buckets that were written: a broadcast that broke off in the first one
        has written nothing.
        """
        written: list[int] = []
        try:
            yield written
        except BaseException as error:  # a cancelled load tears the weights, too
            if isinstance(error, EngineError) and NOT_RECEIVED in str(error) and not written:
                raise EngineError(f"{error}; the engine goes on with the weights it had") from error
            self._torn = (
                f"the load of weights version {version} broke off, and the server may hold parts "
                "of two versions: push whole weights, or restart the engine (a resumed run starts "
                "it anew)"
            )
            if isinstance(error, EngineError):
                raise EngineError(f"{error}; {self._torn}") from error
            raise

    async def _order(self, path: str, body: Mapping[str, Any], *, allowance_s: float = 0) -> Any:
        """Answer to an administrative request. Raises EngineError if the server refuses it."""
        try:
            answer = await self._client.admin(path, body, allowance_s=allowance_s)
        except DataError as error:  # status 400: a refusal with its reason
            raise EngineError(str(error)) from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{path} was refused: {answer.get('message', answer)}")
        return answer

    async def _facts(self) -> ServerFacts:
        if self._server is None:
            self._server = ServerFacts.of(await self._client.get("/server_info"))
        return self._server
