"""An advantage and a loss as a user would write them: built-in ones over again."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import Tensor

from distill.objective.group_rewards import GroupRewards


def global_advantage(rewards_P: Sequence[GroupRewards]) -> list[np.ndarray]:
    """The same as baseline=global and scale_by_std=True."""
    counted_N = np.concatenate([group.rewards_G[group.counted_G] for group in rewards_P])
    return [(g.rewards_G - counted_N.mean()) / (counted_N.std() + 1e-6) for g in rewards_P]


POLICY_GRADIENT = "tests.e2e.objectives:policy_gradient"


def policy_gradient(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor) -> Tensor:
    """The same as loss=importance_sampling."""
    return -(logprobs_N - old_N).exp() * advantages_N


FAILS_ON_A_WORKER = "tests.e2e.objectives:fails_on_a_worker"
FAILURE = "ISOTHERM_TEST_FAILURE"  # names a file of the worker's rank, which the failure removes


def fails_on_a_worker(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor) -> Tensor:
    """`policy_gradient` whose backward pass fails on a worker for which the file `FAILURE` exists.

    An error of the function itself, which is a user's, would end the run.
    """
    if dist.is_initialized():
        logprobs_N.register_hook(_fail_once)
    return policy_gradient(logprobs_N, old_N, advantages_N)


def _fail_once(_gradient_N: Tensor) -> None:
    failure, rank = Path(os.environ[FAILURE]), dist.get_rank()
    with suppress(FileNotFoundError):
        if failure.read_text() == str(rank):
            failure.unlink()
            raise OSError(f"worker {rank} has a broken disk")
