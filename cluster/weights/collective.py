"""Pushes over a torch.distributed group: the learner is rank 0, the engines are the other ranks.

Forming the group, once and again after a failure:

    learner   opens a TCPStore, waits until every engine has checked its first push and is ready to
              join, and joins as rank 0
    server    /init_weights_update_group: each tensor-parallel rank joins as rank_offset + its own
    embedded  joins as one rank, in its own process (actors/embedded/weight_group.py)

Each push, after the same call `load_weights(CollectiveBroadcast, version)` to every engine:

    1  engine    checks the tensors' names and shapes
       server    pauses generation; /begin_weight_update
    2  engine    sets its `ready_key` in the store, and waits for the learner's `word_key`
    3  learner   waits until all engines have set their keys, or one has refused, and sets
                 `word_key`, so that no engine waits for a broadcast that never comes
    4  both      one broadcast per bucket, in order
       server    loads the bucket: /update_weights_from_distributed
       embedded  keeps the bucket in main memory, and continues to generate
    5  server    with the last bucket: flush, new version. /end_weight_update; continue; acknowledge
       embedded  loads all buckets; new version; acknowledge

A group in which anything failed is left and never used again. An embedded engine then keeps its
weights, and so does a server that lost the group before its first bucket; a server that lost it
later must be restarted (actors/sglang/weights.py). A peer that dies while the group is formed
leaves the others waiting for it in the store, so the learner closes the store. A peer that dies
during a broadcast leaves the others in it. With gloo they get an error, because the peer's
connections close; with NCCL they would wait for minutes. So engines that do not leave the broadcast
soon count as lost, too, and are terminated before the push is tried again
(cluster/weights/transport.py, publisher.py).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import (
    DistNetworkError,  # pyright: ignore[reportPrivateImportUsage] - public
    TCPStore,  # pyright: ignore[reportPrivateImportUsage] - public
)
from torch.distributed.distributed_c10d import ProcessGroup

from cluster.handles import calls
from cluster.handles.node import node_address
from cluster.weights.transport import Sending, Transport
from distill.engine import ABORTS, JOINING, SENDS, CollectiveBroadcast, GroupMember
from distill.errors import EngineError, first_line
from distill.process_groups import listen_towards
from distill.weight_group import join_group, learner_store, leave_group
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
    """Transport that broadcasts the learner's tensors to the ranks of all engines.

    Args:
        ranks: number of ranks of each engine.
        address: address of this machine for the engines' machines.
        backend: nccl sends from GPU to GPU, gloo from main memory.
        timeout_s: longest time without progress of a push, seconds.
    """

    def __init__(
        self,
        engines: Mapping[str, Any],
        *,
        ranks: int = 1,
        address: str,
        backend: Literal["gloo", "nccl"],
        timeout_s: float,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(engines)
        self._ranks, self._address, self._timeout_s = ranks, address, timeout_s
        self._backend: Literal["gloo", "nccl"] = backend
        self._bucket_bytes = bucket_bytes
        self._group: _CollectiveGroup | None = None

    def describe(self) -> str:
        return f"{self._backend} group from {self._address}"

    def start(self, weights: Weights, version: int) -> dict[str, Any]:
        self._group = group = self._group or self._form()
        buckets = plan_buckets(weights.layouts, self._bucket_bytes)
        group.pushes += 1  # not the version, which may be pushed twice
        pending = {
            name: engine.load_weights.remote(
                CollectiveBroadcast(
                    member=group.members[name], number=group.pushes, buckets=buckets
                ),
                version,
            )
            for name, engine in self.engines.items()
        }
        self.sending = _Broadcasting(group, weights, buckets)
        self.sending.start()
        return pending

    def abort(self) -> None:
        """Leave the group once its current push has ended; the next push forms a new group."""
        group, sending = self._group, self.sending
        super().abort()
        self._group = None
        if group is not None:  # the push may end only after the publisher has terminated peers
            calls.in_thread(lambda: group.leave_after(sending), "weight-group")

    def _form(self) -> _CollectiveGroup:
        if self._backend == "gloo":
            listen_towards(self._address)
        deadline_s = min(JOIN_DEADLINE_S, self._timeout_s)
        server = open_store(self._address, deadline_s)
        own = GroupMember(
            address=self._address,
            port=server.port,
            name=f"isotherm-{secrets.token_hex(8)}",
            backend=self._backend,
            world_size=1 + self._ranks * len(self.engines),
            rank=0,
            join_deadline_s=deadline_s,
            timeout_s=self._timeout_s,
        )
        members = {
            name: replace(own, rank=1 + self._ranks * i) for i, name in enumerate(self.engines)
        }
        return _CollectiveGroup(server, own, members)


class _CollectiveGroup:
    """A group, its store and the engines' memberships.

    `pushes` is the number of pushes so far; `process_group` is None before the group is joined and
    after it is left.
    """

    def __init__(
        self, server: TCPStore, own: GroupMember, members: Mapping[str, GroupMember]
    ) -> None:
        self._server: TCPStore | None = server
        self.store, self.own, self.members = learner_store(own), own, members
        self.pushes = 0
        self.process_group: ProcessGroup | None = None
        self._leaving = threading.Lock()

    @property
    def joined(self) -> ProcessGroup:
        """The process group. Raises EngineError if it was left.

        Keep it in no variable: gloo closes its connections with the last reference, and the frames
        of an error, which outlives the push, would hold one.
        """
        if self.process_group is None:
            raise EngineError("the push was given up")
        return self.process_group

    def leave(self) -> None:
        with self._leaving:
            group, self.process_group = self.process_group, None
            if group is not None:
                leave_group(group)

    def close_store(self) -> None:
        """End the store: every member that waits in it, this process included, gets an error."""
        self._server = None  # torch ends it with the last reference

    def leave_after(self, sending: Sending | None) -> None:
        if sending is not None:
            sending.join()
        self.leave()


class _Broadcasting(Sending):
    """The latest push of a group: waits until all engines are ready, then broadcasts."""

    linked = True

    def __init__(
        self,
        group: _CollectiveGroup,
        weights: Weights,
        buckets: Sequence[Sequence[TensorLayout]],
    ) -> None:
        super().__init__(group.own.timeout_s)
        self._group, self._weights, self._buckets = group, weights, buckets
        self._joining = False
        self._number = group.pushes

    def stop(self) -> None:
        """Release members that wait for a word, for the group to form, or in a broadcast."""
        super().stop()
        if self._joining:
            self._group.close_store()
        if self._group.own.backend == "nccl":  # gloo's broadcast ends when a peer ends
            self._group.leave()

    def _run(self) -> None:
        try:
            if self._group.process_group is None:
                self._join()
            first = self._flat(self._buckets[0])  # while the engines pause
            self._agree(self._number)
            self._announce(ABORTS, JOINING)  # all have joined: one that leaves cannot join again
            self._broadcast(first)
        except Exception as error:  # torch raises several types
            if not self._stopped.is_set():  # otherwise an engine's failure is the cause
                self.problem = f"the learner's broadcast failed: {first_line(error)}"
            with suppress(DistNetworkError):  # the store is closed
                for about in (JOINING, self._number):  # engines may wait for either
                    self._announce(ABORTS, about)
            self._group.leave()

    def _join(self) -> None:
        self._agree(JOINING)
        self._joining = True
        self._require_wanted()  # a `stop` before this line has not closed the store
        self._group.process_group = join_group(self._group.store, self._group.own)
        self._joining = False

    def _announce(self, word: str, about: int) -> None:
        self._group.store.set(self._group.own.word_key(about), word)

    def _agree(self, about: int) -> None:
        """Wait until every engine is ready, then let all engines continue.

        Raises:
            EngineError: the push is given up, or an engine was not ready in time.
        """
        keys = [member.ready_key(about) for member in self._group.members.values()]
        deadline = time.monotonic() + self._timeout_s
        while not self._group.store.check(keys):
            self._require_wanted()
            if time.monotonic() > deadline:
                raise EngineError(f"not every engine was ready within {self._timeout_s:.0f} s")
            time.sleep(_POLL_S)
        self._require_wanted()
        self._announce(SENDS, about)

    def _broadcast(self, flat: Tensor) -> None:
        for following in (*self._buckets[1:], None):
            self._require_wanted()
            torch.distributed.broadcast(flat, src=0, group=self._group.joined)
            if flat.is_cuda:  # NCCL only queues it; the learner's next step changes the weights
                with self._own_work():
                    torch.cuda.synchronize(flat.device)
            self.sent += 1
            if following is not None:  # while the engines load this bucket
                flat = self._flat(following)

    def _flat(self, bucket: Sequence[TensorLayout]) -> Tensor:
        with self._own_work():
            tensors = self._weights.gather(names_of(bucket)).values()
            return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])


def own_address(everyone_is_here: bool) -> str:
    """Address under which engines reach this process: the loopback if all are on this machine."""
    return LOOPBACK if everyone_is_here else node_address()
