"""Sampling parameters: `TrainSampling`, which losses accept, and `EvalSampling`, which they refuse.

`TrainSampling.temperature` is the only place of the rollout temperature T (T > 0, no truncation) in
the settings. It is copied into every `Segment`; teacher, learner and calibration read it from the
data.
"""

from __future__ import annotations

from dataclasses import dataclass

from distill.errors import ConfigError
from distill.json_values import is_number

# Temperature of the unscaled distribution softmax(z), q_1. A server that ignores T scores at it,
# and the bias meter compares the KL against q_1 with KL(p_T || q_T). The only literal temperature
# in this project.
UNSCALED = 1.0


def check_temperature(temperature: float, field: str) -> None:
    """Raise ConfigError unless `temperature` is a finite number above zero."""
    if not is_number(temperature):
        raise ConfigError(
            f"{field}={temperature!r} is not a finite number; give one above 0", field=field
        )
    if temperature <= 0:
        raise ConfigError(
            f"{field}={temperature} cannot be used in training: rollouts are sampled from "
            "softmax(z/T), so T must be above 0. Greedy decoding (0) is for "
            "evaluation: eval.temperature=0",
            field=field,
        )


def _check_max_new_tokens(max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSampling:
    """Sampling of rollouts for training: softmax(z / T), without truncation.

    There is deliberately no top_p, top_k or min_p: truncated rollouts are not samples of p_T.

    Raises:
        ConfigError: T is not finite and above 0, or max_new_tokens is below 1.
    """

    temperature: float
    max_new_tokens: int

    def __post_init__(self) -> None:
        check_temperature(self.temperature, "temperature")
        _check_max_new_tokens(self.max_new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSampling:
    """Sampling for evaluation, as your serving decoder does it: no loss accepts such samples.

    Temperature 0 is greedy. top_p = 1 and top_k = 0 truncate nothing. `num_samples` responses are
    sampled for each prompt.

    Raises:
        ConfigError: a temperature or a length out of range. The settings of commands and recipes
            check the ranges of all fields.
    """

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    num_samples: int = 1

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or self.temperature < 0:
            raise ConfigError(f"temperature={self.temperature} must be 0 (greedy) or above")
        _check_max_new_tokens(self.max_new_tokens)
        assert 0 < self.top_p <= 1 and self.top_k >= 0 and self.num_samples >= 1


Sampling = TrainSampling | EvalSampling
