"""Processes of a multi-node SGLang server on the nodes other than its first."""

from __future__ import annotations

import asyncio

from actors.sglang.config import SglangConfig
from actors.sglang.nodes import MeetingPoint
from actors.sglang.start import start_server
from distill.errors import EngineLost

_POLL_S = 0.25


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
