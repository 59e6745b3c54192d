"""What a run takes of each GPU, role by role, and whether it fits: `dry_run=True` prints it.

Nothing here looks at a GPU. Sizes follow from configs and checkpoints' headers, by the functions
that engines and learner workers use when they start (actors/sglang/memory.py, learner/memory.py).
"""

from __future__ import annotations

from actors.config import EngineConfig, choose_dtype
from actors.sglang.memory import ASLEEP_BYTES, ServerMemory
from cluster.config.common import CommonConfig
from cluster.config.on_policy import RolloutConfig
from cluster.config.supervised import SupervisedConfig
from distill.gpu import GIB, gib, gpu_bytes
from distill.models.loading import context_length, load_config
from learner.memory import WorkerMemory, estimate_memory, estimate_pass, fit_pass

_UNKNOWN = "sizes unknown: its files are not on this machine"


def trained_model(config: CommonConfig) -> str:
    """The checkpoint that the learner starts from."""
    if isinstance(config, RolloutConfig):
        return config.student
    assert isinstance(config, SupervisedConfig)
    return config.model


def server_memory(engine: EngineConfig) -> ServerMemory | None:
    """GPU memory of an engine's server; None if its checkpoint is not here."""
    estimate = estimate_memory(engine.model)
    if estimate is None:
        return None
    return ServerMemory.of(
        load_config(engine.model),
        estimate.parameters,
        dtype=engine.dtype,
        max_running=engine.max_running_requests,
        flags=engine.server_flags,
    )


class GpuPlan:
    """Lines on the GPU memory of one run.

    Args:
        engines: settings by role; those that run elsewhere left out.
    """

    def __init__(self, config: CommonConfig, device: str, engines: dict[str, EngineConfig]) -> None:
        self._config, self._device, self._engines = config, device, engines
        asked = config.gpu_memory_gib
        self._total = gpu_bytes() if asked is None else int(asked * GIB)

    def lines(self) -> list[str]:
        """Raises ConfigError if a role does not fit onto its part of a GPU."""
        if self._total is None:
            first = "memory   of a GPU unknown, no driver answers here: gpu_memory_gib=80, say"
        else:
            first = f"memory   {gib(self._total)} GiB a GPU, in GiB:"
        roles = {} if self._config.only_keeps else {"learner": self._learner()}
        for role, engine in self._engines.items():
            if engine.kind == "sglang":
                roles[role] = self._server(role, engine)
        width = max(map(len, roles), default=0)
        return [first, *(f"  {role.ljust(width)}  {line}" for role, line in roles.items())]

    def _server(self, role: str, engine: EngineConfig) -> str:
        memory = server_memory(engine)
        if memory is None:
            return _UNKNOWN
        parts = f"weights {gib(memory.weights)} + working {gib(memory.working)}"
        beside = f"; {gib(ASLEEP_BYTES)} asleep" if engine.sleeps else ""
        if self._total is None:
            return f"{parts} + cache ({memory.token or '?'} bytes a token){beside}"
        room = int(self._total * engine.gpu_share) - engine.gpu_beside
        least = context_length(load_config(engine.model))
        tokens = memory.tokens_in(room, f"{role} ({engine.model})", least)
        cache = (memory.token or 0) * tokens
        return (
            f"{parts} + cache {gib(cache)} ({tokens} tokens) = {gib(memory.bytes(tokens))} of "
            f"{gib(room)}{beside}"
        )

    def _learner(self) -> str:
        config, model = self._config, trained_model(self._config)
        estimate = estimate_memory(model)
        if estimate is None:
            return _UNKNOWN
        sleeps = isinstance(config, RolloutConfig) and config.engines_sleep_on(self._device)
        memory = WorkerMemory.of(
            estimate.parameters,
            adapter=config.trains_adapter,
            workers=config.learner_workers,
            offloads=config.offload_optimizer or sleeps,
            followed=config.teacher_rule is not None,
        )
        line = (
            f"weights {gib(memory.weights)} + gradients {gib(memory.gradients)} + moments "
            f"{gib(memory.moments)}{' (in main memory but for their step)' * memory.offloads}"
        )
        if self._total is None:
            return f"{line} + passes"
        room = self._learner_room(sleeps)
        return f"{line}{self._passes(memory, room)} of {gib(room)}"

    def _learner_room(self, sleeps: bool) -> int:
        assert self._total is not None
        if not sleeps:
            return int(self._total * min(1.0, self._config.gpus_per_actor))
        return self._total - ASLEEP_BYTES

    def _passes(self, memory: WorkerMemory, room: int) -> str:
        """The passes that fit. Raises ConfigError if none do."""
        config = self._config
        passes = estimate_pass(
            trained_model(config),
            dtype=choose_dtype(config.learner_dtype, self._device),
            device=self._device,
            workers=config.learner_workers,
        )
        memory.require_room(room, trained_model(config))
        if passes is None:
            return ""
        plan = fit_pass(
            passes,
            room - memory.beside_passes,
            device=self._device,
            token_budget=config.token_budget,
            gradient_checkpointing=config.gradient_checkpointing,
        )
        size = passes.bytes(plan.token_budget, checkpointing=plan.gradient_checkpointing)
        how = " recomputed" if plan.gradient_checkpointing else ""
        return f" + passes {gib(size)} ({plan.token_budget} tokens{how})"
