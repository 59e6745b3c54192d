"""Server side of a weight group: its ranks join once, and receive the buckets of each push.

The protocol is in cluster/weights/collective.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from actors.sglang.admin import ServerAdmin
from distill.engine import JOINING, GroupMember
from distill.errors import EngineError
from distill.weight_group import announce
from distill.weights.model_weights import TensorLayout

logger = logging.getLogger(__name__)


class ServerGroup:
    """The weight group of a server, if any."""

    def __init__(self, admin: ServerAdmin) -> None:
        self._admin = admin
        self._name: str | None = None

    async def join(self, member: GroupMember) -> None:
        """Make the server's ranks join the group, unless they are already in it."""
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
        joining = self._admin.order("/init_weights_update_group", body)
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
        """Leave the group, if the server is in one."""
        name, self._name = self._name, None
        if name is None:
            return
        try:
            await self._admin.order("/destroy_weights_update_group", {"group_name": name})
        except EngineError as error:
            logger.warning("could not leave weight group %s: %s", name, error)

    async def receive(self, bucket: Sequence[TensorLayout], fields: Mapping[str, Any]) -> None:
        """Make the server's ranks receive and load one broadcast.

        Args:
            fields: the request's other fields.
        """
        body = {
            "names": [tensor.name for tensor in bucket],
            "dtypes": [tensor.dtype for tensor in bucket],
            "shapes": [list(tensor.shape) for tensor in bucket],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            **fields,
        }
        await self._admin.order("/update_weights_from_distributed", body)
