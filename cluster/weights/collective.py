"""Weights by a collective group: the learner is rank 0, the engines' ranks are the others.

Once, and again after a failure:

    learner   tells every engine names and shapes and asks for its ranks (`weight_ranks`, which
              checks them), opens a TCPStore, and joins as rank 0 while the engines join
    server    /init_weights_update_group: each tensor-parallel rank joins as rank_offset + its own
    embedded  joins as one rank, in its own process (actors/embedded/weight_group.py)

Each push, after the same call `load_weights(CollectiveBroadcast, version)` to every engine:

    1  engine    checks that it was told of this layout
       server    pauses generation; /begin_weight_update
    2  engine    sets `ready_key(version)` in the store, and waits for the learner's word
    3  learner   waits for the keys of all engines, or for the first of them that refuses, and sets
                 `word_key(version)`: no engine waits in a broadcast that is not to come
    4  both      one broadcast a bucket, in order
       server    loads it: /update_weights_from_distributed
       embedded  keeps it in main memory, and generates meanwhile
    5  server    with the last bucket: flush, new version. /end_weight_update; continue; acknowledge
       embedded  loads all buckets; new version; acknowledge

A group in which anything failed is left and never used again. An embedded engine then keeps its
weights, and so does a server that lost the group before its first bucket; a server that lost it
later must be restarted (actors/sglang/weights.py). A peer that is lost between leaves the others in
a broadcast: gloo's get an error, as its connections close; NCCL's would wait for minutes. So those
that do not come out soon are lost as well, and are ended at once (cluster/weights/transport.py,
publisher.py).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, _abort_process_group

from cluster.handles.node import node_address
from cluster.weights.transport import Transport, collect
from distill.engine import GIVES_UP, SENDS, CollectiveBroadcast
from distill.errors import EngineError
from distill.gloo import listen_towards
from distill.weight_group import join_group, leave_group
from distill.weights.model_weights import (
    BUCKET_BYTES,
    TensorLayout,
    Weights,
    layout_digest,
    names_of,
    plan_buckets,
)
from learner.process_group import LOOPBACK, open_store

JOIN_DEADLINE_S = 120.0
_POLL_S = 0.001


class CollectiveTransport(Transport):
    """The learner's end: sends its tensors to the engines from wherever they are.

    Args:
        engines: Ray handles by name.
        address: of this machine, as the engines' machines reach it.
        backend: nccl sends from GPU to GPU, gloo from main memory.
        timeout_s: longest that a push may not get on.
    """

    linked = True

    def __init__(
        self,
        engines: Mapping[str, Any],
        *,
        address: str,
        backend: Literal["gloo", "nccl"],
        timeout_s: float,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(engines)
        self._address, self._timeout_s = address, timeout_s
        self._backend: Literal["gloo", "nccl"] = backend
        self._bucket_bytes = bucket_bytes
        self._group: _CollectiveGroup | None = None
        self._layout = ""  # digest of what the group's engines were told
        self._sending: _Sending | None = None

    def describe(self) -> str:
        return f"{self._backend} group from {self._address}"

    def start(self, weights: Weights, version: int) -> dict[str, Any]:
        """The engines' acknowledgements to be, by name; the broadcast goes on in a thread.

        Raises:
            EngineError: an engine refuses these weights.
        """
        layout = layout_digest(weights.layouts)
        if self._group is not None and self._layout != layout:
            self._group.leave()
            self._group = None
        if self._group is None:
            self._group, self._layout = self._form(weights.layouts), layout
        group = self._group
        orders = {name: self._order(group, name) for name in self.engines}
        self._sending = _Sending(group, list(orders.values()), weights, version)
        pending = {
            name: engine.load_weights.remote(orders[name], version)
            for name, engine in self.engines.items()
        }
        self._sending.thread.start()
        return pending

    def problem(self) -> str | None:
        """Reason why the broadcast failed on this side, if it did."""
        return None if self._sending is None else self._sending.problem

    @property
    def sent(self) -> int:
        """Buckets of this push that every engine has received."""
        return 0 if self._sending is None else self._sending.sent

    def finish(self) -> None:
        """Call when every engine has acknowledged."""
        assert self._sending is not None
        self._sending.thread.join(self._timeout_s)
        if problem := self._sending.problem:
            self.abort()
            raise EngineError(problem)

    def give_up(self) -> None:
        """Engines that wait for this side's word get it; a broadcast under way is broken off."""
        if self._sending is not None:
            self._sending.give_up()

    def abort(self) -> None:
        """Aborts the push. The next one forms a new group."""
        self.give_up()
        self._group = self._sending = None

    def _form(self, layouts: Sequence[TensorLayout]) -> _CollectiveGroup:
        told = list(layouts)
        asked = {name: engine.weight_ranks.remote(told) for name, engine in self.engines.items()}
        ranks = collect(asked, self._timeout_s).require("preparing a weight group")
        if self._backend == "gloo":
            listen_towards(self._address)
        offsets, next_rank = {}, 1
        for name in self.engines:
            offsets[name] = next_rank
            next_rank += ranks[name]
        deadline_s = min(JOIN_DEADLINE_S, self._timeout_s)
        return _CollectiveGroup(
            self._address, self._backend, next_rank, offsets, deadline_s, self._timeout_s
        )

    def _order(self, group: _CollectiveGroup, name: str) -> CollectiveBroadcast:
        return CollectiveBroadcast(
            address=self._address,
            port=group.store.port,
            group=group.name,
            backend=self._backend,
            world_size=group.world_size,
            rank_offset=group.offsets[name],
            layout=self._layout,
            bucket_bytes=self._bucket_bytes,
            join_deadline_s=group.join_deadline_s,
            timeout_s=self._timeout_s,
        )


class _CollectiveGroup:
    """A group and its store; `join` is for the sending thread."""

    def __init__(
        self,
        address: str,
        backend: Literal["gloo", "nccl"],
        world_size: int,
        offsets: Mapping[str, int],
        join_deadline_s: float,
        timeout_s: float,
    ) -> None:
        self.name = f"isotherm-{secrets.token_hex(8)}"
        self.backend, self.world_size, self.offsets = backend, world_size, offsets
        self.join_deadline_s, self._timeout_s = join_deadline_s, timeout_s
        self.store = open_store(address, join_deadline_s)
        self.process_group: ProcessGroup | None = None

    def join(self) -> ProcessGroup:
        if self.process_group is None:
            self.process_group = join_group(
                self.store,
                self.name,
                rank=0,
                world_size=self.world_size,
                backend=self.backend,
                join_deadline_s=self.join_deadline_s,
                timeout_s=self._timeout_s,
            )
        return self.process_group

    def leave(self) -> None:
        if self.process_group is not None:
            group, self.process_group = self.process_group, None
            leave_group(group)

    def break_off(self) -> None:
        """Ends this side's broadcast, if NCCL has one under way; gloo's ends with its peers."""
        if self.backend == "nccl" and self.process_group is not None:
            group, self.process_group = self.process_group, None
            _abort_process_group(group)


class _Sending:
    """One push on its way: waits for the engines to be ready, then broadcasts."""

    def __init__(
        self,
        group: _CollectiveGroup,
        orders: Sequence[CollectiveBroadcast],
        weights: Weights,
        version: int,
    ) -> None:
        self._group, self._orders, self._weights = group, orders, weights
        self._buckets = plan_buckets(weights.layouts, orders[0].bucket_bytes)
        self._version, self._timeout_s = version, orders[0].timeout_s
        self._abandon = threading.Event()
        self.problem: str | None = None
        self.sent = 0  # buckets
        # A daemon: a learner that gave up ends although a peer keeps this thread waiting.
        self.thread = threading.Thread(target=self._run, name="weight-broadcast", daemon=True)

    def give_up(self) -> None:
        """Has engines that wait for this side's word go on, and ends a broadcast under way."""
        self._abandon.set()
        self._group.break_off()

    def _run(self) -> None:
        sends = False
        try:
            group = self._group.join()
            first = self._flat(self._buckets[0])  # while the engines pause
            sends = self._all_ready()
            self._say(SENDS if sends else GIVES_UP)
            if sends:
                self._broadcast(group, first)
                return
            self.problem = "the push was given up before anything was sent"
        except Exception as error:  # torch raises its own, of several kinds
            first = (str(error).splitlines() or [""])[0]
            self.problem = f"the learner's broadcast of version {self._version} failed: {first}"
            if not sends:
                self._say(GIVES_UP)
        self._group.leave()

    def _say(self, word: str) -> None:
        self._group.store.set(self._orders[0].word_key(self._version), word)

    def _broadcast(self, group: ProcessGroup, flat: Tensor) -> None:
        for following in (*self._buckets[1:], None):
            if self._abandon.is_set():
                raise EngineError("an engine failed meanwhile")
            torch.distributed.broadcast(flat, src=0, group=group)
            if flat.is_cuda:  # NCCL only queues it, and the learner's next step changes the weights
                torch.cuda.synchronize(flat.device)
            self.sent += 1
            if following is not None:  # while the engines load what they have
                flat = self._flat(following)

    def _flat(self, bucket: Sequence[TensorLayout]) -> Tensor:
        tensors = self._weights.gather(names_of(bucket)).values()
        return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])

    def _all_ready(self) -> bool:
        """Waits for every engine's word; False if the push is given up meanwhile."""
        keys = [order.ready_key(self._version) for order in self._orders]
        deadline = time.monotonic() + self._timeout_s
        while not self._group.store.check(keys):
            if self._abandon.is_set():
                return False
            if time.monotonic() > deadline:
                raise EngineError(f"not every engine was ready within {self._timeout_s:.0f} s")
            time.sleep(_POLL_S)
        return not self._abandon.is_set()


def own_address(everyone_is_here: bool) -> str:
    """Address under which engines reach this process: the loopback if all are on this machine."""
    return LOOPBACK if everyone_is_here else node_address()
