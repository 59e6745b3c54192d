"""`lr=auto`: the rate that `learner.learning_rate` suggests for the model at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config.files import text_of
from learner.learning_rate import Stage, suggested_lr

AUTO = "auto"


def with_suggested_lr(given: Mapping[str, Any], stage: Stage) -> tuple[dict[str, Any], str]:
    """The settings with a number for lr=auto, and a line that says which and why; else empty.

    Raises:
        CheckpointError: the model that is trained has no readable config.
    """
    model = given.get("student", given.get("model"))
    if text_of(given.get("lr")) != AUTO or model is None:  # without a model there is no run
        return dict(given), ""
    from distill.models.loading import load_config  # transformers: seconds of imports

    width = load_config(text_of(model)).get_text_config().hidden_size
    adapter = "lora.rank" in given or "lora.adapter" in given
    lr = suggested_lr(stage, width, adapter=adapter)
    trained = "an adapter" if adapter else "all weights"
    return (
        {**given, "lr": lr},
        f"lr=auto: {lr:g}, for {stage} of {trained}, hidden size {width} (docs/objectives.md)",
    )
