"""The sampled-token estimator against the exact gradient, by every sequence there is.

A vocabulary of 5 and at most 3 new tokens: 85 sequences, so every expectation is a finite sum and
nothing is sampled. Rows, batch, forward and loss are the ones that train.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.batching import collate
from distill.kl import reverse_kl
from distill.losses import importance_sampling
from distill.models import new_qwen3
from distill.rows import policy_rows
from distill.types import Segment, TrajectoryGroup
from learner.forward import Forward
from tests.samples import trajectory

VOCAB, HORIZON, EOS = 5, 3, 1
PROMPT = (3, 0, 2)
TEMPERATURES = [0.5, 1.0, 2.0]


def tiny(seed: int) -> PreTrainedModel:
    model = new_qwen3(
        vocab_size=VOCAB, hidden_size=32, layers=1, heads=1, context_length=8,
        eos_token_id=EOS, pad_token_id=0, seed=seed,
    )  # fmt: skip
    model.model.norm.weight.data.mul_(8)
    return model


student, teacher = tiny(0), tiny(1)
# The same weights as the student, in the hands of the learner. Its rows share their prompt.
learning = tiny(0)
forward = Forward(learning)


def responses() -> list[tuple[int, ...]]:
    """Every response: ended by EOS, or by the horizon."""
    made = set()
    for tokens in itertools.product(range(VOCAB), repeat=HORIZON):
        end = tokens.index(EOS) + 1 if EOS in tokens else HORIZON
        made.add(tokens[:end])
    return sorted(made)


def contexts() -> Iterator[tuple[int, ...]]:
    """Every state in which a token is sampled."""
    for length in range(HORIZON):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            if EOS not in tokens:
                yield tokens


def next_logits(model: PreTrainedModel, response: tuple[int, ...]) -> Tensor:
    """Logits of every token of the response and of the one after it."""
    return model(input_ids=torch.tensor([[*PROMPT, *response]])).logits[0, len(PROMPT) - 1 :]


def token_logprobs(model: PreTrainedModel, response: tuple[int, ...], T: float) -> Tensor:
    log_p = torch.log_softmax(next_logits(model, response)[:-1] / T, dim=-1)
    return log_p[torch.arange(len(response)), torch.tensor(response, dtype=torch.long)]


def flat_gradient(loss: Tensor, model: PreTrainedModel = student) -> Tensor:
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


@cache
def true_gradient(T: float, teacher_T: float) -> Tensor:
    """Of sum_y p_T(y) (log p_T(y) - log q(y)), with q at `teacher_T`, nothing held fixed."""
    total = torch.zeros(())
    for response in responses():
        log_p = token_logprobs(student, response, T).sum()
        log_q = token_logprobs(teacher, response, teacher_T).sum().detach()
        total = total + log_p.exp() * (log_p - log_q)
    return flat_gradient(total)


def immediate_gradient(T: float) -> Tensor:
    """Of sum over states of KL(p_T || q_T) at that state, how often it is met held fixed."""
    total = torch.zeros(())
    for context in contexts():
        met = token_logprobs(student, context, T).sum().exp().detach()
        here = reverse_kl(
            next_logits(student, context)[-1:], next_logits(teacher, context)[-1:].detach(), T
        )
        total = total + met * here.sum()
    return flat_gradient(total)


def segment_of(response: tuple[int, ...], T: float, teacher_T: float) -> Segment:
    with torch.no_grad():
        behaviour = token_logprobs(student, response, T).tolist()
        scored = token_logprobs(teacher, response, teacher_T).tolist()
    observed = len(PROMPT)
    return Segment(
        tokens_T=[*PROMPT, *response],
        action_mask_T=[False] * observed + [True] * len(response),
        behaviour_logprobs_T=[0.0] * observed + behaviour,
        versions_T=[-1] * observed + [0] * len(response),
        temperature=T,
        teacher_logprobs_T=[0.0] * observed + scored,
    )


def expected_gradient(T: float, discount: float, teacher_T: float) -> Tensor:
    """E_{y ~ p_T} of the gradient of our loss on y: what infinitely many rollouts would give."""
    segments = [segment_of(response, T, teacher_T) for response in responses()]
    group = TrajectoryGroup(group_id=0, trajectories_G=[trajectory(s) for s in segments])
    rows = policy_rows([group], kl_coef=1.0, kl_discount_factor=discount, reward_coef=0.0)
    batch = collate(rows)
    probability_N = torch.from_numpy(
        np.concatenate(
            [
                np.full(s.num_actions, np.exp(s.behaviour_logprobs_T.sum(), dtype=np.float64))
                for s in segments
            ]
        )
    )
    loss, metrics = importance_sampling(
        forward(batch).logprobs_N,
        batch.behaviour_logprobs_N,
        batch.weights_N * probability_N,
        num_tokens=1,
    )
    assert metrics["train/logprob_gap"].item() < 1e-3  # on-policy
    return flat_gradient(loss, learning)


def error(made: Tensor, truth: Tensor) -> float:
    return ((made - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("T", TEMPERATURES)
def test_the_enumeration_is_complete(T: float) -> None:
    assert len(responses()) == 1 + 4 * 1 + 16 * 5
    total = sum(token_logprobs(student, response, T).sum().exp().item() for response in responses())
    assert total == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("T", TEMPERATURES)
def test_with_the_whole_future_it_is_the_gradient_of_the_sequence_kl(T: float) -> None:
    assert error(expected_gradient(T, discount=1.0, teacher_T=T), true_gradient(T, T)) < 1e-5


@pytest.mark.parametrize("T", TEMPERATURES)
def test_with_no_future_it_is_the_gradient_of_each_state_s_kl(T: float) -> None:
    """Biased towards KL(p_T || q_T): it does not count that a token leads to other states."""
    made = expected_gradient(T, discount=0.0, teacher_T=T)
    assert error(made, immediate_gradient(T)) < 1e-5
    assert error(made, true_gradient(T, T)) > 0.02


@pytest.mark.parametrize("T", [0.5, 2.0])
def test_a_teacher_scored_at_one_gives_another_objective(T: float) -> None:
    """The bias that this project removes: an unscaled teacher is the gradient towards q_1."""
    made = expected_gradient(T, discount=1.0, teacher_T=1.0)
    assert error(made, true_gradient(T, 1.0)) < 1e-5
    assert error(made, true_gradient(T, T)) > 0.1
