"""`device=` of a run: cpu or cuda, chosen once, before checks and choices that depend on it.

A run's GPUs are those of this machine or, if it joins a cluster, those of the cluster: of running
nodes, and of nodes that an autoscaler may start. A driver cannot query which types of nodes an
autoscaler has. So device=cuda reserves GPUs and waits for them. device=auto raises an error if
there is an autoscaler and no node has a GPU yet.
"""

from __future__ import annotations

import os
from shutil import which
from typing import TypeVar

import chz

from actors.sglang.parallelism import parallelism
from cluster.config.common import CommonConfig
from cluster.config.on_policy import RolloutConfig
from cluster.handles.node import joins_cluster
from distill.errors import ConfigError
from distill.rules import default_of
from distill.settings import changed

Config = TypeVar("Config", bound=CommonConfig)


def with_device(config: Config) -> tuple[Config, str]:
    """Replace device=auto by cpu or cuda, and check the settings that depend on the device.

    Returns:
        The settings, and a line with the reason; empty if no reason is needed.

    Raises:
        ConfigError: device=cuda, and there is no GPU and no autoscaler; device=auto on a cluster
            whose autoscaler may start GPU nodes; the cluster of RAY_ADDRESS does not answer; or
            another setting does not fit the device.
    """
    if config.cluster.device == "cpu":  # as asked for: device=auto may find GPUs elsewhere
        _refuse_gpu_settings(config)
    device, notice = _decided(config)
    if device == "cpu":
        _refuse_on_cpu(config)
    else:
        _require_gpus_of_their_own(config)
        if isinstance(config, RolloutConfig):
            from cluster.placement.push_plan import require_lenders  # torch: not for --help

            require_lenders(config)
    return changed(config, device=device), notice


def gpus_elsewhere(config: CommonConfig) -> bool:
    """True if the run's GPUs are those of a cluster, or those that a dry run assumes."""
    return _supposes_gpus(config) or joins_cluster(local=config.cluster.local)


def check_cluster(config: CommonConfig) -> None:
    """Check that the cluster answers if the run joins it, or if its plan needs it.

    Imports only Ray.

    Raises:
        ConfigError: the cluster of RAY_ADDRESS does not answer, or rejects this process.
    """
    named = config.only_plans and config.cluster.device != "auto"
    if joins_cluster(local=config.cluster.local) and not named and not _supposes_gpus(config):
        from cluster.placement.connect import head_address  # imports Ray; not for local runs

        head_address()


def _supposes_gpus(config: CommonConfig) -> bool:
    return config.only_plans and config.cluster.gpu_memory_gib is not None


def _decided(config: CommonConfig) -> tuple[str, str]:
    if config.cluster.device == "cpu":
        return "cpu", ""
    if _supposes_gpus(config):
        return "cuda", ""
    if joins_cluster(local=config.cluster.local):
        return _of_cluster(config)
    import torch  # not for --help

    return _by_count(config, torch.cuda.device_count(), "this machine"), ""


def _of_cluster(config: CommonConfig) -> tuple[str, str]:
    if config.only_plans and config.cluster.device == "cuda":
        return "cuda", ""  # a plan for a given device needs no cluster
    from cluster.placement.connect import autoscales, cluster_gpus  # imports Ray

    gpus = cluster_gpus()
    if gpus or not autoscales():
        device = _by_count(config, gpus, "the Ray cluster")
        notice = f"device=auto: {device}; the Ray cluster has {gpus:g} GPUs"
        return device, notice if config.cluster.device == "auto" else ""
    if config.cluster.device == "auto":
        raise ConfigError(
            "cluster.device=auto: no node of the Ray cluster has a GPU now, and it is unknown "
            "whether its autoscaler can start one with a GPU. Give device=cuda, which waits for "
            f"GPU nodes (start_deadline_s={config.cluster.start_deadline_of(None):g}), or "
            "device=cpu"
        )
    return "cuda", "device=cuda: no node has a GPU yet; requesting GPU nodes from the autoscaler"


def _by_count(config: CommonConfig, gpus: float, where: str) -> str:
    if config.cluster.device == "cuda" and not gpus:
        raise ConfigError(f"cluster.device=cuda but {where} has no GPU; use device=cpu or add one")
    return "cuda" if gpus else "cpu"


def _refuse_gpu_settings(config: CommonConfig) -> None:
    for name in ("gpus_per_actor", "gpu_memory_gib"):
        value = getattr(config.cluster, name)
        if value != default_of(chz.chz_fields(config.cluster)[name]):
            raise ConfigError(
                f"cluster.{name}={value:g} changes nothing with device=cpu; leave one of them out"
            )


def _refuse_on_cpu(config: CommonConfig) -> None:
    for name in ("offload_optimizer", "liger"):
        if getattr(config.learner, name):
            raise ConfigError(
                f"learner.{name}=True is for CUDA, and the learner is on a CPU; leave it out"
            )
    if config.learner.compile and which(os.environ.get("CXX", "g++")) is None:
        raise ConfigError("learner.compile=True needs a C++ compiler on a CPU (g++, or CXX)")


def _require_gpus_of_their_own(config: CommonConfig) -> None:
    """Raise ConfigError if two learner workers could share a GPU, which NCCL rejects.

    Halves of GPUs are safe if each bundle is a whole GPU with one worker and one policy engine.
    """
    workers, share = config.learner.workers, config.cluster.gpus_per_actor
    if workers == 1 or share >= 1 or config.only_keeps:
        return
    if isinstance(config, RolloutConfig) and config.cluster.colocate != "no":
        gpus = parallelism(config.policy.server_flags).gpus
        if share == 0.5 and config.policy.size.smallest * gpus == workers:
            return
        raise ConfigError(
            f"cluster.colocate={config.cluster.colocate} gpus_per_actor={share} "
            f"learner.workers={workers} policy.engines={config.policy.engines}: two workers could "
            "be placed on one GPU, which NCCL refuses; use gpus_per_actor=0.5 and "
            f"policy.engines={workers // gpus}"
        )
    raise ConfigError(
        f"cluster.gpus_per_actor={share} with learner.workers={workers}: NCCL needs a separate GPU "
        "for each worker; use gpus_per_actor=1, or colocate=sleep with as many policy engines"
    )
