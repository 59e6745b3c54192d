"""The SGLang engine with a server of its own: started with the engine, ended with it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from math import prod
from pathlib import Path

import torch

from actors.sglang.client import SglangClient
from actors.sglang.cuda_tools import find_cuda_tools
from actors.sglang.engine import SglangEngine
from actors.sglang.flags import InFlight, server_flags
from actors.sglang.installed import require_sglang
from actors.sglang.memory import ServerMemory
from actors.sglang.parallelism import parallelism
from actors.sglang.server import SglangServer
from actors.sglang.weights import WeightSession
from distill.errors import ConfigError
from distill.gpu import gpu_bytes
from distill.models.checkpoint_names import pushed_shapes
from distill.models.loading import (
    context_length,
    load_config,
    resolve_device,
    stop_token_ids,
    tensor_shapes,
    vocab_size,
)
from distill.nccl import nccl_settings
from distill.routing import MixtureShape
from distill.stops import StopTokens
from distill.weights.model_weights import BUCKET_BYTES

logger = logging.getLogger(__name__)

# SGLang keeps six positions of the context for itself and wants room for the token that a scoring
# request throws away. None of them is ever computed.
_SPARE_POSITIONS = 7
# SGLang's switch: DeepGEMM's kernels are compiled at the start, not when they are first used.
_PRECOMPILE = "SGLANG_JIT_DEEPGEMM_PRECOMPILE"


class HostedSglangEngine(SglangEngine):
    """An `Engine` that owns an SGLang server process.

    The constructor returns at once, so that several servers start side by side; every call waits
    until the server is ready.

    Args:
        model_path: Hugging Face checkpoint directory or hub name.
        dtype: float32 or bfloat16.
        device: auto, cpu or cuda.
        threads: threads of the server's kernels on the CPU.
        max_running_requests: most sequences decoded at once; more wait.
        flags: more of SGLang's own flags; they replace ours.
        in_flight: what a weight push does to the samples under way (actors/sglang/weights.py).
        push_bucket_bytes: most that a rank takes at once of weights that are pushed.
        gpu_share: the part of a GPU that the server may fill.
        gpu_beside: bytes of that part which are another process's.
        sleeps: it will be told to `sleep`.
        routed_experts: it can be asked for the experts of a mixture that tokens are routed to.
        host: address to listen on; only this process speaks to the server.
        log_path: file for what the server prints; None makes one without a name.
        environment: variables added to the server's.
        start_deadline_s, request_deadline_s: longest a start, and a request, may take.
        stops: where samples end, and whether that is one event; None: as the checkpoint says. A
            server ends at its checkpoint's and its tokenizer's own in any case.

    Raises:
        ConfigError: SGLang is not installed, or a flag that cannot be set.
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
        in_flight: InFlight = "continue",
        push_bucket_bytes: int = BUCKET_BYTES,
        gpu_share: float = 1,
        gpu_beside: int = 0,
        sleeps: bool = False,
        routed_experts: bool = False,
        host: str = "127.0.0.1",
        log_path: str | None = None,
        environment: dict[str, str] | None = None,
        start_deadline_s: float = 600,
        request_deadline_s: float = 1800,
        stops: StopTokens | None = None,
    ) -> None:
        require_sglang()
        config = load_config(model_path)
        device = resolve_device(device)
        if device.startswith("cuda"):
            for problem in find_cuda_tools(torch.version.cuda).sglang_problems():
                logger.warning("SGLang may not start on CUDA here: %s", problem)
        length = context_length(config)
        mixture = MixtureShape.of(config) if routed_experts else None
        if routed_experts and mixture is None:
            raise ConfigError(f"routed_experts=True: {model_path} is dense; leave it out")
        cache_tokens = None
        if device.startswith("cuda") and (gpu_share < 1 or gpu_beside):
            parameters = sum(map(prod, tensor_shapes(model_path).values()))
            memory = ServerMemory.of(
                config, parameters, dtype=dtype, max_running=max_running_requests, flags=flags
            )
            what = f"the server of {model_path}"
            cache_tokens = _cache_tokens(memory, gpu_share, gpu_beside, what, length)
        all_flags = server_flags(
            model=model_path,
            dtype=dtype,
            device=device,
            max_running_requests=max_running_requests,
            context_length=length + _SPARE_POSITIONS,
            cache_tokens=cache_tokens,
            sleeps=sleeps,
            routed_experts=routed_experts,
            extra=flags,
        )
        server = SglangServer(
            all_flags,
            environment=_environment(device, threads, parallelism(flags).gpus)
            | (environment or {}),
            host=host,
            log_path=None if log_path is None else Path(log_path),
            start_deadline_s=start_deadline_s,
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
            context_length=length,
            dtype=dtype,
            stops=StopTokens.of([stop_token_ids(model_path)]) if stops is None else stops,
            weights=WeightSession(
                client,
                in_flight,
                partial(pushed_shapes, model_path),
                bucket_bytes=push_bucket_bytes,
            ),
            seeded="--enable-deterministic-inference" in all_flags,
            mixture=mixture,
        )


def _cache_tokens(memory: ServerMemory, share: float, beside: int, what: str, least: int) -> int:
    """Tokens of the cache of a server that has a GPU not to itself.

    Raises:
        ConfigError: it does not fit, or no driver says how large the GPU is.
    """
    total = gpu_bytes()
    if total is None:
        raise ConfigError(
            "nvidia-smi does not say how large the GPU is that this engine shares; install the "
            "driver's tools, or use gpus_per_actor=1 without colocate"
        )
    return memory.tokens_in(int(total * share) - beside, what, least)


def _environment(device: str, threads: int, ranks: int) -> dict[str, str]:
    shared = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    if device != "cpu":
        # It compiles kernels of every batch size for minutes before a server is ready.
        precompile = os.environ.get(_PRECOMPILE, "false")
        return shared | nccl_settings() | {_PRECOMPILE: precompile}
    if ranks > 1:  # more than there are NUMA nodes, perhaps: SGLang asks for the CPUs of each
        shared["SGLANG_CPU_OMP_THREADS_BIND"] = cpus_of_ranks(
            sorted(os.sched_getaffinity(0)), ranks
        )
    return shared | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(threads)}


def cpus_of_ranks(cpus: Sequence[int], ranks: int) -> str:
    """An even part of the CPUs for each rank, as SGLang writes them: `0,1|2,3`.

    Ranks take turns where there are fewer CPUs.
    """
    parts = [cpus[rank::ranks] or [cpus[rank % len(cpus)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, part)) for part in parts)
