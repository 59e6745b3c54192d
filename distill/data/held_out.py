"""Held-out rows of supervised data: of each source a seeded share, whole prompts at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distill.objective.batching import TrainingRow

# Word of the seed that tells this choice from the order of training.
_HELD_OUT = 2

# Rows that belong together: those of one example, or the two of a preference pair.
Unit = Sequence[TrainingRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Rows of one source that are evaluated and not trained; `name` is the source's."""

    name: str
    rows_D: Sequence[TrainingRow]


def hold_out(
    units: Sequence[Unit], share: float, *, seed: int, source: int
) -> tuple[list[Unit], list[Unit]]:
    """(trained, held out): about `share` of the units; those of one prompt stay on one side.

    Held out are at most so many, and at least one if some prompt has few enough of them.

    Args:
        source: which of several sources with one seed it is.
    """
    by_prompt: dict[bytes, list[int]] = defaultdict(list)
    for i, unit in enumerate(units):
        by_prompt[unit[0].tokens_T[: unit[0].first_trained].tobytes()].append(i)
    prompts = list(by_prompt.values())
    most = min(max(1, round(share * len(units))), len(units) - 1)
    apart: set[int] = set()
    order = np.random.default_rng([seed, source, 0, _HELD_OUT]).permutation(len(prompts))
    for p in order.tolist():
        if len(apart) + len(prompts[p]) <= most:
            apart.update(prompts[p])
    trained = [unit for i, unit in enumerate(units) if i not in apart]
    return trained, [units[i] for i in sorted(apart)]
