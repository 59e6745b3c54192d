"""Exact effect of the sampled estimators away from the sampling policy; nothing is sampled.

python -m benchmarks.off_policy
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from distill.objective.settings import ObjectiveConfig
from tests.enumeration import ESTIMATORS, TOP_K, World, error, flat_gradient, reverse_kl

_T = 1.0
_UPDATES = (0, 1, 2, 4, 8, 16, 32, 64)
_DISTANCES = (0.01, 0.03, 0.1, 0.3)
_LOSSES: dict[str, dict[str, Any]] = {
    "importance_sampling": {},
    "ppo": {"loss": "ppo"},
    "cispo": {"loss": "cispo"},
    "dro": {"loss": "dro"},
    "gspo": {"loss": "gspo"},
    "correction=truncate": {"correction": "truncate"},
    "kl_discount_factor=1": {"kl_discount_factor": 1.0},
    "top_k": {"estimator": "top_k", "teacher_top_k": TOP_K},
}


def updates_table(world: World) -> Table:
    """KL(p || q) of a response after updates with expected gradients on one set of rollouts."""
    table = Table("updates on one set of rollouts", *map(str, _UPDATES))
    for name, settings in _LOSSES.items():
        kls = world.descend(ObjectiveConfig(**settings), _T, _UPDATES)
        table.add_row(name, *(f"{kl:.4f}" for kl in kls))
    return table


def bias_table(world: World) -> Table:
    """Relative distance of expected gradients from exact ones, by the change of the weights."""
    table = Table("weights are off by", *map(str, _DISTANCES))
    states, reweighted, discounted = [], [], []
    for away in _DISTANCES:
        world.move_learner(away)
        made = world.expected_gradient(ObjectiveConfig(), _T)
        own = flat_gradient(world.state_sum(_T, reverse_kl, met_by=world.current), world.current)
        states.append(error(made, world.state_gradient(_T, reverse_kl)))
        reweighted.append(error(made, own))
        made = world.expected_gradient(ESTIMATORS["sampled, g=1"].objective, _T)
        discounted.append(error(made, world.sequence_gradient(_T, _T)))
    for name, errors in (
        ("sampled, to the states as sampled", states),
        ("sampled, to the states as met now", reweighted),
        ("sampled, g=1, to the sequence's KL", discounted),
    ):
        table.add_row(name, *(f"{each:.4f}" for each in errors))
    return table


def main() -> None:
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), pad_token_id=None)
        console.print(bias_table(world))
        console.print(updates_table(world))


if __name__ == "__main__":
    main()
