"""SGLang engine that owns its server: the server starts and stops with the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from actors.sglang.client import SglangClient
from actors.sglang.engine import SglangEngine
from actors.sglang.flags import OnWeightUpdate
from actors.sglang.nodes import MeetingPoint, RanksStore
from actors.sglang.parallelism import parallelism
from actors.sglang.server import SglangServer
from actors.sglang.start import start_server
from actors.sglang.weights import WeightSession
from distill.errors import ConfigError
from distill.models.checkpoint_names import pushed_shapes
from distill.models.loading import context_length, load_config, stop_token_ids, vocab_size
from distill.routing import MixtureShape
from distill.stops import StopTokens
from distill.weights.model_weights import BUCKET_BYTES


class HostedSglangEngine(SglangEngine):
    """An `Engine` that owns an SGLang server process.

    The constructor returns immediately, so that several servers start in parallel; every call waits
    until the server is ready.

    Args:
        model_path, dtype, flags, routed_experts, start_deadline_s: as `start_server` takes them.
            The server may be unresponsive as long as a start during the first request of a kind.
        on_weight_update: effect of a weight push on samples in progress (actors/sglang/weights.py).
        push_bucket_bytes: maximum size of the portions in which a rank receives pushed weights.
        request_deadline_s: time limit of a request, in seconds.
        stops: tokens that end samples, and whether they count as one event; None: the checkpoint's.
            A server also stops at the EOS tokens of its checkpoint and tokenizer in any case.
        server: a server started with these settings (`start_server`); None: start one.
        address: returns the address under which other nodes reach this one, for a server that spans
            several nodes: a `SglangFollower` on each other node joins it at `meeting_point`.
        settings: the other arguments of `start_server`.

    Raises:
        ConfigError: SGLang is not installed, or a flag cannot be set.
        CheckpointError: there is no model at `model_path`.
    """

    def __init__(
        self,
        *,
        model_path: str,
        dtype: str = "float32",
        flags: str = "",
        on_weight_update: OnWeightUpdate = "continue",
        push_bucket_bytes: int = BUCKET_BYTES,
        routed_experts: bool = False,
        start_deadline_s: float = 600,
        request_deadline_s: float = 1800,
        stops: StopTokens | None = None,
        server: SglangServer | None = None,
        address: Callable[[], str] | None = None,
        **settings: Any,
    ) -> None:
        config = load_config(model_path)
        mixture = MixtureShape.of(config) if routed_experts else None
        if routed_experts and mixture is None:
            raise ConfigError(
                f"routed_experts=True: {model_path} is dense; leave it out", field="routed_experts"
            )
        nodes = parallelism(flags).nodes
        self._store: RanksStore | None = None
        if nodes > 1:
            if address is None:
                raise ConfigError(
                    f"server flags --nnodes {nodes}: an engine of this process alone is on one "
                    "node; use GPUs of one node (--tp-size), or a run on a Ray cluster",
                    field="flags",
                )
            self._store = RanksStore(address(), start_deadline_s)
        server = server or start_server(
            model_path=model_path,
            dtype=dtype,
            flags=flags,
            routed_experts=routed_experts,
            start_deadline_s=start_deadline_s,
            meeting_point=None if self._store is None else self._store.point,
            **settings,
        )
        client = SglangClient(
            lambda: server.url,
            api_key=server.api_key,
            admin_api_key=server.admin_api_key,
            deadline_s=request_deadline_s,
            obituary=server.obituary,
        )
        super().__init__(
            client,
            server=server,
            model=model_path,
            vocab_size=vocab_size(config),
            context_length=context_length(config),
            dtype=dtype,
            stops=StopTokens.of([stop_token_ids(model_path)]) if stops is None else stops,
            weights=WeightSession(
                client,
                on_weight_update,
                partial(pushed_shapes, model_path),
                bucket_bytes=push_bucket_bytes,
            ),
            mixture=mixture,
            first_request_s=start_deadline_s,
        )

    async def meeting_point(self) -> MeetingPoint:
        """Address at which ranks on the server's other nodes join it.

        Available before the server is ready.
        """
        assert self._store is not None, "it is on one node"
        return self._store.point
