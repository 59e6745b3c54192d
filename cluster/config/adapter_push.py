"""`weights=auto` of a run that trains an adapter: the adapter alone, if the engines can.

On a CPU auto pushes merged weights: SGLang's kernels for adapters are slow there, and a push is
cheap (docs/weights.md).
"""

from __future__ import annotations

from typing import TypeVar

from actors.config import choose_engine
from actors.sglang.flags import parse_flags
from actors.sglang.installed import checks_adapters
from actors.sglang.parallelism import parallelism
from cluster.config.on_policy import RolloutConfig
from distill.errors import ConfigError
from distill.settings import changed
from distill.weights.adapter import AdapterForm
from learner.lora import served_adapter

Config = TypeVar("Config", bound=RolloutConfig)


def with_adapter_push(config: Config) -> tuple[Config, str]:
    """The settings with weights=adapter in place of auto if the engines can, and a line that says
    which weights are pushed, and why; without an adapter, or without pushes, an empty one.

    The device and the kind of engine are chosen already.

    Raises:
        ConfigError: weights=adapter, and there is no adapter, or the engines cannot.
        CheckpointError: the student has no readable config.
    """
    if config.weights not in ("auto", "adapter"):
        return config, ""
    if config.weights == "auto" and not (config.lora.trains_adapter and config.pushes):
        return config, ""
    try:
        form = _served(config)
    except ConfigError as error:
        if config.weights == "adapter":
            raise ConfigError(f"weights=adapter: {error}", field="weights") from error
        return config, f"weights=auto: the adapter is pushed merged: {error}"
    if config.weights == "auto" and config.device == "cpu":
        why = "on a CPU servers decode slower with one beside the base (weights=adapter has it so)"
        return config, f"weights=auto: the adapter is pushed merged: {why}"
    size = f"{form.parameters / 1e6:.3g} M numbers"
    line = f"weights=adapter: the adapter is pushed alone, {size} (docs/weights.md)"
    return changed(config, weights="adapter"), line


def _served(config: RolloutConfig) -> AdapterForm:
    """Form of the adapter on the servers. Raises ConfigError with the reason if they cannot."""
    given = config.policy.server_flags
    parallel = parallelism(given)
    if not (config.lora.trains_adapter and config.pushes):
        raise ConfigError("no adapter is trained, and pushed; set lora.rank, or use weights=auto")
    if choose_engine(config.engine, config.device) != "sglang":
        raise ConfigError("the embedded engine computes no adapter")
    if not checks_adapters():
        raise ConfigError("the SGLang that is installed here compares no checksums of an adapter")
    if parallel.data > 1 or parallel.nodes > 1:
        raise ConfigError("SGLang loads no adapters into replicas, nor over several nodes")
    if any(flag.startswith("--speculative") for flag in parse_flags(given)):
        raise ConfigError("a draft model would not have the adapter")
    if config.engines_sleep:
        raise ConfigError("engines that sleep give their base up (colocate=sleep)")
    if config.on_weight_update != "continue":
        raise ConfigError(
            f"on_weight_update={config.on_weight_update} is about merged weights; samples keep the "
            "adapter that they began with"
        )
    return served_adapter(config.lora, config.student)
