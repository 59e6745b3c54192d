"""Rows with the experts of a mixture."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from distill.models.loading import load_config
from distill.objective.batching import TrainingRow
from distill.routing import MixtureShape, unknown_expert
from tests.actors.routing import chosen_by


def own_experts(path: str, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """Rows with the experts that the model itself chooses."""
    return [replace(row, experts_TLK=chosen_by(path, row.tokens_T)) for row in rows]


def other_experts(path: str, rows: Sequence[TrainingRow], seed: int = 0) -> list[TrainingRow]:
    """Rows with random experts; those of some tokens are unknown."""
    shape, rng = MixtureShape.of(load_config(path)), np.random.default_rng(seed)
    assert shape is not None
    made = []
    for row in rows:
        places = (len(row), shape.layers, shape.experts)
        experts = rng.random(places).argsort(axis=2)[:, :, : shape.top_k].astype(shape.dtype)
        experts[rng.random(len(row)) < 0.2] = unknown_expert(shape.dtype)
        made.append(replace(row, experts_TLK=experts))
    return made
