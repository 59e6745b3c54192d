"""Ways of weights into an SGLang server that stands still; each writes all of them, or says so.

    SharedTensors         in memory that this machine's processes share: this process opens it, and
                          the server reads it as the learner wrote it
                          (actors/sglang/plugin/weight_loader.py)
    PackedTensors         in this process's memory: copied into such a block first
    WeightDelta           what changed since the last ones: patched into a block that keeps those
    CheckpointDirectory   files that the server reads by itself
    CollectiveBroadcast   a torch.distributed group that the server's ranks join, once
                          (actors/sglang/weight_group.py)
    LentWeights           buckets in the learner's memory, or on the GPU that both share, that each
                          rank opens by a handle (actors/sglang/lent_buckets.py, weight_payloads.py)

Everything that can be known to be wrong is refused before the server is touched. Where a load
fails later, the server may hold parts of two versions (`torn`).
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, TypeAlias

from actors.sglang.flags import LOADER
from actors.sglang.lent_buckets import Lendings
from actors.sglang.plugin.weight_loader import serialized_order
from actors.sglang.weight_checks import ServerFacts, Shapes, check_shapes
from actors.sglang.weight_group import NOT_RECEIVED, Order, ServerGroup
from actors.sglang.weight_payloads import FORMAT, rank_payload
from distill.engine import CheckpointDirectory, CollectiveBroadcast, LentWeights, WeightSource
from distill.errors import CheckpointError, EngineError
from distill.models.checkpoint_names import pushed_shapes
from distill.models.loading import weight_files
from distill.pace import loading_s
from distill.weights.delta import ReceivedWeights, WeightDelta
from distill.weights.lending import LentBucket
from distill.weights.model_weights import HeldWeights, plan_buckets
from distill.weights.shared_memory import SharedBlock, SharedTensors
from distill.weights.tensors import PackedTensors, TensorLayout, first_non_finite, layout_digest

# What a load is of, once a change of weights has become those.
Whole: TypeAlias = (
    PackedTensors | SharedTensors | CheckpointDirectory | CollectiveBroadcast | LentWeights
)


class WeightLoads:
    """Loads one after the other.

    Attributes:
        torn: why the server's weights are of no single version; None while they are.
    """

    def __init__(
        self,
        order: Order,
        facts: Callable[[], Awaitable[ServerFacts]],
        shapes: Callable[[], Shapes],
        *,
        bucket_bytes: int,
        flushes: bool,
        handle_key: bytes,
    ) -> None:
        """
        Args:
            order: sends the server an administrative request.
            shapes: names and shapes of the model's tensors; asked for at the first load.
            bucket_bytes: most that a rank takes from memory at once.
            flushes: a load drops every cached prefix.
            handle_key: what the server's processes ask with for memory that is lent.
        """
        self._order, self._facts, self._shapes = order, facts, cache(shapes)
        self._bucket_bytes, self._flushes, self._handle_key = bucket_bytes, flushes, handle_key
        self._block = SharedBlock()
        self._received = ReceivedWeights()
        self._group = ServerGroup(order)
        self._told: tuple[TensorLayout, ...] = ()  # what is to come in buckets that are lent
        self._lendings = Lendings()
        self.torn: str | None = None

    async def expect(self, layout: Sequence[TensorLayout]) -> int:
        """Says what will come by a group, or be lent; returns the server's tensor parallelism.

        Raises:
            EngineError: these are not its tensors.
        """
        check_shapes({tensor.name: tensor.shape for tensor in layout}, self._shapes())
        self._group.expect(layout)
        self._told = tuple(layout)
        return (await self._facts()).ranks

    @contextmanager
    def under_way(self, weights: WeightSource) -> Iterator[None]:
        """Context of a load, from the moment that it is asked for: ends others that are lent."""
        if not isinstance(weights, LentWeights):
            self._lendings.end("other weights have come")
            yield
            return
        self._lendings.of(weights.push)
        try:
            yield
        except BaseException as error:
            self._lendings.end(str(error), weights.push)
            raise
        self._lendings.end("all of it is loaded", weights.push)

    async def give(self, push: str, number: int, handles: Sequence[LentBucket]) -> None:
        """A bucket of a push; returns when it is loaded. Raises EngineError if it is not."""
        await self._lendings.of(push).give(number, handles)

    def end(self, push: str, why: str) -> None:
        """No more buckets of this push will come."""
        self._lendings.end(why, push)

    async def ready(self, weights: WeightSource) -> Whole:
        """The weights, ready to be written: examined, as far as can be, and copied or joined.

        Raises:
            EngineError: they are not for this server, which goes on with those it has.
        """
        if isinstance(weights, WeightDelta):
            weights = await asyncio.to_thread(self._received.take, weights)
        await self._check(weights)
        if isinstance(weights, CollectiveBroadcast):
            await self._group.join(weights)
        return weights

    async def _check(self, weights: Whole) -> None:
        """A server would load what it knows, keep the rest, and die of the first NaN it samples."""
        if isinstance(weights, CollectiveBroadcast):
            self._group.check(weights)
        elif isinstance(weights, LentWeights):
            if layout_digest(self._told) != weights.layout:
                raise EngineError("the learner lends other tensors than this engine was told of")
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
            # This copy needs no pause.
            await asyncio.to_thread(self._block.write, HeldWeights(tensors))

    async def write(self, weights: Whole, version: int) -> None:
        """Has the server load what `ready` gave; generation must stand still.

        Raises:
            EngineError: it did not: `torn` says so, unless nothing was written.
        """
        if isinstance(weights, CheckpointDirectory):
            await self._from_disk(weights, version)
        elif isinstance(weights, CollectiveBroadcast):
            await self._from_collective(weights, version)
        elif isinstance(weights, LentWeights):
            await self._from_lender(weights, version)
        else:
            shared = weights if isinstance(weights, SharedTensors) else self._block.share()
            # A server that could not open it would die; this process does not outlive it.
            with shared.held() as held:
                await self._from_memory(held, version)

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
                    # Each tensor-parallel rank opens the memory for itself, and takes its own part.
                    payloads = [serialized_order(portion)] * facts.ranks
                    await self._from_tensor(
                        payloads, LOADER, facts, version, last=portion is portions[-1]
                    )
            finally:
                await self._order("/end_weight_update", {})

    async def _from_lender(self, weights: LentWeights, version: int) -> None:
        facts, buckets = await self._facts(), self._lendings.of(weights.push)
        number = len(plan_buckets(self._told, weights.bucket_bytes))
        await self._order("/begin_weight_update", facts.selector)
        with self._writing(version) as written:
            try:
                for i in range(number):
                    with ExitStack() as opened:
                        handles = buckets.next(i, weights.timeout_s)
                        payloads = await self._payloads(opened, handles, facts.ranks)
                        written.append(i)
                        last = i + 1 == number
                        await self._from_tensor(payloads, FORMAT, facts, version, last=last)
                    buckets.loaded()
            finally:
                await self._order("/end_weight_update", {})

    async def _payloads(
        self, opened: ExitStack, coming: Awaitable[Sequence[LentBucket]], ranks: int
    ) -> list[bytes]:
        """What each rank opens the next bucket by."""
        try:
            handles = await coming
            if len(handles) != ranks:
                raise EngineError(f"{len(handles)} handles came for {ranks} ranks")
            return [rank_payload(opened, handle, self._handle_key) for handle in handles]
        except EngineError as error:
            raise EngineError(f"{NOT_RECEIVED}: {error}") from error

    async def _from_tensor(
        self,
        payloads: Sequence[bytes],
        load_format: str,
        facts: ServerFacts,
        version: int,
        *,
        last: bool,
    ) -> None:
        body = {
            "serialized_named_tensors": [base64.b64encode(each).decode() for each in payloads],
            "load_format": load_format,
            **facts.selector,
            **self._ending(version, last=last),
        }
        await self._order("/update_weights_from_tensor", body)

    def _ending(self, version: int, *, last: bool) -> dict[str, Any]:
        """Fields of a bucket's order: with the last one the caches are dropped, once."""
        if not last:
            return {"flush_cache": False}
        return {"flush_cache": self._flushes, "weight_version": str(version)}

    async def _from_collective(self, weights: CollectiveBroadcast, version: int) -> None:
        selector: Mapping[str, str] = (await self._facts()).selector
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

        Yields a list for the buckets that were written: what broke off before the first one has
        written nothing.
        """
        written: list[int] = []
        try:
            yield written
        except BaseException as error:  # a cancelled load tears the weights, too
            if isinstance(error, EngineError) and NOT_RECEIVED in str(error) and not written:
                raise EngineError(f"{error}; the engine goes on with the weights it had") from error
            self.torn = (
                f"the load of weights version {version} broke off, and the server may hold parts "
                "of two versions: push whole weights, or restart the engine (a resumed run starts "
                "it anew)"
            )
            if isinstance(error, EngineError):
                raise EngineError(f"{error}; {self.torn}") from error
            raise
