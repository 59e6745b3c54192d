"""Forecast of a weight push from the settings: its transport, its size and its memory.

`dry_run=True` prints it. The transport to each engine is chosen at run time, by the engine's
location (cluster/weights/ways.py).

`weights=adapter` pushes only the adapter, to servers that compute it in addition to the base.
`weights=auto` pushes merged weights: a separate adapter has run only on CPU servers, and the larger
of the two models that were measured decoded slower with it (docs/weights.md).
"""

from __future__ import annotations

from actors.sglang.flags import parse_flags
from actors.sglang.parallelism import parallelism
from cluster.config.on_policy import RolloutConfig
from cluster.placement.engines import lends_weights, lent_bytes
from distill.errors import ConfigError
from distill.gpu import DTYPE_BYTES, gib, parameter_count, readable
from distill.weights.adapter import AdapterForm
from learner.lora import not_served, served_adapter
from learner.memory import estimate_memory


def describe_push(config: RolloutConfig) -> str:
    """Size, transport and additional memory of a push, as text."""
    dtype, engines = config.engine.dtype_on(config.cluster.device), config.policy.size.smallest
    if config.weights.transport == "adapter":
        parameters = served_adapter(config.lora, config.model.path).parameters
        most = config.adapter_versions
        way = f"only the adapter; a server holds at most {most} versions of it"
    else:
        estimate = estimate_memory(config.model.path)
        parameters = None if estimate is None else estimate.parameters
        way = _way(config)
    return f"{push_line(parameters, dtype, engines)}; {way}{_to_teacher(config)}"


def push_line(parameters: int | None, dtype: str, engines: int) -> str:
    """Text with the size of a push of `parameters` parameters to each engine, in `dtype`.

    None: the size of the model is unknown.
    """
    to = f"to {engines} policy engine{'s' * (engines != 1)} after each step"
    if parameters is None:
        return f"every parameter in {dtype} {to}; size unknown"
    size = parameters * DTYPE_BYTES[dtype]
    return (
        f"{readable(size)} ({parameter_count(parameters)} in {dtype}) {to}: "
        f"{readable(size * engines)}"
    )


def _to_teacher(config: RolloutConfig) -> str:
    """Text about pushes of an EMA or lagged teacher to its engines; empty without such a teacher.

    They precede the push to the policy engines. They push whole models.
    """
    if (rule := config.teacher_rule) is None:
        return ""
    engines = config.teacher.size.smallest
    several = "s" * (engines != 1)
    often = f"every {rule.every} steps" if rule.every else "each step"
    what = "the merged weights" if config.weights.transport == "adapter" else "as much"
    return f"; {what} to {engines} teacher engine{several} after {often}"


def _way(config: RolloutConfig) -> str:
    device = config.cluster.device
    on_gpu = device.startswith("cuda")
    if lends_weights(config):
        how = "CUDA IPC" if on_gpu else "ipc, in main memory"
        where = "GPU" if on_gpu else "learner worker that lends"
        return f"by {how}: {gib(lent_bytes(config))} GiB more on each {where} during a push"
    if config.weights.transport == "group":
        return f"by a group ({'NCCL' if on_gpu else 'gloo'})"
    if config.weights.transport != "auto":
        return f"by {config.weights.transport}"
    far = f"a group ({'NCCL' if on_gpu else 'gloo'})"
    if on_gpu and config.engine.kind_on(device) == "sglang":
        return (
            f"by {far} to engines with separate GPUs, shared memory to engines on the learner's "
            "GPUs"
        )
    return f"by shared memory to engines on the learner's node, {far} elsewhere"


def require_lenders(config: RolloutConfig) -> None:
    """Raise ConfigError if weights=ipc would place engines on GPUs without a learner worker."""
    if config.weights.transport != "ipc" or config.cluster.local:
        return
    gpus = parallelism(config.policy.server_flags).gpus
    if config.cluster.gpus_per_actor >= 1 or (gpus > 1 and not config.shares_gpus):
        what = (
            f"gpus_per_actor={config.cluster.gpus_per_actor:g}"
            if gpus == 1
            else f"policy.server_flags={config.policy.server_flags}"
        )
        raise ConfigError(
            f"weights=ipc with {what}: policy engines would have separate GPUs, without a "
            "learner worker; use colocate=sleep gpus_per_actor=0.5, or weights=auto",
            field="weights.transport",
        )


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
