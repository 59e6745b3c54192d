"""Held-out problems and rows: a seeded choice from each source, by whole prompts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from distill.data.order import shares
from distill.data.prompts import prompt_key
from distill.objective.batching import TrainingRow

# Last word of the seed, which distinguishes this choice from the order of training.
_HELD_OUT = 2

# Rows that belong together: the rows of one example, or the two rows of a preference pair.
ExampleRows = Sequence[TrainingRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Rows of one source that are evaluated and not trained; `name` is the name of the source."""

    name: str
    rows_D: Sequence[TrainingRow]


def unit_keys(units: Sequence[ExampleRows]) -> list[Hashable]:
    """Key of each unit's prompt: the tokens before the first trained token of any of its rows.

    All rows are compared, because the rows of a conversation are not in the order of its turns
    (`conversation_chains`).
    """
    return [prompt_key(min((row.context_key for row in unit), key=len)) for unit in units]


def choose_held_out(
    keys_by_source: Sequence[Sequence[Hashable]], counts: Sequence[int], seeds: Sequence[list[int]]
) -> list[set[int]]:
    """Indices of the problems to hold out of each source: a seeded choice of whole prompts.

    Problems with equal keys are all held out or all trained. A prompt that occurs in several
    sources is not held out.

    Args:
        keys_by_source: key of each problem's prompt, for each source.
        counts: largest number of problems to hold out of each source.
        seeds: seed of each source's choice.
    """
    sources_of = Counter(key for keys in keys_by_source for key in set(keys))
    chosen = []
    for keys, count, seed in zip(keys_by_source, counts, seeds, strict=True):
        by_prompt: dict[Hashable, list[int]] = defaultdict(list)
        for problem, key in enumerate(keys):
            by_prompt[key].append(problem)
        prompts = list(by_prompt.items())
        apart: set[int] = set()
        for p in np.random.default_rng(seed).permutation(len(prompts)).tolist():
            key, problems = prompts[p]
            if sources_of[key] == 1 and len(apart) + len(problems) <= count:
                apart.update(problems)
        chosen.append(apart)
    return chosen


def hold_out(
    units_by_source: Sequence[Sequence[ExampleRows]], size: float, *, seed: int
) -> list[tuple[list[ExampleRows], list[ExampleRows]]]:
    """Split the units of each source into (trained, held out) by `choose_held_out`.

    The number held out of a source is at most the requested number. At least one unit is held out
    if some prompt is small enough.

    Args:
        size: number of units to hold out of all sources together; below 1, the share of each
            source's units.
    """
    sizes = [len(units) for units in units_by_source]
    if size < 1:
        counts = [round(size * n) for n in sizes]
    else:
        counts = shares(sizes, min(int(size), sum(sizes)))
    chosen = choose_held_out(
        [unit_keys(units) for units in units_by_source],
        [min(max(1, count), n - 1) for count, n in zip(counts, sizes, strict=True)],
        [[seed, source, 0, _HELD_OUT] for source in range(len(sizes))],
    )
    split = []
    for units, apart in zip(units_by_source, chosen, strict=True):
        trained = [unit for i, unit in enumerate(units) if i not in apart]
        split.append((trained, [units[i] for i in sorted(apart)]))
    return split
