"""`weights=adapter`: push only the adapter, to servers that compute it in addition to the base.

`weights=auto` pushes merged weights: a separate adapter has run only on CPU servers, and the larger
of the two models that were measured decoded slower with it (docs/weights.md).
"""

from __future__ import annotations

from actors.sglang.flags import parse_flags
from actors.sglang.installed import checks_adapters
from actors.sglang.parallelism import parallelism
from cluster.config.on_policy import RolloutConfig
from distill.errors import ConfigError
from distill.weights.adapter import AdapterForm
from learner.lora import not_served, served_adapter


def adapter_push(config: RolloutConfig) -> str:
    """Line for the plan that says if only the adapter is pushed, or could be; otherwise empty.

    The device and the kind of engine must already be chosen.

    Raises:
        ConfigError: weights=adapter, and there is no adapter, or the engines do not support it.
        CheckpointError: the student has no readable config.
    """
    if config.weights.transport not in ("auto", "adapter"):
        return ""
    try:
        form = _served(config)
    except ConfigError:
        if config.weights.transport == "adapter":
            raise
        return ""
    if config.weights.transport == "auto":
        return (
            "weights=auto: the adapter is pushed merged; weights=adapter would push only its "
            "own tensors"
        )
    size = f"{form.parameters / 1e6:.3g} M numbers"
    return f"weights=adapter: the adapter is pushed alone, {size} (docs/weights.md)"


def _served(config: RolloutConfig) -> AdapterForm:
    """Form of the adapter on the servers. Raises ConfigError if they do not support it."""
    if why := _unservable(config):
        raise not_served(why)
    return served_adapter(config.lora, config.model.path)


def _unservable(config: RolloutConfig) -> str:
    """Reason why the engines cannot load a separate adapter; empty if they can."""
    given = config.policy.server_flags
    parallel = parallelism(given)
    if not (config.lora.trains_adapter and config.pushes):
        return "no adapter is trained; set lora.rank"
    if config.engine.kind_on(config.cluster.device) != "sglang":
        return "the embedded engine does not support adapters"
    if not checks_adapters():
        return "the installed SGLang does not compare checksums of an adapter"
    if parallel.data > 1 or parallel.nodes > 1:
        return "SGLang does not load adapters into replicas or over several nodes"
    if any(flag.startswith("--speculative") for flag in parse_flags(given)):
        return "a draft model would not have the adapter"
    if config.engines_sleep:
        return "sleeping engines discard the weights of their base model (colocate=sleep)"
    if (update := config.engine.on_weight_update) != "continue":
        return (
            f"on_weight_update={update} applies to merged weights only; with an adapter, a "
            "sample keeps the version that it began with"
        )
    return ""
