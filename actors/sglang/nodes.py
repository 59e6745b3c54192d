"""Meeting point of the ranks of a server on several nodes (`--nnodes`).

    node 0        HostedSglangEngine: opens the store and runs the HTTP server
    other nodes   SglangFollower: runs SGLang's ranks on that node, which take no requests

SGLang's rank 0 would open the store at a port that was chosen minutes before, and listen on all
addresses. `RanksStore` listens on the address of the node only, before other nodes get the address.
"""

from __future__ import annotations

import asyncio
import socket
from datetime import timedelta

from actors.sglang.config import SglangConfig
from actors.sglang.server import claim_port
from actors.sglang.start import MeetingPoint, start_server
from distill.errors import EngineError, EngineLost

# With data-parallel attention SGLang also binds ports after the store's port (server_args.py:
# NUM_DERIVED_PORTS = 6).
_FOLLOWING_PORTS = 8
_ATTEMPTS = 20
_POLL_S = 0.25


class RanksStore:
    """Rendezvous store for the ranks of a server on several nodes; closed with this object.

    Raises:
        EngineError: there are not enough consecutive free ports at this address.
    """

    def __init__(self, address: str, deadline_s: float) -> None:
        # Imported here: a follower starts its server before it imports torch.
        from torch.distributed import (
            TCPStore,  # pyright: ignore[reportPrivateImportUsage] - public
        )

        listener, *self._following = _claim_in_a_row(address, 1 + _FOLLOWING_PORTS)
        listener.listen()
        self.point = MeetingPoint(address=address, port=listener.getsockname()[1])
        self._store = TCPStore(
            address,
            self.point.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline_s),
            master_listen_fd=listener.detach(),
        )


class SglangFollower:
    """Ranks on one node of a server whose node 0 has a `HostedSglangEngine`.

    The processes end with this object.

    Args:
        config: settings of the engine.
        meeting_point: `HostedSglangEngine.meeting_point`.
        node: index of this node, from 1.
    """

    def __init__(self, config: SglangConfig, meeting_point: MeetingPoint, node: int) -> None:
        self.server = start_server(config, meeting_point=meeting_point, node=node)

    async def serve(self) -> None:
        """Wait until the processes end.

        Raises:
            EngineLost: the processes have ended, or were not ready in time. The message ends with
                the end of their log.
        """
        await self.server.ready()
        while self.server.running:
            await asyncio.sleep(_POLL_S)
        raise EngineLost(self.server.exit_report())

    async def close(self) -> None:
        """Stop the processes, which ends the whole server."""
        self.server.stop()


def _claim_in_a_row(address: str, count: int) -> list[socket.socket]:
    """Claim `count` consecutive ports."""
    for _ in range(_ATTEMPTS):
        claims = [claim_port(address)]
        first = claims[0].getsockname()[1]
        try:
            claims += [claim_port(address, first + i) for i in range(1, count)]
        except (OSError, OverflowError):  # a port is taken, or above 65535
            for claim in claims:
                claim.close()
            continue
        return claims
    raise EngineError(f"no {count} consecutive free ports at {address} after {_ATTEMPTS} attempts")
