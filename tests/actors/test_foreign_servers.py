"""Clients of servers that others run follow no redirect and read no endless answer."""

from collections.abc import Awaitable, Callable, Iterator

import pytest
from aiohttp import web

import actors.rollout.text_endpoint
import actors.sglang.client
from actors.envs.judge import Judge, judge_address
from actors.rollout.text_endpoint import AnswerLimits, EndpointAddress, text_endpoint
from actors.sglang.client import SglangClient
from distill.errors import EngineError
from distill.sampling import TrainSampling
from tests.actors.serving import serving_in_a_thread


class Server:
    """Redirect all requests to another path, or answer without an end; count both."""

    def __init__(self, redirects: bool) -> None:
        self.redirects, self.followed, self.sent = redirects, 0, 0
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.redirects and request.path != "/elsewhere":
            raise web.HTTPTemporaryRedirect("/elsewhere")
        self.followed += self.redirects
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while not self.redirects and self.sent < 64 << 20:
            await response.write(b"x" * (1 << 16))
            self.sent += 1 << 16
        return response


@pytest.fixture(params=[True, False], ids=["redirects", "never ends"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for module in (actors.sglang.client, actors.rollout.text_endpoint):
        monkeypatch.setattr(module, "LARGEST_ANSWER", 1 << 20)
    made = Server(request.param)
    with serving_in_a_thread(made.handle) as address:
        made.url = f"{address}/v1"
        yield made


async def scores(url: str) -> None:
    client = SglangClient(lambda: url, api_key="k", admin_api_key=None, deadline_s=30)
    try:
        await client.post("/generate", {"input_ids": [1]})
    finally:
        await client.close()


async def judges(url: str) -> None:
    limits = AnswerLimits(attempt_s=30, all_s=30, attempts=1)
    judge = Judge(address=judge_address(url, "m"), limits=limits)
    await judge.score("What is 1 + 1?", "2", "right or wrong")


async def writes(url: str) -> None:
    address = EndpointAddress(url=url, name="m", url_setting="samples_from", name_setting="n")
    limits = AnswerLimits(attempt_s=30, all_s=30, attempts=1)
    sampling = TrainSampling(temperature=1.0, max_new_tokens=4)
    async with text_endpoint(address, limits=limits, max_concurrent=1) as endpoint:
        await endpoint.answer("1 + 1 = ?", sampling)


@pytest.mark.parametrize("ask", [scores, judges, writes])
async def test_a_server_keeps_to_its_address_and_to_a_size(
    server: Server, ask: Callable[[str], Awaitable[None]]
) -> None:
    with pytest.raises(EngineError):
        await ask(server.url)
    assert server.followed == 0
    assert server.sent < 32 << 20  # plus the buffers of sockets
