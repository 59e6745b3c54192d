"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from learner.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices and spares vectors (norms, biases)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def lr_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """The rate at 0-based `step` as a share of the peak."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    span = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))


def build_schedule(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_steps: int
) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: lr_factor(step, config, total_steps))
