"""LoRA adapters of an SGLang server: one for each weight version that requests still use.

    load      POST /load_lora_adapter_from_tensors, under a name of its own; nothing is paused
    use       a request names the newest adapter (`lora_path`) and keeps it until it ends
    unload    POST /unload_lora_adapter, with a later load, once no request uses it

A sample is of one version from its first token to its last. SGLang keeps cached prefixes apart by
adapter and load, so a load flushes nothing. Requests name no adapter before the first load.

Order matters: SGLang looks for an unknown name on the Hugging Face hub, and an unload waits, with
every later load behind it, for the requests of that adapter.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from actors.sglang.admin import ServerAdmin
from distill.errors import EngineError
from distill.pace import loading_s
from distill.weights.adapter import AdapterTensors

logger = logging.getLogger(__name__)


class Traffic:
    """Calls under way."""

    def __init__(self) -> None:
        self._calls = 0
        self._last = time.monotonic()
        self._begun, self._ended = asyncio.Event(), asyncio.Event()
        self._ended.set()

    @property
    def idle_s(self) -> float:
        """Seconds since the last call ended; 0 while one is under way."""
        return 0.0 if self._calls else time.monotonic() - self._last

    @property
    def under_way(self) -> bool:
        return self._calls > 0

    @contextmanager
    def call(self) -> Iterator[None]:
        self._calls += 1
        self._begun.set()
        self._ended.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if self._calls == 0:
                self._last = time.monotonic()
                self._begun.clear()
                self._ended.set()

    async def begun(self) -> None:
        """Wait until a call is under way."""
        while not self._calls:  # it may have ended since the event was set
            await self._begun.wait()

    async def ended(self) -> None:
        await self._ended.wait()


class Adapters:
    """The adapters that a server holds; the newest serves new requests.

    Attributes:
        newest: its name; None: requests are served by the base.
        version: weight version of the newest.
    """

    def __init__(self, admin: ServerAdmin) -> None:
        self._admin = admin
        self._held: dict[str, Traffic] = {}  # by name, the oldest first
        self._loads = 0
        self._loading = asyncio.Lock()
        self.newest: str | None = None
        self.version: int | None = None

    @contextmanager
    def use(self) -> Iterator[dict[str, str]]:
        """Context of a call: fields of its requests, which name the newest adapter."""
        name = self.newest
        with nullcontext() if name is None else self._held[name].call():
            yield {} if name is None else {"lora_path": name}

    async def load(self, adapter: AdapterTensors, version: int) -> None:
        """Load an adapter, which then serves new requests.

        If the server has no room, waits for the requests of the oldest. Unloads those that no
        request uses.

        Raises:
            EngineError: it was not loaded; the server goes on with those it had.
        """
        async with self._loading:
            await self._load(adapter, version)

    async def _load(self, adapter: AdapterTensors, version: int) -> None:
        facts = await self._admin.facts()
        if facts.adapters < 2:  # the present one, and the new one
            raise EngineError(
                f"the server holds {facts.adapters} LoRA adapters: it was not started for them"
            )
        while len(self._held) >= facts.adapters:
            await self._unload(next(iter(self._held)))
        self._loads += 1  # a learner that resumes counts versions from its checkpoint again
        name = f"v{version}.{self._loads}"
        payload = base64.b64encode(adapter.pickled).decode()
        body = {
            "lora_name": name,
            "config_dict": adapter.form.config,
            "serialized_named_tensors": [payload] * facts.ranks,
            "expected_checksums": dict(adapter.checksums),
        }
        allowance_s = loading_s(len(payload) * facts.ranks)
        self._held[name] = Traffic()
        try:
            await self._admin.order(
                "/load_lora_adapter_from_tensors", body, allowance_s=allowance_s
            )
        except EngineError:
            await self._unload(name)  # an answer that was lost leaves it there
            raise
        self.newest, self.version = name, version
        for other, requests in list(self._held.items()):
            if other != name and not requests.under_way:
                await self._unload(other)

    async def _unload(self, name: str) -> None:
        """Unload an adapter once no request uses it, and forget it, whatever the server answers.

        SGLang gives up the name first. One that it never heard of it evicts by itself when it is
        full: as nobody uses it, it is the least recently used.
        """
        await self._held[name].ended()
        try:
            await self._admin.order("/unload_lora_adapter", {"lora_name": name})
        except EngineError as error:
            logger.warning("the adapter %s may not be unloaded: %s", name, error)
        del self._held[name]
