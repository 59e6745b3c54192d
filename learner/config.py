"""Settings of the learner. There is no temperature here: it comes with the data."""

from __future__ import annotations

from typing import Literal

import chz

from distill.errors import ConfigError
from distill.models.loading import resolve_device
from learner.lora import LoraSettings

Precision = Literal["float32", "bfloat16"]

# Padded tokens per micro-batch by device. A CPU likes its caches: 4096 was a quarter faster than
# 16384 for a model of 1 M parameters; a GPU likes large kernels.
TOKEN_BUDGET = {"cpu": 4096, "cuda": 16384}


def token_budget(config: LearnerConfig) -> int:
    """Padded tokens per micro-batch on the device that the learner has."""
    return config.token_budget or TOKEN_BUDGET[resolve_device(config.device).partition(":")[0]]


@chz.chz
class OptimizerConfig:
    """AdamW with a warm-up and a schedule."""

    lr: float = chz.field(default=3e-4, doc="peak learning rate of AdamW")
    warmup_steps: int = chz.field(default=0, doc="steps over which the rate rises linearly to lr")
    schedule: Literal["constant", "linear", "cosine"] = chz.field(
        default="constant", doc="what the rate does after warm-up; linear and cosine end at 0"
    )
    weight_decay: float = chz.field(default=0.0, doc="decoupled weight decay (matrices only)")
    beta1: float = chz.field(default=0.9, doc="AdamW's first-moment decay")
    beta2: float = chz.field(default=0.95, doc="AdamW's second-moment decay")
    max_grad_norm: float = chz.field(default=1.0, doc="clip the global gradient norm to this")

    @chz.validate
    def _in_range(self) -> None:
        for name in ("lr", "max_grad_norm"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0, and finite")
        for name in ("warmup_steps", "weight_decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or above, and finite")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be in [0, 1)")


@chz.chz
class LearnerConfig:
    """The model that learns, and how a step is cut into micro-batches."""

    model: str = chz.field(doc="Hugging Face checkpoint directory (or hub name) to start from")
    optimizer: OptimizerConfig = chz.field(default_factory=OptimizerConfig)
    total_steps: int = chz.field(doc="optimizer steps of the whole run; the schedule ends here")
    token_budget: int | None = chz.field(
        default=None,
        doc="padded tokens per micro-batch, at most; default: TOKEN_BUDGET, or less where that "
        "would not fit into memory",
    )
    seed: int = chz.field(default=0, doc="seed of torch's generator (dropout, where there is any)")
    device: str = chz.field(default="auto", doc="auto, cpu or cuda")
    threads: int = chz.field(default=1, doc="torch threads of the learner on CPU")
    dtype: Precision = chz.field(
        default="float32", doc="what it computes in; weights, gradients and moments stay float32"
    )
    gradient_checkpointing: bool | None = chz.field(
        default=None,
        doc="recompute activations in the backward pass instead of keeping them; default: where "
        "they would not fit into memory",
    )
    dropout: bool = chz.field(
        default=False,
        doc="train with the dropout and the router noise of the model's config; no loss that "
        "compares with a sampler's or a reference's log-probs may",
    )
    compile: bool = chz.field(
        default=False, doc="torch.compile the decoder's layers when they first run"
    )
    liger: bool = chz.field(
        default=False, doc="Liger's Triton kernels for norms, rotary embedding and SwiGLU, on CUDA"
    )
    offload_optimizer: bool = chz.field(
        default=False, doc="AdamW's moments stay in main memory, and are on the GPU for its step"
    )
    lora: LoraSettings | None = chz.field(
        default=None, doc="train a low-rank adapter, and freeze the model"
    )

    @chz.validate
    def _in_range(self) -> None:
        for name in ("total_steps", "token_budget", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
