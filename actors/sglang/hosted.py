"""SGLang engine that owns its server: the server starts and stops with the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
        model_path: Hugging Face checkpoint directory or hub name.
        dtype: float32 or bfloat16.
        device: auto, cpu or cuda.
        threads: threads of the server's kernels on the CPU.
        max_running_requests: maximum number of sequences decoded concurrently; others are queued.
        flags: additional SGLang flags; they override the flags that this class sets.
        on_weight_update: effect of a weight push on samples in progress (actors/sglang/weights.py).
        push_bucket_bytes: maximum size of the portions in which a rank receives pushed weights.
        gpu_share: fraction of a GPU that the server may fill.
        gpu_beside: bytes of that fraction which another process uses.
        sleeps: enable `sleep`, which releases the GPU memory.
        turn: file of the turn on GPUs that the server shares (actors/sglang/turns.py).
        routed_experts: enable requests for the experts that tokens are routed to.
        log_path: file for the server's output; None: an unnamed temporary file.
        environment: variables added to the server's environment.
        start_deadline_s, request_deadline_s: time limits of the start and of a request, in seconds.
            The server may be unresponsive as long as a start during the first request of a kind.
        stops: tokens that end samples, and whether they count as one event; None: the checkpoint's.
            A server also stops at the EOS tokens of its checkpoint and tokenizer in any case.
        server: a server started with these settings (`start_server`); None: start one.
        address: returns the address under which other nodes reach this one, for a server that spans
            several nodes: a `SglangFollower` on each other node joins it at `meeting_point`.

    Raises:
        ConfigError: SGLang is not installed, or a flag cannot be set.
        CheckpointError: there is no model at `model_path`.
    """

    def __init__(
        self,
        *,
        model_path: str,
        dtype: str = "float32",
        device: str = "auto",
        threads: int = 1,
        max_running_requests: int = 256,
        flags: str = "",
        on_weight_update: OnWeightUpdate = "continue",
        push_bucket_bytes: int = BUCKET_BYTES,
        gpu_share: float = 1,
        gpu_beside: int = 0,
        sleeps: bool = False,
        turn: str | None = None,
        routed_experts: bool = False,
        log_path: str | None = None,
        environment: dict[str, str] | None = None,
        start_deadline_s: float = 600,
        request_deadline_s: float = 1800,
        stops: StopTokens | None = None,
        server: SglangServer | None = None,
        address: Callable[[], str] | None = None,
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
            device=device,
            threads=threads,
            max_running_requests=max_running_requests,
            flags=flags,
            gpu_share=gpu_share,
            gpu_beside=gpu_beside,
            sleeps=sleeps,
            turn=turn,
            routed_experts=routed_experts,
            log_path=log_path,
            environment=environment,
            start_deadline_s=start_deadline_s,
            meeting_point=None if self._store is None else self._store.point,
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
            seeded=False,  # until /server_info is read at the end of the start
            mixture=mixture,
            first_request_s=start_deadline_s,
        )

    async def meeting_point(self) -> MeetingPoint:
        """Address at which ranks on the server's other nodes join it.

        Available before the server is ready.
        """
        assert self._store is not None, "it is on one node"
        return self._store.point
