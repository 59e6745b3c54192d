"""Longest delay of heartbeats while a teacher's large answer is parsed.

    python -m benchmarks.decoding [samples=16] [tokens=16384] [k=64]

An `SglangEngine` scores a group with the k likeliest tokens of each position over HTTP. The server,
in another process, returns a generated answer that was serialised before. A heartbeat on the
engine's event loop measures its own delay. `in one piece` is the same answer as one request, parsed
on the event loop; `nothing` is one second without work, which shows the machine's own delays.

    blocked   largest delay of a heartbeat, seconds
    CPU       most CPU seconds of the process between two heartbeats: the delay on an idle machine
    seconds   from the request to the last score
"""

from __future__ import annotations

import asyncio
import base64
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import chz
import numpy as np
import orjson
from aiohttp import web
from rich.console import Console
from rich.table import Table

from actors.sglang.client import SglangClient
from actors.sglang.engine import SglangEngine
from cluster.command import run_command
from distill.engine import Score, ScoreRequest

VOCAB_SIZE = 152_000
PROMPT = 256
T = 0.7
_BEAT_S = 0.005


@chz.chz
class DecodingConfig:
    """Delay of heartbeats while a large answer is parsed."""

    samples: int = chz.field(default=16, doc="samples of the group")
    tokens: int = chz.field(default=16384, doc="tokens of each")
    k: int = chz.field(default=64, doc="likeliest tokens at each position")


def _answer(tokens: int, k: int) -> bytes:
    """SGLang's answer for one sample; all its tokens are 7."""
    rng = np.random.default_rng(0)
    ids_NK = np.argsort(rng.random((64, k + 64)), axis=1)[:, :k].astype("<i4")
    ids_NK = np.resize(ids_NK, (tokens, k))
    values_NK = np.resize(-np.sort(rng.uniform(5, 20, size=(64, k))), (tokens, k)).astype("<f4")
    meta = {
        "input_token_logprobs": [[None, 7, None], *[[-1.5, 7, None]] * tokens],
        "input_logprob_temperature": [T],
        "input_logprobs_unscaled": [[-1.75] * tokens],
        "input_top_logprobs_shape": [tokens, k],
        "input_top_logprobs_null_prefix": 1,
        "finish_reason": {"type": "length", "length": 1},
        "weight_version": "0",
    }
    for name, block, dtype in (("idx", ids_NK, "int32"), ("val", values_NK, "float32")):
        content = base64.b64encode(block.tobytes()).decode()
        meta |= {
            f"input_top_logprobs_{name}_flat_b64": content,
            f"input_top_logprobs_{name}_flat_b64_dtype": dtype,
        }
    return orjson.dumps({"output_ids": [7], "meta_info": meta})


def _serve(tokens: int, k: int, port: Any) -> None:
    one = _answer(tokens, k)

    async def generate(request: web.Request) -> web.Response:
        number = len(orjson.loads(await request.read())["input_ids"])
        return web.Response(body=b"[" + b",".join([one] * number) + b"]")

    async def run() -> None:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_post("/generate", generate)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def _served(tokens: int, k: int) -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    port = context.Queue()
    process = context.Process(target=_serve, args=(tokens, k, port), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port.get(timeout=120)}"
    finally:
        process.kill()
        process.join(10)


async def _latest_beat(work: Callable[[], Awaitable[Any]]) -> dict[str, float]:
    """Columns of the table for some work that runs concurrently with heartbeats."""
    task, late, cpu, began = asyncio.ensure_future(work()), 0.0, 0.0, time.perf_counter()
    while not task.done():
        before, used = time.perf_counter(), time.process_time()
        await asyncio.sleep(_BEAT_S)
        late = max(late, time.perf_counter() - before - _BEAT_S)
        cpu = max(cpu, time.process_time() - used)
    await task
    return {"blocked": late, "cpu": cpu, "seconds": time.perf_counter() - began}


async def _measure(url: str, config: DecodingConfig, *, in_one_piece: bool) -> dict[str, float]:
    client = SglangClient(lambda: url, api_key=None, admin_api_key=None, deadline_s=600)
    engine = SglangEngine(
        client, model="made up", vocab_size=VOCAB_SIZE,
        context_length=PROMPT + config.tokens, dtype="float32", stops=None, weights=None,
    )  # fmt: skip
    tokens_T = np.full(PROMPT + config.tokens, 7, np.int32)
    request = ScoreRequest(tokens_T=tokens_T, start=PROMPT, temperatures=(T, 1.0), top_k=config.k)

    async def on_the_loop(function: Callable[[], Any]) -> Any:
        return function()

    async def score() -> None:
        scores: list[Score] = await engine.score([request] * config.samples)
        assert all(s.top is not None and len(s.top.ids_NK) == config.tokens for s in scores)

    try:
        if not in_one_piece:
            return await _latest_beat(score)
        with (
            mock.patch("actors.sglang.requests.ANSWER_BYTES", 1 << 40),
            mock.patch.object(client, "_aside", on_the_loop),
        ):
            return await _latest_beat(score)
    finally:
        await client.close()


async def _nothing() -> dict[str, float]:
    return await _latest_beat(lambda: asyncio.sleep(1))


def measure_decoding(config: DecodingConfig) -> dict[str, dict[str, float]]:
    with _served(config.tokens, config.k) as url:
        return {
            "nothing": asyncio.run(_nothing()),
            "in one piece": asyncio.run(_measure(url, config, in_one_piece=True)),
            "now": asyncio.run(_measure(url, config, in_one_piece=False)),
        }


def decoding_table(found: dict[str, dict[str, float]]) -> Table:
    table = Table(title="a teacher's likeliest tokens, read")
    for column in ("", "blocked s", "CPU s", "seconds"):
        table.add_column(column, justify="right" if column else "left")
    for name, cost in found.items():
        table.add_row(name, *(f"{cost[c]:.3f}" for c in ("blocked", "cpu", "seconds")))
    return table


def print_table(config: DecodingConfig, console: Console) -> None:
    console.print(decoding_table(measure_decoding(config)))


if __name__ == "__main__":
    raise SystemExit(run_command(DecodingConfig, print_table, None))
