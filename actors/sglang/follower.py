"""The processes of an SGLang server on a node that is not its first."""

from __future__ import annotations

import asyncio

from actors.sglang.config import SglangConfig
from actors.sglang.nodes import MeetingPoint
from actors.sglang.start import start_server
from distill.errors import EngineLost

_POLL_S = 0.25


class SglangFollower:
    """Ranks of a server whose node 0 has a `HostedSglangEngine`; they end with this object.

    Args:
        config: the engine's.
        meeting_point: of the engine.
        node: number of this node, from 1.
    """

    def __init__(self, config: SglangConfig, meeting_point: MeetingPoint, node: int) -> None:
        self.server = start_server(config, meeting_point=meeting_point, node=node)

    async def serve(self) -> None:
        """Lasts as long as the processes do.

        Raises:
            EngineLost: they have ended, or were not ready in time; ends with their log's tail.
        """
        await self.server.ready()
        while self.server.running:
            await asyncio.sleep(_POLL_S)
        raise EngineLost(self.server.obituary())

    async def close(self) -> None:
        """Ends the processes, and with them the whole server."""
        self.server.stop()
