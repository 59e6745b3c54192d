"""Plan of GPU memory by role, with a check that it fits. `dry_run=True` prints it.

The plan needs no GPU. Sizes are computed from configs and checkpoints' headers, by the functions
that engines and learner workers use when they start (actors/sglang/memory.py and
learner/memory.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actors.config import EngineConfig
from actors.sglang.memory import ASLEEP_BYTES, ServerMemory
from cluster.config.common import CommonConfig
from cluster.config.on_policy import RolloutConfig
from cluster.placement.engines import learner_bytes_between_steps, learner_part
from cluster.placement.roles import turn_roles
from distill.errors import CheckpointError
from distill.gpu import GIB, gib, gpu_bytes, headroom, part_bytes
from distill.libraries import LINEAR_ATTENTION_INSTALL, has_linear_attention_kernels
from distill.models.loading import context_length, load_config, weight_files
from learner.pass_memory import PassMemory, PassPlan, PassRequest

_UNKNOWN = "sizes unknown: its files are not on this machine"


def server_memory(engine: EngineConfig) -> ServerMemory | None:
    """GPU memory of an engine's server; None if its checkpoint is not on this machine."""
    return ServerMemory.of_checkpoint(engine) if weight_files(engine.model) else None


def gpu_lines(
    config: CommonConfig, engines: Mapping[str, EngineConfig], longest_rows: int
) -> list[str]:
    """Lines about the GPU memory of a run.

    Args:
        engines: settings by role, without engines that the run does not start.
        longest_rows: see `LearnerConfig`; 0: unknown.

    Raises:
        ConfigError: a role does not fit into its part of a GPU.
    """
    asked = config.cluster.gpu_memory_gib
    total = gpu_bytes() if asked is None else int(asked * GIB)
    if total is None:
        first = (
            "memory   of a GPU unknown, no driver answers on this machine: give for "
            "example gpu_memory_gib=80"
        )
    else:
        free = gib(headroom(total))
        first = f"memory   {gib(total)} GiB a GPU, of which {free} stay free, in GiB:"
    roles = {} if config.only_keeps else {"learner": _learner(config, total, longest_rows)}
    for role, engine in engines.items():
        if engine.kind == "sglang":
            roles[role] = _server(role, engine, total, by_turns=role in turn_roles(config))
    width = max(map(len, roles), default=0)
    lines = [f"  {role.ljust(width)}  {line}" for role, line in roles.items()]
    return [first, *lines, *_slow_layers(config)]


def _slow_layers(config: CommonConfig) -> list[str]:
    """Warning if the learner's layers would run with transformers' slow reference code."""
    if config.only_keeps or has_linear_attention_kernels():
        return []
    try:
        model = load_config(config.model.path).get_text_config()
    except CheckpointError:  # the model is on the hub and not cached
        return []
    if "linear_attention" not in (getattr(model, "layer_types", None) or ()):
        return []
    return [
        "         the learner's linear attention would run slow reference code; where the "
        f"learner runs: {LINEAR_ATTENTION_INSTALL}"
    ]


def _server(role: str, engine: EngineConfig, total: int | None, *, by_turns: bool) -> str:
    memory = server_memory(engine)
    if memory is None:
        return _UNKNOWN
    beside = f"; {gib(ASLEEP_BYTES)} asleep" if engine.sleeps else ""
    if by_turns:
        beside += f", and {gib(memory.weights)} of main memory"
    if total is None:
        return f"{_parts(memory)} + cache ({memory.token or '?'} bytes a token){beside}"
    if engine.shares_gpu:
        room = part_bytes(total, engine.gpu_share, engine.gpu_reserved)
    else:
        room, memory = total, memory.alone(total)
    if memory.token is None and memory.fixed_tokens is None and not engine.shares_gpu:
        return f"{_parts(memory)} + states and caches that SGLang sizes, of {gib(room)}{beside}"
    least = context_length(load_config(engine.model))
    tokens = memory.tokens_in(room, f"{role} ({engine.model})", least)
    cache = (memory.token or 0) * tokens
    return (
        f"{_parts(memory)} + cache {gib(cache)} ({tokens} tokens) = "
        f"{gib(memory.bytes(tokens))} of {gib(room)}{beside}"
    )


def _learner(config: CommonConfig, total: int | None, longest_rows: int) -> str:
    memory = config.learner_memory()
    if memory is None:
        return _UNKNOWN
    sleeps = isinstance(config, RolloutConfig) and config.engines_sleep
    memory = replace(memory, offloads=memory.offloads or sleeps)
    copies = f"copies of teachers {gib(memory.own_frozen)} + " if memory.frozen else ""
    where = " (in main memory between updates)" if memory.offloads else ""
    line = (
        f"weights {gib(memory.weights)} + {copies}gradients {gib(memory.gradients)} + "
        f"moments {gib(memory.moments)}{where}"
    )
    if total is None:
        return f"{line} + passes"
    room = part_bytes(total, *learner_part(config))
    memory.require_room(room, config.model.path)
    plan = memory.plan(room, PassRequest.of(config.learner, longest_rows))
    passes = memory.passes
    if plan is not None and passes is not None:
        line += f" + passes {_described(passes, plan, longest_rows)}"
        if plan.reduces_once:
            line += f" + whole gradients {gib(memory.whole_gradients)} (summed once a step)"
    if isinstance(config, RolloutConfig) and config.learner_takes_turns:
        return f"{line} of {gib(room)}; {gib(learner_bytes_between_steps(config))} at rest"
    return f"{line} of {gib(room)}"


def _described(passes: PassMemory, plan: PassPlan, longest_rows: int) -> str:
    tokens = max(plan.token_budget, longest_rows)
    size = passes.of_plan(plan, longest_rows)
    how = " recomputed" if plan.gradient_checkpointing else ""
    return f"{gib(size)} ({tokens} tokens{how})"


def _parts(memory: ServerMemory) -> str:
    return f"weights {gib(memory.weights)} + working {gib(memory.working)}"
