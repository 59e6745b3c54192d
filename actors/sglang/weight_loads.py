"""Loads of weights into a paused SGLang server; each load writes all weights, or raises.

    SharedTensors         in memory that this machine's processes share: this process opens it, and
                          the server reads it as the learner wrote it
                          (actors/sglang/plugin/weight_loader.py)
    PackedTensors         in this process's memory: copied into a shared block first
    CheckpointDirectory   files that the server reads itself
    CollectiveBroadcast   a torch.distributed group that the server's ranks join, once
                          (actors/sglang/weight_group.py)
    LentWeights           buckets in the learner's memory, or on the GPU that both share, that each
                          rank opens by a handle (actors/sglang/lent_buckets.py, weight_payloads.py)

All checks that are possible in advance run before the server is changed. If a load fails later, the
server may hold parts of two versions (`torn`).
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from actors.sglang.flags import LOADER
from actors.sglang.lent_buckets import Lendings
from actors.sglang.plugin.weight_loader import serialized_order
from actors.sglang.weight_checks import ServerFacts, Shapes, check_shapes
from actors.sglang.weight_group import NOT_RECEIVED, AdminRequest, ServerGroup
from actors.sglang.weight_payloads import FORMAT, rank_payload
from distill.engine import CheckpointDirectory, CollectiveBroadcast, LentWeights, WeightSource
from distill.errors import CheckpointError, EngineError
from distill.models.checkpoint_names import pushed_shapes
from distill.models.loading import weight_files
from distill.pace import loading_s
from distill.weights.lending import LentBucket
from distill.weights.model_weights import HeldWeights, plan_buckets
from distill.weights.shared_memory import SharedBlock, SharedTensors
from distill.weights.tensors import TensorLayout, first_non_finite, layout_digest


class WeightLoads:
    """Sequential weight loads into one server.

    Attributes:
        torn: reason why the server's weights are not those of a single version; None if they are.
    """

    def __init__(
        self,
        order: AdminRequest,
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
            facts: returns the properties of the server.
            shapes: returns names and shapes of the model's tensors; called at the first load.
            bucket_bytes: maximum bytes that a rank loads from memory in one request.
            flushes: a load drops every cached prefix.
            handle_key: key with which the server's processes authenticate for lent memory.
        """
        self._order, self._facts, self._shapes = order, facts, cache(shapes)
        self._bucket_bytes, self._flushes, self._handle_key = bucket_bytes, flushes, handle_key
        self._block = SharedBlock()
        self._group = ServerGroup(order)
        self._told: tuple[TensorLayout, ...] = ()  # layout of the lent buckets
        self._lendings = Lendings()
        self.torn: str | None = None

    async def expect(self, layout: Sequence[TensorLayout]) -> int:
        """Set the layout that a group will send, or that will be lent.

        Returns the server's tensor parallelism.

        Raises:
            EngineError: the tensors do not match the model's.
        """
        check_shapes({tensor.name: tensor.shape for tensor in layout}, self._shapes())
        self._group.expect(layout)
        self._told = tuple(layout)
        return (await self._facts()).ranks

    @contextmanager
    def under_way(self, weights: WeightSource) -> Iterator[None]:
        """Context manager for a load, entered when it is requested: ends other lent pushes."""
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
        """Provide a bucket of a push, and return when it is loaded.

        Raises:
            EngineError: the bucket was not loaded.
        """
        await self._lendings.of(push).give(number, handles)

    def end(self, push: str, why: str) -> None:
        """End a push of lent buckets: no more buckets will follow. `why` is the reason."""
        self._lendings.end(why, push)

    async def prepare(self, weights: WeightSource) -> None:
        """Prepare the weights for `write`: check them, and copy them or join the group.

        Raises:
            EngineError: the weights do not match this server, which keeps its current ones.
        """
        await self._check(weights)
        if isinstance(weights, CollectiveBroadcast):
            await self._group.join(weights)

    async def _check(self, weights: WeightSource) -> None:
        """Raise EngineError if the weights do not match the model, or are not finite.

        A server would load the tensors that it knows, keep its old values of the others, and crash
        when it samples from NaN.
        """
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
        elif isinstance(weights, SharedTensors):  # the writer has checked for non-finite values
            check_shapes(weights.shapes, self._shapes())
        else:
            tensors = dict(weights.unpack())
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            check_shapes(shapes, self._shapes())
            bad = await asyncio.to_thread(first_non_finite, tensors)
            if bad is not None:
                raise EngineError(f"{bad!r} is not finite in the bundle; the old weights stay")
            # Copied here, because generation need not be paused for it.
            await asyncio.to_thread(self._block.write, HeldWeights(tensors))

    async def write(self, weights: WeightSource, version: int) -> None:
        """Make the server load weights that `prepare` accepted; generation must be paused.

        Raises:
            EngineError: the load failed; `torn` is set, unless nothing was written.
        """
        if isinstance(weights, CheckpointDirectory):
            await self._from_disk(weights, version)
        elif isinstance(weights, CollectiveBroadcast):
            await self._from_collective(weights, version)
        elif isinstance(weights, LentWeights):
            await self._from_lender(weights, version)
        else:
            shared = weights if isinstance(weights, SharedTensors) else self._block.share()
            # Opened here first: a server that cannot open it would crash, and this process with it.
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
                    # Each tensor-parallel rank opens the memory itself, and loads its own part.
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
        """Payloads with which the ranks open the next bucket, one for each rank."""
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
        """Fields of a bucket's request: the last one flushes the cache and sets the version."""
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
        """Context manager for a write: if it fails, the server's weights are torn.

        Yields a list, to which the caller appends the buckets that were written: a load that failed
        to receive its first bucket has written nothing.
        """
        written: list[int] = []
        try:
            yield written
        except BaseException as error:  # a cancelled load leaves torn weights, too
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
