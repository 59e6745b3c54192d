"""Device of a run: cpu or cuda, by the GPUs of its machine or cluster."""

from __future__ import annotations

import ray
import torch

from cluster.config.common import CommonConfig
from cluster.config.on_policy import RolloutConfig
from cluster.placement.push_plan import require_lenders
from distill.errors import ConfigError


def resolve_device(config: CommonConfig) -> str:
    """cpu or cuda, by what the connected Ray cluster, or this process, has.

    Raises:
        ConfigError: cuda was asked for and the cluster has no GPU.
    """
    gpus = torch.cuda.device_count() if config.local else ray.cluster_resources().get("GPU", 0)
    require_gpu(config, gpus, "this machine" if config.local else "the Ray cluster")
    if not gpus or config.device == "cpu":
        for name in ("offload_optimizer", "liger"):
            if getattr(config, name):
                raise ConfigError(
                    f"{name}=True is for CUDA, and the learner is on a CPU; leave it out"
                )
        return "cpu"
    _require_gpus_of_their_own(config)
    if isinstance(config, RolloutConfig):
        require_lenders(config)
    return "cuda"


def require_gpu(config: CommonConfig, gpus: float, where: str) -> None:
    if config.device == "cuda" and not gpus:
        raise ConfigError(f"device=cuda but {where} has no GPU; use device=cpu or add one")


def _require_gpus_of_their_own(config: CommonConfig) -> None:
    """Raises ConfigError if two learner workers could meet on one GPU: NCCL would refuse.

    Halves of GPUs are safe where each worker's bundle is a whole one, with a policy engine in it.
    """
    workers, share = config.learner_workers, config.gpus_per_actor
    if workers == 1 or share >= 1 or config.only_keeps:
        return
    if isinstance(config, RolloutConfig) and config.colocate:
        if share == 0.5 and config.policy_engines == workers:
            return
        raise ConfigError(
            f"colocate=True gpus_per_actor={share} learner_workers={workers} policy_engines="
            f"{config.policy_engines}: two workers could meet on one GPU, which NCCL refuses; use "
            f"gpus_per_actor=0.5 and policy_engines={workers}"
        )
    raise ConfigError(
        f"gpus_per_actor={share} with learner_workers={workers}: NCCL needs a GPU of its own for "
        "each worker; use gpus_per_actor=1, or colocate=True with as many policy engines"
    )
