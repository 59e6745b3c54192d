"""A learning rate to start from, by the model's width, what is trained, and on what.

A rate that suits one width is too large for a wider model: with Adam every weight moves by about
lr, and an output sums over the width. Brown et al. 2020 (table 2.1) lower it so for pre-training;
"LoRA Without Regret" (Schulman et al., Thinking Machines 2025) fits width^-0.78 for fine-tuning of
Llama, and ten times the rate of all weights for an adapter.

At a width of 4096 (models of 8 B parameters) the rates are those of the field's own recipes: sft
2e-5 (Alpaca, Llama 2), opd 1e-5 (Thinking Machines' recipe: 1e-4 with LoRA), rl 1e-6 (verl, TRL),
dpo 5e-7 (Zephyr), reward_model 1e-5 (InstructGPT, and TRL's 1e-4 with LoRA).
"""

from __future__ import annotations

from typing import Literal

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
_LARGEST = 1e-3


def suggested_lr(stage: Stage, hidden_size: int, *, adapter: bool) -> float:
    """The peak rate for a model of this width; two digits of it, for it claims no more."""
    rate = _AT_WIDTH[stage] * (hidden_size / _WIDTH) ** _POWER * (_ADAPTER if adapter else 1.0)
    return float(f"{min(rate, _LARGEST):.1e}")
