"""`lr=auto`: a learning rate that depends on the recipe, the model's width and the use of LoRA.

A rate that suits one width is too large for a wider model: with Adam every weight moves by about
lr, and an output sums over the width. Brown et al. 2020 (table 2.1) lower the rate with the width
for pre-training. "LoRA Without Regret" (Schulman et al., Thinking Machines 2025) fits width^-0.78
for fine-tuning of Llama, and a rate for adapters that is ten times that for all weights.

The rates at a width of 4096 (models of 8 B parameters) are those of published recipes: sft 2e-5
(Alpaca, Llama 2), opd 1e-5 (Thinking Machines' recipe: 1e-4 with LoRA), rl 1e-6 (verl, TRL), dpo
5e-7 (Zephyr), reward_model 1e-5 (InstructGPT, and TRL's 1e-4 with LoRA).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config.common import Stage
from cluster.config.early_checks import check_model
from cluster.config.files import text_of
from distill.model_paths import trained_model

AUTO = "auto"
_LR = "learner.lr"

_WIDTH, _POWER = 4096, -0.78
_AT_WIDTH: dict[Stage, float] = {
    "sft": 2e-5,
    "opd": 1e-5,
    "rl": 1e-6,
    "dpo": 5e-7,
    "reward_model": 1e-5,
}
_ADAPTER = 10.0
# Above this rate AdamW tends to diverge at any width.
LARGEST = 1e-3


def suggested_lr(stage: Stage, hidden_size: int, *, adapter: bool) -> float:
    """Peak learning rate for a model of this width, rounded to two digits."""
    rate = _AT_WIDTH[stage] * (hidden_size / _WIDTH) ** _POWER * (_ADAPTER if adapter else 1.0)
    return float(f"{min(rate, LARGEST):.1e}")


def with_suggested_lr(given: Mapping[str, Any], stage: Stage) -> tuple[dict[str, Any], str]:
    """Replace lr=auto by a number; return also a line with the reason.

    The line is empty if lr is not auto.

    Args:
        given: values by path.

    Raises:
        CheckpointError: the model has no readable config.
    """
    model = given.get("model.path")
    if text_of(given.get(_LR)) != AUTO or model is None:  # a later check requires the model
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
