"""`estimator=auto`: choose the estimator that uses most of the teacher's distribution."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from actors.sglang.address import is_url
from cluster.config.files import at_path
from cluster.config.model_checks import ask_server
from cluster.config.on_policy import RolloutConfig
from cluster.config.run_record import RunRecord, has_trained
from cluster.config.teachers import teacher_setting
from distill.errors import ConfigError, DataError
from distill.gpu import DTYPE_BYTES, GIB, readable
from distill.models.loading import load_config, resolve_device, vocab_size
from distill.objective.settings import AUTO, DEFAULT_TOP_K
from distill.settings import changed
from learner.config import TOKEN_BUDGET
from learner.memory import free_bytes, frozen_bytes

# Fraction of the free memory that may be planned; the rest is for caches and other processes.
_SHARE = 0.7


def with_estimator(config: RolloutConfig) -> tuple[RolloutConfig, str]:
    """Replace estimator=auto by the chosen estimator; return also a line with the reason.

    The line is empty if the estimator is given. If there is a run in `out=`, its estimator is kept.

    Raises:
        ConfigError: no estimator is possible, or a teacher's server does not answer.
        CheckpointError: a model has no readable config.
    """
    if config.objective.estimator != AUTO:
        return config, ""
    chosen, why = _recorded_choice(config) or _chosen(config)
    line = f"estimator=auto: {chosen}, because {why} (docs/objectives.md)"
    return changed(config, estimator=chosen), line


def state_bytes(config: RolloutConfig, model: str) -> tuple[int, int]:
    """Bytes of a teacher's hidden state of one trained token, and of a step's states at most."""
    width = load_config(model).get_text_config().hidden_size
    each = width * DTYPE_BYTES[config.engine.dtype_on(config.cluster.device)]
    samples = config.data.batch_size * config.sampling.group_size
    return each, each * samples * config.sampling.max_new_tokens


def _recorded_choice(config: RolloutConfig) -> tuple[str, str] | None:
    try:
        out = Path(config.out)
        record = RunRecord.of_run(out) if has_trained(out) else None
    except DataError:
        return None  # `RunDirectory.check` raises the error
    estimator = record and at_path(record.settings, "objective.estimator")
    return (estimator, f"the run in {config.out} began with it") if estimator else None


def _chosen(config: RolloutConfig) -> tuple[str, str]:
    reverse = config.objective.divergence == "reverse_kl"
    if not config.objective.kl_coef:
        return "sampled", "with kl_coef=0 the teacher scores only the sampled tokens"
    teachers = config.teacher_models()
    has_heads = all(teacher.head is not None for teacher in teachers.values())
    if config.objective.kl_discount_factor and reverse and not has_heads:
        return "sampled", "kl_discount_factor discounts the terms of sampled tokens"
    if config.teacher.moves:
        return "full", (
            "the teacher is the learner's own model, whose distribution is already in the learner"
        )
    if has_heads:
        return "full", "every teacher's engines give hidden states for its head (teacher.head=)"
    models = [teacher.model for teacher in teachers.values()]
    served = {
        teacher.model: ask_server(teacher_setting(name), teacher.model)
        for name, teacher in teachers.items()
        if is_url(teacher.model)
    }
    width = vocab_size(load_config(config.model.path))
    without = [model for model, info in served.items() if not info.scores_given]
    apart = "a teacher is a running server" if served else _does_not_fit(config, models)
    if reverse and without:  # other divergences cannot be estimated from sampled tokens
        return "sampled", f"the server at {without[0]} runs without isotherm's plugin"
    if not apart:
        return "full", "every teacher fits into memory beside the learner"
    if width > 3 * DEFAULT_TOP_K:
        why = f"{apart}, so only likely tokens are requested"
        if not served:
            step = max(state_bytes(config, model)[1] for model in models)
            why += (
                "; with teacher.head= the estimator would be full, and transfer at most "
                f"{readable(step)} a step"
            )
        return "top_k", why
    if reverse:
        return "sampled", f"{apart}, and a vocabulary of {width} is small"
    raise ConfigError(
        "objective.estimator=auto finds no estimator for "
        f"divergence={config.objective.divergence}: {apart}, and a vocabulary of {width} is little "
        f"more than {DEFAULT_TOP_K} likely tokens; give estimator=top_k and a teacher_top_k"
    )


def _does_not_fit(config: RolloutConfig, teachers: list[str]) -> str:
    """Reason why the teachers do not fit into memory together with a learner; empty if they do."""
    device = resolve_device(config.cluster.device)
    config = changed(config, device=device)
    dtype = config.engine.dtype_on(device)
    workers, copied = config.learner.workers, frozen_bytes(teachers, dtype)
    student = config.learner_memory()
    passes = student and student.passes
    if student is None or passes is None or copied is None:
        return "the size of a model is unknown until it is loaded"
    budget = config.learner.token_budget or TOKEN_BUDGET[device]
    needed = replace(student, frozen=copied).held
    needed += passes.bytes(budget, checkpointing=config.learner.gradient_checkpointing is not False)
    if device == "cpu":  # workers and engines share the machine
        teacher_engines = config.teacher.size.smallest
        policy_engines = config.policy.size.smallest
        needed = needed * workers + teacher_engines * copied
        needed += policy_engines * student.model.parameters * DTYPE_BYTES[dtype]
    if (there := _memory(config, device)) is None:
        return "no GPU driver answers on this machine (gpu_memory_gib= sets the memory of one GPU)"
    free = int(there * _SHARE)
    if needed <= free:
        return ""
    return (
        f"teacher and learner together take {readable(needed)}, more than the {readable(free)} "
        f"that {device} has for them"
    )


def _memory(config: RolloutConfig, device: str) -> int | None:
    """Free bytes of the device; None for a GPU if this machine has none and its size is unknown."""
    if device == "cpu":
        return free_bytes(device)
    if config.cluster.gpu_memory_gib is not None:
        return int(config.cluster.gpu_memory_gib * GIB)
    return free_bytes(device) if torch.cuda.is_available() else None
