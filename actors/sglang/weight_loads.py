"""Loads of weights into a paused SGLang server; each load writes all weights, or raises.

    SharedTensors         shared memory of this machine: this process opens the memory, and the
                          server reads what the learner wrote
                          (actors/sglang/plugin/weight_loader.py)
    CheckpointDirectory   files that the server reads
    CollectiveBroadcast   a torch.distributed group that the server's ranks join once
    LentWeights           buckets in the learner's memory, or on a GPU that learner and server
                          share, which each rank opens by a handle (actors/sglang/lent_weights.py)

All checks that are possible in advance run before the server is changed. If a load fails later, the
server may hold parts of two versions (`torn`).
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import cache
from typing import Any

from actors.sglang.client import ServerFacts, SglangClient
from actors.sglang.flags import LOADER
from actors.sglang.lent_weights import Lendings, rank_payloads
from actors.sglang.plugin.weight_loader import serialized_order
from distill.engine import (
    JOINING,
    CheckpointDirectory,
    CollectiveBroadcast,
    GroupMember,
    LentWeights,
    ModelSource,
)
from distill.errors import CheckpointError, EngineError
from distill.models.checkpoint_names import pushed_shapes
from distill.models.loading import weight_files
from distill.pace import loading_s
from distill.weight_group import NOT_RECEIVED, announce
from distill.weights.model_weights import TensorLayout
from distill.weights.shared_memory import SharedTensors

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]

# Tensor that provides the weights of a tied lm_head, which a bundle does not contain.
_TIED = "model.embed_tokens.weight"


class WeightLoads:
    """Sequential weight loads into one server; its arguments are those of a `WeightSession`.

    Attributes:
        torn: reason why the server's weights are not those of a single version; None if they are.
    """

    def __init__(
        self,
        client: SglangClient,
        shapes: Callable[[], Shapes],
        *,
        bucket_bytes: int,
        flushes: bool,
    ) -> None:
        """`flushes` is True if a load flushes the prefix cache."""
        self._client, self._shapes = client, cache(shapes)
        self._bucket_bytes, self._flushes = bucket_bytes, flushes
        self._group = _ServerGroup(client)
        self.lendings = Lendings()
        self._wrote = False  # True once the load in progress has written a bucket
        self.torn: str | None = None

    @contextmanager
    def in_progress(self, weights: ModelSource) -> Iterator[None]:
        """Context manager for a load, entered when the load is requested; ends other lent pushes.

        On leaving, the push of `weights` itself is ended, if it lends buckets.
        """
        if not isinstance(weights, LentWeights):
            self.lendings.end("other weights have arrived")
            yield
            return
        self.lendings.of(weights.push)
        try:
            yield
        except BaseException as error:
            self.lendings.end(str(error), weights.push)
            raise
        self.lendings.end("all buckets are loaded", weights.push)

    async def prepare(self, weights: ModelSource) -> None:
        """Check that the weights match the model, and join their group if they have one.

        Without the check, a server would load the tensors that it knows and keep the old values of
        all others.

        Raises:
            EngineError: the weights do not match this server, which keeps its current ones.
        """
        if isinstance(weights, CollectiveBroadcast | LentWeights):
            tensors = (tensor for bucket in weights.buckets for tensor in bucket)
            _check_shapes({tensor.name: tensor.shape for tensor in tensors}, self._shapes())
            if isinstance(weights, CollectiveBroadcast):
                await self._group.join(weights.member)
        elif isinstance(weights, CheckpointDirectory):
            try:
                found = await asyncio.to_thread(pushed_shapes, weights.path)
            except CheckpointError as error:
                raise EngineError(f"{error}; the engine keeps its current weights") from error
            _check_shapes(found, self._shapes())
            if (await self._client.facts()).has_other_draft:  # SGLang loads the directory into both
                raise EngineError(
                    "weights=disk would load the policy into its draft model as well; use "
                    "weights=auto"
                )
        else:
            _check_shapes(weights.shapes, self._shapes())

    async def write(self, weights: ModelSource, version: int) -> None:
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
            await self._from_memory(weights, version)

    async def _from_disk(self, weights: CheckpointDirectory, version: int) -> None:
        body = {
            "model_path": weights.path,
            "weight_version": str(version),
            "flush_cache": self._flushes,
        }
        with self._writing(version):
            nbytes = sum(file.stat().st_size for file in weight_files(weights.path))
            await self._client.order(
                "/update_weights_from_disk", body, allowance_s=loading_s(nbytes)
            )

    async def _from_memory(self, shared: SharedTensors, version: int) -> None:
        # Opened here first: a server that cannot open the memory would crash, and the engine with
        # it.
        with shared.held() as held:
            portions = held.portions(self._bucket_bytes)
            async with self._session(version) as facts:
                for portion in portions:
                    # Each tensor-parallel rank opens the memory and loads its own part.
                    payloads = [serialized_order(portion)] * facts.ranks
                    last = portion is portions[-1]
                    await self._from_tensor(payloads, LOADER, facts, version, last=last)

    async def _from_lender(self, weights: LentWeights, version: int) -> None:
        buckets = self.lendings.of(weights.push)
        async with self._session(version) as facts:
            for i in range(number := len(weights.buckets)):
                async with AsyncExitStack() as opened:
                    try:
                        handles = await opened.enter_async_context(
                            buckets.loading(i, weights.timeout_s, facts.ranks)
                        )
                        payloads, how = opened.enter_context(rank_payloads(handles))
                    except EngineError as error:
                        raise EngineError(f"{NOT_RECEIVED}: {error}") from error
                    self._wrote = True
                    last = i + 1 == number
                    await self._from_tensor(payloads, how, facts, version, last=last)

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
        await self._client.order("/update_weights_from_tensor", body)

    def _ending(self, version: int, *, last: bool) -> dict[str, Any]:
        """Fields of a bucket's request: the last one flushes the cache and sets the version."""
        if not last:
            return {"flush_cache": False}
        return {"flush_cache": self._flushes, "weight_version": str(version)}

    async def _from_collective(self, weights: CollectiveBroadcast, version: int) -> None:
        async with self._session(version) as facts:
            try:
                await asyncio.to_thread(announce, weights.member, weights.number)
                for i, bucket in enumerate(weights.buckets, start=1):
                    ending = self._ending(version, last=i == len(weights.buckets))
                    await self._group.receive(bucket, facts.selector | ending)
                    self._wrote = True
            except EngineError:
                await self._group.leave()
                raise

    @asynccontextmanager
    async def _session(self, version: int) -> AsyncIterator[ServerFacts]:
        """Context manager for a load in buckets; yields the server's facts.

        `/end_weight_update` is sent even after an error: without it the server refuses every later
        session.
        """
        facts = await self._client.facts()
        await self._client.order("/begin_weight_update", facts.selector)
        with self._writing(version):
            try:
                yield facts
            finally:
                await self._client.order("/end_weight_update", {})

    @contextmanager
    def _writing(self, version: int) -> Iterator[None]:
        """Context manager for a write: if it fails, the server's weights are torn.

        But a load that failed to receive its first bucket has written nothing.
        """
        self._wrote = False
        try:
            yield
        except BaseException as error:  # a cancelled load leaves torn weights, too
            if isinstance(error, EngineError) and NOT_RECEIVED in str(error) and not self._wrote:
                raise EngineError(f"{error}; the engine keeps its current weights") from error
            self.torn = (
                f"the load of weights version {version} was interrupted, and the server may hold "
                "parts of two versions: push all weights, or restart the engine (a resumed run "
                "restarts it)"
            )
            if isinstance(error, EngineError):
                raise EngineError(f"{error}; {self.torn}") from error
            raise


class _ServerGroup:
    """Membership of a server's ranks in a weight group (cluster/weights/collective.py), if any."""

    def __init__(self, client: SglangClient) -> None:
        self._client = client
        self._name: str | None = None

    async def join(self, member: GroupMember) -> None:
        if self._name == member.name:
            return
        await self.leave()
        await asyncio.to_thread(announce, member, JOINING)
        body = {
            "master_address": member.address,
            "master_port": member.port,
            "rank_offset": member.rank,
            "world_size": member.world_size,
            "group_name": member.name,
            "backend": member.backend,
        }
        joining = self._client.order("/init_weights_update_group", body)
        try:
            await asyncio.wait_for(joining, member.join_deadline_s)
        except TimeoutError:
            raise EngineError(
                f"the server did not join the weight group at {member.address}:{member.port} "
                f"within {member.join_deadline_s:.0f} s; check that it can reach that address, "
                "set the interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, or use "
                "weights=disk"
            ) from None
        self._name = member.name

    async def leave(self) -> None:
        name, self._name = self._name, None
        if name is None:
            return
        try:
            await self._client.order("/destroy_weights_update_group", {"group_name": name})
        except EngineError as error:
            logger.warning("could not leave weight group %s: %s", name, error)

    async def receive(self, bucket: Sequence[TensorLayout], fields: Mapping[str, Any]) -> None:
        """Make the server's ranks receive and load one broadcast."""
        body = {
            "names": [tensor.name for tensor in bucket],
            "dtypes": [tensor.dtype for tensor in bucket],
            "shapes": [list(tensor.shape) for tensor in bucket],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            **fields,
        }
        await self._client.order("/update_weights_from_distributed", body)


def _check_shapes(shapes: Shapes, own: Shapes) -> None:
    """Raise EngineError for the first tensor that is unknown, missing, or of another shape."""
    for name, shape in shapes.items():
        if name not in own:
            raise EngineError(f"the bundle holds {name!r}, which the model does not have")
        if shape != own[name]:
            raise EngineError(
                f"{name!r} has shape {shape} in the bundle and {own[name]} in the model"
            )
    for name in own:
        if name not in shapes and not (name.endswith("lm_head.weight") and _TIED in shapes):
            raise EngineError(f"the bundle lacks {name!r}")
