"""Weights by a collective group: the learner is rank 0, the engines' ranks are the others.

Once, and again after a failure:

    learner   asks every engine for its ranks (`weight_ranks`), opens a TCPStore, and joins as rank
              0 while the engines join, with their first push
    server    /init_weights_update_group: each tensor-parallel rank joins as rank_offset + its own
    embedded  joins as one rank, in its own process (actors/embedded/weight_group.py)

Each push, after the same call `load_weights(CollectiveBroadcast, version)` to every engine:

    1  engine    checks the tensors' names and shapes
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
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - public
from torch.distributed.distributed_c10d import ProcessGroup

from cluster.handles import calls
from cluster.handles.node import node_address
from cluster.weights.transport import Sending, Transport
from distill.engine import GIVES_UP, SENDS, CollectiveBroadcast, GroupMember
from distill.errors import EngineError, first_line
from distill.gloo import listen_towards
from distill.weight_group import join_group, leave_group
from distill.weights.model_weights import (
    BUCKET_BYTES,
    TensorLayout,
    Weights,
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

    def describe(self) -> str:
        return f"{self._backend} group from {self._address}"

    def start(self, weights: Weights, version: int) -> dict[str, Any]:
        """The engines' acknowledgements to be, by name; the broadcast goes on in a thread.

        Raises:
            EnginesFailed: an engine is not ready.
        """
        self._group = group = self._group or self._form()
        group.begin(version)
        buckets = plan_buckets(weights.layouts, self._bucket_bytes)
        self._sending = _Broadcasting(group, weights, buckets, version)
        pending = {
            name: engine.load_weights.remote(
                CollectiveBroadcast(member=group.members[name], buckets=buckets), version
            )
            for name, engine in self.engines.items()
        }
        self._sending.start()
        return pending

    def abort(self) -> None:
        """Leave the group, once its push under way has ended. The next one forms a new group."""
        group, sending = self._group, self._sending
        super().abort()
        self._group = None
        if group is not None:  # not here: that push ends with peers which the publisher ends later
            calls.in_thread(lambda: group.leave_after(sending), "weight-group")

    def _form(self) -> _CollectiveGroup:
        ranks = self._ranks(self._timeout_s)
        if self._backend == "gloo":
            listen_towards(self._address)
        deadline_s = min(JOIN_DEADLINE_S, self._timeout_s)
        store = open_store(self._address, deadline_s)
        own = GroupMember(
            address=self._address,
            port=store.port,
            name=f"isotherm-{secrets.token_hex(8)}",
            backend=self._backend,
            world_size=1 + sum(ranks.values()),
            rank=0,
            join_deadline_s=deadline_s,
            timeout_s=self._timeout_s,
        )
        *firsts, _ = accumulate(ranks.values(), initial=1)
        members = {
            name: replace(own, rank=first) for name, first in zip(ranks, firsts, strict=True)
        }
        return _CollectiveGroup(store, own, members)


class _CollectiveGroup:
    """A group, its store and the engines' memberships; `join` is for the sending thread."""

    def __init__(
        self, store: TCPStore, own: GroupMember, members: Mapping[str, GroupMember]
    ) -> None:
        self.store, self.own, self.members = store, own, members
        self.process_group: ProcessGroup | None = None
        self._leaving = threading.Lock()

    def join(self) -> ProcessGroup:
        self.process_group = self.process_group or join_group(self.store, self.own)
        return self.process_group

    def begin(self, version: int) -> None:
        """Forget what was said of this version: it may be pushed a second time."""
        for member in self.members.values():
            self.store.delete_key(member.ready_key(version))
        self.store.delete_key(self.own.word_key(version))

    def say(self, word: str, version: int) -> None:
        self.store.set(self.own.word_key(version), word)

    def all_are_ready(self, version: int) -> bool:
        return self.store.check([member.ready_key(version) for member in self.members.values()])

    def leave(self) -> None:
        with self._leaving:
            group, self.process_group = self.process_group, None
            if group is not None:
                leave_group(group)

    def leave_after(self, sending: Sending | None) -> None:
        if sending is not None:
            sending.join()
        self.leave()


class _Broadcasting(Sending):
    """One push: waits for the engines to be ready, then broadcasts."""

    def __init__(
        self,
        group: _CollectiveGroup,
        weights: Weights,
        buckets: Sequence[Sequence[TensorLayout]],
        version: int,
    ) -> None:
        super().__init__(group.own.timeout_s)
        self._group, self._weights = group, weights
        self._buckets, self._version = buckets, version

    def give_up(self) -> None:
        """Tell engines that wait for this side's word, and break off a broadcast under way."""
        super().give_up()
        if self._group.own.backend == "nccl":  # gloo's ends with its peers
            self._group.leave()

    def _run(self) -> None:
        sends = False
        try:
            group = self._group.join()
            first = self._flat(self._buckets[0])  # while the engines pause
            sends = self._all_ready()
            self._group.say(SENDS if sends else GIVES_UP, self._version)
            if sends:
                self._broadcast(group, first)
                return
            self.problem = "the push was given up before anything was sent"
        except Exception as error:  # torch raises its own, of several kinds
            what = f"the learner's broadcast of version {self._version}"
            self.problem = f"{what} failed: {first_line(error)}"
            if not sends:
                self._group.say(GIVES_UP, self._version)
        self._group.leave()

    def _broadcast(self, group: ProcessGroup, flat: Tensor) -> None:
        for following in (*self._buckets[1:], None):
            if self._given_up.is_set():
                raise EngineError("an engine failed meanwhile")
            torch.distributed.broadcast(flat, src=0, group=group)
            if flat.is_cuda:  # NCCL only queues it, and the learner's next step changes the weights
                with self._own_work():
                    torch.cuda.synchronize(flat.device)
            self.sent += 1
            if following is not None:  # while the engines load what they have
                flat = self._flat(following)

    def _flat(self, bucket: Sequence[TensorLayout]) -> Tensor:
        with self._own_work():
            tensors = self._weights.gather(names_of(bucket)).values()
            return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])

    def _all_ready(self) -> bool:
        """Waits for every engine's word; False if the push is given up meanwhile."""
        deadline = time.monotonic() + self._timeout_s
        while not self._group.all_are_ready(self._version):
            if self._given_up.is_set():
                return False
            if time.monotonic() > deadline:
                raise EngineError(f"not every engine was ready within {self._timeout_s:.0f} s")
            time.sleep(_POLL_S)
        return not self._given_up.is_set()


def own_address(everyone_is_here: bool) -> str:
    """Address under which engines reach this process: the loopback if all are on this machine."""
    return LOOPBACK if everyone_is_here else node_address()
