"""`lr=auto`: the rate that `learner.learning_rate` suggests for the model at hand."""

from __future__ import annotations

from collections.abc import Mapping

from learner.learning_rate import Stage, suggested_lr

AUTO = "auto"


def with_suggested_lr(given: Mapping[str, str], stage: Stage) -> tuple[dict[str, str], str]:
    """The settings with a number for lr=auto, and a line that says which and why; else empty.

    Raises:
        CheckpointError: the model that is trained has no readable config.
    """
    model = given.get("student", given.get("model"))
    if given.get("lr") != AUTO or model is None:  # without a model there is no run
        return dict(given), ""
    from distill.models.loading import load_config  # transformers: seconds of imports

    width = load_config(model).get_text_config().hidden_size
    adapter = "lora_rank" in given or "lora_adapter" in given
    lr = suggested_lr(stage, width, adapter=adapter)
    trained = "an adapter" if adapter else "all weights"
    return (
        {**given, "lr": f"{lr:g}"},
        f"lr=auto: {lr:g}, for {stage} of {trained}, hidden size {width} (docs/objectives.md)",
    )
