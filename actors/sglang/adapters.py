"""LoRA adapters of an SGLang server: one for each weight version that requests still use.

    load      POST /load_lora_adapter_from_tensors, under a new name; nothing is paused
    use       a request names the newest adapter (`lora_path`) and uses that adapter until it ends
    unload    POST /unload_lora_adapter, during a later load, once no request uses the adapter

All tokens of a sample have the same version. SGLang caches prefixes separately for each adapter and
load, so a load flushes nothing. Before the first load, requests name no adapter.

Order matters: SGLang looks for an unknown adapter name on the Hugging Face hub. An unload waits for
the requests of its adapter and blocks all later loads until then.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from actors.sglang.client import SglangClient
from distill.errors import EngineError
from distill.pace import loading_s
from distill.weights.adapter import AdapterTensors

logger = logging.getLogger(__name__)


class CallCounter:
    """Counter of the calls in progress, with waits for a first call and for the end of all."""

    def __init__(self) -> None:
        self._calls = 0
        self._last = time.monotonic()
        self._busy, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()

    @property
    def idle_s(self) -> float:
        """Seconds since the last call ended; 0 while a call is in progress."""
        return 0.0 if self._calls else time.monotonic() - self._last

    @property
    def in_progress(self) -> bool:
        return self._calls > 0

    @contextmanager
    def call(self) -> Iterator[None]:
        self._calls += 1
        self._busy.set()
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if self._calls == 0:
                self._last = time.monotonic()
                self._busy.clear()
                self._idle.set()

    async def wait_for_call(self) -> None:
        """Wait until a call is in progress."""
        while not self._calls:  # the call may have ended since the event was set
            await self._busy.wait()

    async def wait_until_idle(self) -> None:
        await self._idle.wait()


class Adapters:
    """The adapters that a server holds. New requests use the newest one.

    Attributes:
        newest: name of the newest adapter; None: requests use the base model.
        version: weight version of the newest adapter.
    """

    def __init__(self, client: SglangClient) -> None:
        self._client = client
        # Adapter name -> its requests; oldest adapter first.
        self._held: dict[str, CallCounter] = {}
        self._loads = 0
        self._loading = asyncio.Lock()
        self.newest: str | None = None
        self.version: int | None = None

    @contextmanager
    def use(self) -> Iterator[dict[str, str]]:
        """Context manager for a call: yields request fields that name the newest adapter."""
        name = self.newest
        with nullcontext() if name is None else self._held[name].call():
            yield {} if name is None else {"lora_path": name}

    async def load(self, adapter: AdapterTensors, version: int) -> None:
        """Load an adapter, and use it for new requests.

        If the server is full, wait for the requests of the oldest adapter and unload it first.
        Afterwards, unload all older adapters that no request uses.

        Raises:
            EngineError: the adapter was not loaded; the server continues with its other adapters.
        """
        async with self._loading:
            await self._load(adapter, version)

    async def _load(self, adapter: AdapterTensors, version: int) -> None:
        facts = await self._client.facts()
        if facts.adapters < 2:  # the current adapter and the new one
            raise EngineError(
                f"the server holds at most {facts.adapters} LoRA adapters, and pushes of adapters "
                "need 2: it was started without adapter flags"
            )
        while len(self._held) >= facts.adapters:
            await self._unload(next(iter(self._held)))
        # Makes the name unique: a resumed learner repeats version numbers after its checkpoint.
        self._loads += 1
        name = f"v{version}.{self._loads}"
        payload = base64.b64encode(adapter.pickled).decode()
        body = {
            "lora_name": name,
            "config_dict": adapter.form.config,
            "serialized_named_tensors": [payload] * facts.ranks,
            "expected_checksums": dict(adapter.checksums),
        }
        allowance_s = loading_s(len(payload) * facts.ranks)
        self._held[name] = CallCounter()
        try:
            await self._client.order(
                "/load_lora_adapter_from_tensors", body, allowance_s=allowance_s
            )
        except EngineError:
            await self._unload(name)  # it may be loaded, if only the answer was lost
            raise
        self.newest, self.version = name, version
        for other, requests in list(self._held.items()):
            if other != name and not requests.in_progress:
                await self._unload(other)

    async def _unload(self, name: str) -> None:
        """Unload an adapter once no request uses it, and forget it even if the server fails.

        SGLang unregisters the name before it unloads. If the request does not reach the server,
        SGLang evicts the adapter when it is full: an unused adapter is the least recently used one.
        """
        await self._held[name].wait_until_idle()
        try:
            await self._client.order("/unload_lora_adapter", {"lora_name": name})
        except EngineError as error:
            logger.warning("the adapter %s may still be loaded: %s", name, error)
        del self._held[name]
