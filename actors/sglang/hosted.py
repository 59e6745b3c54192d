"""SGLang engine that starts and stops its own server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from actors.sglang.client import SglangClient
from actors.sglang.config import SglangConfig
from actors.sglang.engine import SglangEngine
from actors.sglang.nodes import RanksStore
from actors.sglang.parallelism import parallelism
from actors.sglang.server import SglangServer
from actors.sglang.start import MeetingPoint, start_server
from actors.sglang.weights import WeightSession
from distill.errors import ConfigError, EngineLost
from distill.models.checkpoint_names import pushed_shapes
from distill.models.loading import context_length, load_config, stop_token_ids, vocab_size
from distill.routing import MixtureShape
from distill.stops import StopTokens
from distill.weights.model_weights import BUCKET_BYTES

logger = logging.getLogger(__name__)


class HostedSglangEngine(SglangEngine):
    """An `Engine` that owns an SGLang server process.

    The constructor returns immediately, so that several servers start in parallel; every call waits
    until the server is ready.

    Args:
        server: a server started with these settings (`start_server`); None: start one.
        address: returns the address under which other nodes reach this one, for a server that spans
            several nodes: a `SglangFollower` on each other node joins it at `meeting_point`.
        push_bucket_bytes: maximum size of the portions in which a rank receives pushed weights.

    Raises:
        ConfigError: SGLang is not installed, or a flag cannot be set.
        CheckpointError: there is no model at `config.model`.
    """

    def __init__(
        self,
        config: SglangConfig,
        *,
        server: SglangServer | None = None,
        address: Callable[[], str] | None = None,
        push_bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        model = load_config(config.model)
        mixture = MixtureShape.of(model) if config.routed_experts else None
        if config.routed_experts and mixture is None:
            raise ConfigError(
                f"routed_experts=True: {config.model} is dense; leave it out",
            )
        nodes = parallelism(config.server_flags).nodes
        self._store: RanksStore | None = None
        if nodes > 1:
            if address is None:
                raise ConfigError(
                    f"server flags --nnodes {nodes}: an engine in this process runs on one node "
                    "only; use GPUs of one node (--tp-size), or a run on a Ray cluster",
                    field="server_flags",
                )
            self._store = RanksStore(address(), config.start_deadline_s)
        self.server = server = server or start_server(
            config, meeting_point=None if self._store is None else self._store.point
        )
        self._starting: asyncio.Task[None] | None = None
        client = SglangClient(
            lambda: server.url,
            api_key=server.api_key,
            admin_api_key=server.admin_api_key,
            deadline_s=config.request_deadline_s,
            exit_report=server.exit_report,
        )
        super().__init__(
            client,
            model=config.model,
            vocab_size=vocab_size(model),
            context_length=context_length(model),
            dtype=config.dtype,
            stops=config.stops or StopTokens.of([stop_token_ids(config.model)]),
            weights=WeightSession(
                client,
                config.on_weight_update,
                partial(pushed_shapes, config.model),
                bucket_bytes=push_bucket_bytes,
            ),
            mixture=mixture,
            first_request_s=config.start_deadline_s,
        )

    async def meeting_point(self) -> MeetingPoint:
        """Address at which ranks on the server's other nodes join it.

        Available before the server is ready.
        """
        assert self._store is not None, "the server runs on one node"
        return self._store.point

    async def close(self) -> None:
        """Close the client, and stop the server."""
        await super().close()
        self.server.stop()

    async def _ready(self) -> None:
        """Wait for the start of the server; all callers share one wait."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        await asyncio.shield(self._starting)
        if not self.server.running:
            raise EngineLost(self.server.exit_report())

    async def _start(self) -> None:
        await self.server.ready()
        model_context = self._context_length
        self._note_server(await self._client.server_info())
        if self._context_length < model_context:
            logger.warning(
                "the cache of %s's server is smaller than the model's context of %d tokens: "
                "samples end at %d; raise --max-total-tokens in server_flags",
                self._model, model_context, self._context_length,
            )  # fmt: skip
