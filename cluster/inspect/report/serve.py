"""Live report of a run: a server on the loopback address that renders the page on request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

from aiohttp import web

from cluster.inspect.report.page import report_page
from cluster.store.group_store import GROUPS
from distill.errors import ConfigError, IsothermError

HOST = "127.0.0.1"
_FILES = (
    "config.json", "metrics.jsonl", "events.jsonl", GROUPS, "evaluations.jsonl",
    "summary.json",
)  # fmt: skip
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
# Page for a run that has no data yet; the browser reloads it.
_NOT_YET = '<!DOCTYPE html><meta http-equiv="refresh" content="2"><title>isotherm</title><p>'


class LiveReport:
    """Server of the report of one run.

    Args:
        directories: directory of the run, and of another run with which it is compared.
        read: reads the data for `report_page`.
    """

    def __init__(self, directories: Sequence[Path], read: Callable[[], Mapping[str, Any]]) -> None:
        self._directories, self._read = directories, read
        self._made: tuple[str, str] = "", ""
        self._reading = asyncio.Lock()

    async def serve(self, port: int, started: Callable[[int], None]) -> None:
        """Serve until cancelled.

        Args:
            port: port to listen on; 0: any free port.
            started: receives the port when the server listens.

        Raises:
            ConfigError: the port is not available.
        """
        app = web.Application(middlewares=[_refuse_other_hosts])
        app.add_routes([web.get("/", self._page), web.get("/version", self._version)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, HOST, port).start()
            except OSError as error:
                raise ConfigError(
                    f"cannot serve at serve={port}: {error.strerror}; give another port, or 0",
                    field="serve",
                ) from error
            started(runner.addresses[0][1])
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    def version(self) -> str:
        """Digest of the files' sizes and times, which changes when the run writes to a file."""
        files = [directory / name for directory in self._directories for name in _FILES]
        stats = [file.stat() for file in files if file.exists()]
        seen = [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]
        return sha256(repr(seen).encode()).hexdigest()[:16]

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": self.version()}, headers=_HEADERS)

    async def _page(self, _request: web.Request) -> web.Response:
        async with self._reading:
            version = self.version()
            if self._made[0] != version:
                try:
                    data = await asyncio.to_thread(self._read)
                except IsothermError as error:
                    text = _NOT_YET + escape(str(error))
                    return web.Response(text=text, content_type="text/html", headers=_HEADERS)
                self._made = version, report_page({**data, "live": version})
        return web.Response(text=self._made[1], content_type="text/html", headers=_HEADERS)


@web.middleware
async def _refuse_other_hosts(request: web.Request, handler: Any) -> web.StreamResponse:
    """Refuse requests for other host names: a foreign page could read this one by DNS rebinding."""
    if request.url.host not in (HOST, "localhost"):
        raise web.HTTPForbidden(text=f"ask for http://{HOST}")
    return await handler(request)
