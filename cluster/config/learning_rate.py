"""`lr=auto`: a learning rate by the model's width, by what is trained, and on what.

A rate that suits one width is too large for a wider model: with Adam every weight moves by about
lr, and an output sums over the width. Brown et al. 2020 (table 2.1) lower it so for pre-training;
"LoRA Without Regret" (Schulman et al., Thinking Machines 2025) fits width^-0.78 for fine-tuning of
Llama, and ten times the rate of all weights for an adapter.

At a width of 4096 (models of 8 B parameters) the rates are those of the field's own recipes: sft
2e-5 (Alpaca, Llama 2), opd 1e-5 (Thinking Machines' recipe: 1e-4 with LoRA), rl 1e-6 (verl, TRL),
dpo 5e-7 (Zephyr), reward_model 1e-5 (InstructGPT, and TRL's 1e-4 with LoRA).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from cluster.config.early_checks import check_model
from cluster.config.files import text_of
from distill.model_paths import trained_model

AUTO = "auto"
_LR = "learner.lr"
Stage = Literal["sft", "opd", "rl", "dpo", "reward_model"]

_WIDTH, _POWER = 4096, -0.78
_AT_WIDTH: dict[Stage, float] = {
    "sft": 2e-5,
    "opd": 1e-5,
    "rl": 1e-6,
    "dpo": 5e-7,
    "reward_model": 1e-5,
}
_ADAPTER = 10.0
# Past it AdamW tends to diverge, whatever the width.
LARGEST = 1e-3


def suggested_lr(stage: Stage, hidden_size: int, *, adapter: bool) -> float:
    """The peak rate for a model of this width; two digits of it, for it claims no more."""
    rate = _AT_WIDTH[stage] * (hidden_size / _WIDTH) ** _POWER * (_ADAPTER if adapter else 1.0)
    return float(f"{min(rate, LARGEST):.1e}")


def with_suggested_lr(given: Mapping[str, Any], stage: Stage) -> tuple[dict[str, Any], str]:
    """The settings with a number for lr=auto, and a line that says which and why; else empty.

    Args:
        given: values by path.

    Raises:
        CheckpointError: the model that is trained has no readable config.
    """
    model = given.get("model.path")
    if text_of(given.get(_LR)) != AUTO or model is None:  # without a model there is no run
        return dict(given), ""
    path = trained_model(text_of(model))
    check_model("model.path", path)
    from distill.models.loading import load_config  # transformers: seconds of imports

    width = load_config(path).get_text_config().hidden_size
    adapter = "lora.rank" in given or "lora.adapter" in given
    lr = suggested_lr(stage, width, adapter=adapter)
    trained = "an adapter" if adapter else "all weights"
    return (
        {**given, _LR: lr},
        f"lr=auto: {lr:g}, for {stage} of {trained}, hidden size {width} (docs/objectives.md)",
    )
