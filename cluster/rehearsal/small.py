"""The rehearsal's run: the user's settings, with small random twins of their models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chz

from actors.sglang.address import is_url
from cluster.config.on_policy import RolloutConfig
from cluster.config.pools import PoolSize
from cluster.config.teachers import teacher_setting
from distill.models.twins import Twin, save_twin
from distill.rewards.model_reward import PREFIX
from distill.rules import get
from distill.settings import changed, fields_of

# Upper limits of sizes in the small run.
_MOST = {
    "data.batch_size": 4, "sampling.group_size": 4, "sampling.max_new_tokens": 24,
    "eval.max_new_tokens": 24,
    "eval.size": 4, "eval.samples": 2, "learner.workers": 2, "eval.engines": 1,
    "objective.num_substeps": 4,
    "lora.rank": 8, "objective.overlong_buffer": 12, "learner.warmup_steps": 1,
    "teacher.sft_steps": 1, "teacher.lag": 2,
}  # fmt: skip
_POOLS = ("policy.engines", "teacher.engines", "rollout.workers")
_MOST_ACTORS = 2
# Settings for GPUs, for clusters of many nodes, for the real models or for observers; they are
# reset to their defaults.
_NOT_HERE = (
    "cluster.gpus_per_actor", "cluster.gpu_memory_gib", "cluster.colocate",
    "learner.replicas", "learner.offload_optimizer", "learner.liger", "learner.compile",
    "learner.dtype", "policy.server_flags", "teacher.server_flags", "weights.transport",
    "engine.dtype", "rollout.cpus", "teacher.gpus",
    "cluster.local", "tracking.track", "tracking.wandb", "tracking.notify", "fork_from",
    "lora.adapter", "learner.trace_step",
    "checkpoint.keep_every", "checkpoint.keep_best", "learner.token_budget",
    "queue.groups_in_flight", "cluster.start_deadline_s",
)  # fmt: skip
# Upper limit of steps. The run ends long before, when all actors have been killed and recovered.
STEPS_AT_MOST = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallRun:
    """Settings and models of the rehearsal.

    Attributes:
        twins: twins of the models, by the setting that names the model.
        stand_ins: addresses of external teachers, by setting; a twin of the student replaces each.
        left_out: settings given by the user that the rehearsal does not use.
    """

    config: RolloutConfig
    twins: dict[str, Twin] = field(default_factory=dict)
    stand_ins: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def small_run(config: RolloutConfig, out: Path) -> SmallRun:
    """Write the twins under `out`, and derive the settings of the small run.

    Raises:
        CheckpointError: a model's family cannot be scaled down.
    """
    twins, stand_ins = {}, {}
    for seed, (name, model) in enumerate(_models(config)):
        elsewhere = is_url(model)
        if elsewhere:
            stand_ins[name] = model
        twins[name] = save_twin(
            config.model.path if elsewhere else model,
            out / "twins" / name,
            seed=seed,
            reward=name == "reward",
        )
    defaults = {name: field._default for name, field in fields_of(type(config)).items()}
    left_out = [
        name for name in _NOT_HERE if name in defaults and get(config, name) != defaults[name]
    ]
    changes: dict[str, Any] = {name: defaults[name] for name in _NOT_HERE if name in defaults}
    for name, most in _MOST.items():
        if name in defaults and (value := get(config, name)) is not None:
            changes[name] = min(value, most)
    for name in _POOLS:
        if name in defaults:
            changes[name] = min(PoolSize.parse(get(config, name)).smallest, _MOST_ACTORS)
    if 0 < config.eval.size < 1:  # a share of the data set, whose size is not known here
        changes["eval.size"] = _MOST["eval.size"]
    if config.lora.adapter is not None:
        changes["lora.rank"] = _MOST["lora.rank"]
    changes |= {
        "out": str(out / "run"), "cluster.device": "cpu", "dry_run": False,
        "steps": STEPS_AT_MOST, "checkpoint.every": 1, "eval.every": 0, "keep": "all",
        "student": twins["student"].path,
    }  # fmt: skip
    if config.eval.engines:
        changes["eval.every"] = 1
    return SmallRun(
        config=changed(config, **changes, **_named(config, twins)),
        twins=twins,
        stand_ins=stand_ins,
        left_out=tuple(left_out),
    )


def _models(config: RolloutConfig) -> Iterator[tuple[str, str]]:
    """Models of the run, each with the setting that names it."""
    yield "student", config.model.path
    if not config.teacher.moves:  # otherwise the teacher is the student
        for name, teacher in config.teacher_models().items():
            yield teacher_setting(name), teacher.model
    if config.model.reference is not None:
        yield "reference", config.model.reference
    if config.reward_model is not None:
        yield "reward", config.reward_model


def _named(config: RolloutConfig, twins: dict[str, Twin]) -> dict[str, Any]:
    """Settings that name models other than the student, with the paths of their twins."""
    changes: dict[str, Any] = {}
    if config.teacher.model is not None and not config.teacher.moves:
        changes["teacher"] = twins["teacher"].path
        if config.teacher.head is not None:
            changes["teacher.head"] = twins["teacher"].path
    elif config.teachers:
        changes["teachers"] = {
            name: {"model": (path := twins[f"teachers.{name}"].path)}
            | ({} if teacher.head is None else {"head": path})
            for name, teacher in config.teachers.items()
        }
    if config.model.reference is not None:
        changes["reference"] = twins["reference"].path
    if config.reward.name.startswith(PREFIX):
        changes["reward"] = f"{PREFIX}{twins['reward'].path}"
    elif config.reward_model is not None:  # named by a field of the environment
        fields = chz.chz_fields(type(config.env))
        changes["env"] = {
            n: twins["reward"].path for n in fields if getattr(config.env, n) == config.reward_model
        }
    return changes
