"""Start of an SGLang server from an engine's settings, or of its processes on one node.

A server spends its first 20 s importing torch and SGLang. If the settings contain the model's
context length, the server is started without importing torch in this process, so that both import
at the same time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import chz

from actors.sglang.config import SglangConfig
from actors.sglang.cuda_tools import cuda_home, find_cuda_tools
from actors.sglang.flags import server_flags
from actors.sglang.installed import require_sglang
from actors.sglang.parallelism import Parallelism, parallelism
from actors.sglang.server import SglangServer
from distill.errors import ConfigError
from distill.gpu import gpu_bytes, part_bytes
from distill.gpu_turn import GpuTurn
from distill.process_groups import INTERFACE, interface_towards, nccl_settings

if TYPE_CHECKING:
    from actors.sglang.memory import ServerMemory

logger = logging.getLogger(__name__)

# SGLang reserves six positions of the context, and requires room for the token that a scoring
# request samples and discards. No model computes these positions.
_SPARE_POSITIONS = 7
# SGLang's variable that includes captured graphs in the memory saver.
_GRAPHS_SLEEP = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
# SGLang's variable that compiles DeepGEMM's kernels at the start, not when they are first used.
_PRECOMPILE = "SGLANG_JIT_DEEPGEMM_PRECOMPILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """Address and port of the store of a server's ranks, on node 0."""

    address: str
    port: int

    def flags(self, node: int) -> list[str]:
        """SGLang's flags for the processes of one node."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return ["--node-rank", str(node), "--dist-init-addr", f"{host}:{self.port}"]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make every rank join the store, and no rank open one."""
        variables = {
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "env://",
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        interface = interface_towards(self.address)
        if interface is not None and INTERFACE not in os.environ:
            variables[INTERFACE] = interface
        return variables


def start_server(
    config: SglangConfig, *, meeting_point: MeetingPoint | None = None, node: int = 0
) -> SglangServer:
    """Start a server, or its processes on one node, without waiting until it is ready.

    If the settings have a `turn`, wait for the turn first.

    Args:
        meeting_point: meeting point of a server on several nodes; None: one node.
        node: index of this node.

    Raises:
        ConfigError: SGLang is not installed, or a flag cannot be set.
        CheckpointError: there is no model at `config.model`.
    """
    require_sglang()
    context_length = config.context_length
    if context_length is None:
        from distill.models import loading  # torch

        config = chz.replace(config, device=loading.resolve_device(config.device))
        context_length = loading.context_length(loading.load_config(config.model))
    device, cache_tokens = config.device, None
    if device.startswith("cuda") and config.shares_gpu:
        from actors.sglang.memory import ServerMemory  # torch

        memory = ServerMemory.of_checkpoint(config)
        cache_tokens = _cache_tokens(memory, config, context_length)
    flags = server_flags(config, context_length + _SPARE_POSITIONS, cache_tokens)
    variables = server_environment(device, config.threads, parallelism(config.server_flags))
    if config.sleeps and device != "cpu":  # otherwise captured graphs stay on the GPU
        variables[_GRAPHS_SLEEP] = os.environ.get(_GRAPHS_SLEEP, "true")
    if meeting_point is not None:
        flags += meeting_point.flags(node)
        variables = meeting_point.environment | variables
    gpu_turn = None if config.turn is None else GpuTurn(Path(config.turn))
    if gpu_turn is not None:
        gpu_turn.acquire()
    server = SglangServer(
        flags,
        environment=variables,
        log_path=None if config.log_path is None else Path(config.log_path),
        start_deadline_s=config.start_deadline_s,
        # On CUDA a start includes the first token, with the compilation of its kernels. Nodes
        # other than the first serve only /health.
        ready_path="/ready" if device == "cpu" and not node else "/health",
        # On several nodes a restart is impossible: the other ranks have met those of this start.
        port_attempts=1 if meeting_point else 3,
        turn=gpu_turn,
    )
    if device.startswith("cuda"):
        _warn_of_missing_tools()
    return server


def _warn_of_missing_tools() -> None:
    import torch

    for problem in find_cuda_tools(torch.version.cuda).sglang_problems():
        logger.warning("SGLang may not start on CUDA here: %s", problem)


def _cache_tokens(memory: ServerMemory, config: SglangConfig, least: int) -> int:
    """Number of cached tokens of a server that shares its GPU.

    Raises:
        ConfigError: fewer than `least` tokens fit, or the size of the GPU is unknown.
    """
    total = gpu_bytes()
    if total is None:
        raise ConfigError(
            "nvidia-smi does not report the memory of the GPU that this engine shares; install "
            "the driver's tools, or use gpus_per_actor=1 without colocate",
            field="cluster.gpus_per_actor",
        )

    room = part_bytes(total, config.gpu_share, config.gpu_reserved)
    return memory.tokens_in(room, f"the server of {config.model}", least)


def server_environment(device: str, threads: int, spread: Parallelism) -> dict[str, str]:
    shared = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    if device != "cpu":
        # Off by default: it compiles kernels for every batch size for minutes during the start.
        precompile = os.environ.get(_PRECOMPILE, "false")
        home = cuda_home()
        toolkit = {} if home is None else {"CUDA_HOME": home}
        return shared | nccl_settings() | toolkit | {_PRECOMPILE: precompile}
    if spread.gpus > 1:  # SGLang's own binding needs a NUMA node for each rank
        shared["SGLANG_CPU_OMP_THREADS_BIND"] = cpus_of_ranks(
            sorted(os.sched_getaffinity(0)), spread.gpus_a_node
        )
    return shared | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(threads)}


def cpus_of_ranks(cpus: Sequence[int], ranks: int) -> str:
    """Split the CPUs evenly over the ranks, in SGLang's notation: `0,1|2,3`.

    If there are fewer CPUs than ranks, several ranks share a CPU.
    """
    parts = [cpus[rank::ranks] or [cpus[rank % len(cpus)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, part)) for part in parts)
