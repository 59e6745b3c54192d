"""Checks of the groups that another run has kept (train_from=)."""

from __future__ import annotations

from pathlib import Path

from cluster.config.on_policy import RolloutConfig
from cluster.run_files.replay_log import KeptSteps
from distill.errors import ConfigError
from distill.models.loading import load_config, vocab_size


def kept_steps(config: RolloutConfig) -> KeptSteps:
    """The steps in `train_from=`, checked as far as their first one tells.

    Raises:
        ConfigError: there are none, or too few; or they are of another temperature or vocabulary.
    """
    kept = KeptSteps(Path(config.train_from or ""))
    if not kept.steps:
        raise ConfigError(
            f"train_from={config.train_from} holds no kept steps (groups/step-*.arrow); give the "
            "out= of a run with keep=N, or with rollout_only=True",
            field="train_from",
        )
    if config.steps > len(kept.steps):
        raise ConfigError(
            f"steps={config.steps} is more than the {len(kept.steps)} that "
            f"train_from={config.train_from} holds; give steps={len(kept.steps)} at most",
            field="steps",
        )
    size = vocab_size(load_config(config.model.path))
    first = kept.groups(kept.steps[0])
    for segment in (segment for group in first for segment in group.segments()):
        if segment.temperature != config.sampling.temperature:
            raise ConfigError(
                f"temperature={config.sampling.temperature:g}, and train_from={config.train_from} "
                f"were sampled at {segment.temperature:g}, at which they are scored and "
                "trained; give that",
                field="sampling.temperature",
            )
        if (largest := int(segment.tokens_T.max())) >= size:
            raise ConfigError(
                f"train_from={config.train_from} have a token {largest}, and the vocabulary of "
                f"student={config.model.path} is {size}; give the student that sampled them, or "
                "one of its family",
                field="train_from",
            )
    return kept
