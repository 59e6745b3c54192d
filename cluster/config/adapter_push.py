"""`weights=adapter`: the adapter alone is pushed, to servers that compute it beside the base.

`weights=auto` pushes merged weights: an adapter alone has run on CPU servers only, and the larger
of the two models that were measured decoded slower with it (docs/weights.md).
"""

from __future__ import annotations

from actors.sglang.flags import parse_flags
from actors.sglang.installed import checks_adapters
from actors.sglang.parallelism import parallelism
from cluster.config.on_policy import RolloutConfig
from distill.errors import ConfigError
from distill.weights.adapter import AdapterForm
from learner.lora import served_adapter


def adapter_push(config: RolloutConfig) -> str:
    """A line about the push of an adapter: that it goes alone, or could; else an empty one.

    The device and the kind of engine are chosen already.

    Raises:
        ConfigError: weights=adapter, and there is no adapter, or the engines cannot.
        CheckpointError: the student has no readable config.
    """
    if config.weights.transport not in ("auto", "adapter"):
        return ""
    try:
        form = _served(config)
    except ConfigError as error:
        if config.weights.transport == "adapter":
            raise ConfigError(f"weights=adapter: {error}", field="weights.transport") from error
        return ""
    if config.weights.transport == "auto":
        return "weights=auto: the adapter is pushed merged; weights=adapter would push it alone"
    size = f"{form.parameters / 1e6:.3g} M numbers"
    return f"weights=adapter: the adapter is pushed alone, {size} (docs/weights.md)"


def _served(config: RolloutConfig) -> AdapterForm:
    """Form of the adapter on the servers. Raises ConfigError with the reason if they cannot."""
    given = config.policy.server_flags
    parallel = parallelism(given)
    if not (config.lora.trains_adapter and config.pushes):
        raise ConfigError("no adapter is trained, and pushed; set lora.rank, or use weights=auto")
    if config.engine.kind_on(config.cluster.device) != "sglang":
        raise ConfigError("the embedded engine computes no adapter")
    if not checks_adapters():
        raise ConfigError("the SGLang that is installed here compares no checksums of an adapter")
    if parallel.data > 1 or parallel.nodes > 1:
        raise ConfigError("SGLang loads no adapters into replicas, nor over several nodes")
    if any(flag.startswith("--speculative") for flag in parse_flags(given)):
        raise ConfigError("a draft model would not have the adapter")
    if config.engines_sleep:
        raise ConfigError("engines that sleep give their base up (colocate=sleep)")
    if config.engine.on_weight_update != "continue":
        raise ConfigError(
            f"on_weight_update={config.engine.on_weight_update} is about merged weights; samples "
            "keep the adapter that they began with"
        )
    return served_adapter(config.lora, config.model.path)
