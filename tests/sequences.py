"""Rows of whole sequences in one process: the sums that learner workers exchange."""

from __future__ import annotations

from collections.abc import Sequence

from distill.objective.batching import TrainingRow
from distill.objective.rows import Score, joins_tokens, row_sums, with_sums_of_others
from distill.objective.settings import ObjectiveConfig


def with_other_rows(
    rows_D: Sequence[TrainingRow], objective: ObjectiveConfig, score: Score
) -> list[TrainingRow]:
    """Attach to each row the sums over the other rows of its sequence, for losses that join tokens.

    Args:
        score: log-probs under the weights that the update starts from.
    """
    if not joins_tokens(objective):
        return list(rows_D)
    made: list[TrainingRow] = []
    sequence: list[TrainingRow] = []
    for row in rows_D:
        sequence.append(row)
        if row.ends_sequence:
            scored = zip(sequence, score(sequence), strict=True)
            sums = [row_sums(each, logprobs_N, objective) for each, logprobs_N in scored]
            made += [
                with_sums_of_others(each, number, sums, objective)
                for number, each in enumerate(sequence)
            ]
            sequence = []
    return made
