"""HTTP servers of this process, on the loopback address."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web
from anyio.from_thread import start_blocking_portal

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handle: Handler) -> AsyncIterator[str]:
    """Address of a server in this event loop; `handle` answers all requests."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextmanager
def serving_in_a_thread(handle: Handler) -> Iterator[str]:
    """Address of a server in its own thread, so that clients may start and end event loops."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(handle)) as address,
    ):
        yield address
