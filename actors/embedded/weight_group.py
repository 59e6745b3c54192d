"""Embedded engine's side of a weight group; the protocol is in cluster/weights/collective.py.

All weights are received into main memory while the engine generates, and are loaded afterwards. So
an interrupted broadcast leaves the engine's weights unchanged.
"""

from __future__ import annotations

import os
import threading

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from distill.engine import JOINING, CollectiveBroadcast, GroupMember
from distill.errors import EngineError, first_line
from distill.process_groups import listen_towards, nccl_settings
from distill.weight_group import NOT_RECEIVED, announce, join_group, learner_store, leave_group
from distill.weights.model_weights import split_bucket


class WeightReceiver:
    """One rank of a weight group, joined once and left after a failure."""

    def __init__(self, device: torch.device) -> None:
        """NCCL receives one bucket at a time on `device`."""
        self._device = device
        self._name: str | None = None
        self._group: ProcessGroup | None = None
        self._lock = threading.Lock()

    def receive(self, weights: CollectiveBroadcast) -> dict[str, Tensor]:
        """Join the group if necessary, and receive a push; block until all weights have arrived.

        Raises:
            EngineError: the weights did not arrive.
        """
        with self._lock:
            try:
                group = self._joined(weights.member)
                announce(weights.member, weights.number)
                return self._received(group, weights)
            except (EngineError, RuntimeError) as error:  # RuntimeError: from torch
                self._leave()
                why = first_line(error).removeprefix(f"{NOT_RECEIVED}: ")
                raise EngineError(
                    f"{NOT_RECEIVED}: {why}; the engine keeps its current weights"
                ) from error

    def _joined(self, member: GroupMember) -> ProcessGroup:
        if self._group is not None and self._name == member.name:
            return self._group
        self._leave()
        announce(member, JOINING)
        if member.backend == "gloo":
            listen_towards(member.address)
        else:
            os.environ.update(nccl_settings())  # NCCL reads them at the first communicator
        self._group = join_group(learner_store(member), member)
        self._name = member.name
        return self._group

    def _received(self, group: ProcessGroup, weights: CollectiveBroadcast) -> dict[str, Tensor]:
        device = self._device if weights.member.backend == "nccl" else torch.device("cpu")
        tensors: dict[str, Tensor] = {}
        for bucket in weights.buckets:
            nbytes = sum(tensor.nbytes for tensor in bucket)
            flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
            torch.distributed.broadcast(flat, src=0, group=group)
            tensors |= split_bucket(flat.cpu(), bucket)
        return tensors

    def _leave(self) -> None:
        group, self._group, self._name = self._group, None, None
        if group is not None:
            leave_group(group)
