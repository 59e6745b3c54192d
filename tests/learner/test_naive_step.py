"""The gradient of a learner's step against an independent one, computed row by row."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from distill.objective.rows import policy_rows
from distill.objective.settings import ObjectiveConfig
from distill.types import Segment, TopLogprobs, TrajectoryGroup
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss
from learner.teachers import LocalTeachers
from tests.conftest import TinyPair
from tests.enumeration import error
from tests.learner.conftest import NewLearner
from tests.samples import segment_of, trajectory
from tests.tiny import VOCAB_SIZE

TOP_K, KL_COEF, JSD_BETA = 5, 0.7, 0.3
TOP: dict[str, Any] = {
    "estimator": "top_k", "teacher_top_k": TOP_K, "top_k_from": "teacher",
}  # fmt: skip
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sampled": {},
    "sampled, discounted": {"kl_discount_factor": 0.5},
    "full reverse_kl": {"estimator": "full"},
    "full forward_kl": {"estimator": "full", "divergence": "forward_kl"},
    "full jsd": {"estimator": "full", "divergence": "jsd", "jsd_beta": JSD_BETA},
    "top_k bucket forward_kl": TOP | {"divergence": "forward_kl"},
    "top_k bucket jsd": TOP | {"divergence": "jsd", "jsd_beta": JSD_BETA},
    "top_k reverse_kl": TOP,
}


@pytest.fixture(scope="module")
def models(tiny_pair: TinyPair) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Student and teacher."""
    student, teacher = map(AutoModelForCausalLM.from_pretrained, (tiny_pair.student,
                                                                  tiny_pair.teacher))  # fmt: skip
    return student.float(), teacher.float().requires_grad_(False)


def logprobs_at(model: PreTrainedModel, tokens: list[int], T: float) -> Tensor:
    """log softmax(z / T) of what follows each token: (tokens, V)."""
    return torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0] / T, dim=-1)


def teacher_logprobs(teacher: PreTrainedModel, made: Segment) -> list[Tensor]:
    """The teacher's distribution of each action, after its own prompt if it has one."""
    tokens, replaced = made.tokens_T.tolist(), made.teacher_replaces
    context = [] if made.teacher_context_T is None else made.teacher_context_T.tolist()
    log_q = logprobs_at(teacher, [*context, *tokens[replaced:]], made.temperature)
    shift = len(context) - replaced
    return [log_q[t + shift - 1] for t in np.flatnonzero(made.action_mask_T)]


@torch.no_grad()
def make_segment(
    models: tuple[PreTrainedModel, PreTrainedModel], rng: np.random.Generator,
    prompt: list[int], mask: list[int], T: float, hint: list[int] | None = None,
) -> Segment:  # fmt: skip
    """Tokens after `prompt`, some in the teacher's top; behaviour log-probs near the student's."""
    student, teacher = models
    mask_T = np.array([0] * len(prompt) + mask, bool)
    tokens = list(prompt)
    for _ in mask:
        likely = logprobs_at(teacher, tokens, T)[-1].topk(2 * TOP_K).indices.tolist()
        tokens.append(int(rng.choice(likely)))
    log_p = logprobs_at(student, tokens, T)
    behaviour_T = np.zeros(len(tokens), np.float32)
    for t in np.flatnonzero(mask_T):
        behaviour_T[t] = min(0.0, log_p[t - 1, tokens[t]].item() + rng.normal(scale=0.2))
    bare: dict[str, Any] = {
        "tokens_T": np.array(tokens), "action_mask_T": mask_T,
        "behaviour_logprobs_T": behaviour_T, "versions_T": np.zeros(len(tokens), np.int32),
        "temperature": T, "teacher_context_T": None if hint is None else np.array(hint),
        "teacher_replaces": 0 if hint is None else len(prompt),
    }  # fmt: skip
    log_q = teacher_logprobs(teacher, segment_of(**bare))
    scored_T = np.zeros(len(tokens), np.float32)
    scored_T[mask_T] = [
        log_q_V[tokens[t]].item() for t, log_q_V in zip(np.flatnonzero(mask_T), log_q, strict=True)
    ]
    top = torch.stack(log_q).topk(TOP_K)
    return segment_of(
        **bare,
        teacher_logprobs_T=scored_T,
        teacher_top=TopLogprobs(
            ids_NK=top.indices.numpy().astype(np.int32), logprobs_NK=top.values.numpy()
        ),
    )


@pytest.fixture(scope="module")
def groups(models: tuple[PreTrainedModel, PreTrainedModel]) -> list[TrajectoryGroup]:
    """Different lengths and temperatures, two turns in one row, privileged contexts.

    The first turn is not always trained.
    """
    rng = np.random.default_rng(0)
    made = []
    for group_id, (T, prompt, hint) in enumerate(
        [(0.5, [5, 6, 7], None), (1.0, [8, 9, 10, 11], [20, 21, 22, 8, 9, 10, 11]),
         (2.0, [40, 3], [50])]
    ):  # fmt: skip
        masks = [[1] * 3, [1] * 9, [1, 1, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
        segments = [make_segment(models, rng, prompt, mask, T, hint) for mask in masks]
        made.append(
            TrajectoryGroup(group_id=group_id, trajectories_G=tuple(map(trajectory, segments)))
        )
    return made


def token_loss(
    how: ObjectiveConfig, log_p_V: Tensor, log_q_V: Tensor, token: int, behaviour: float,
    future: float,
) -> Tensor:  # fmt: skip
    """Objective of one token over the whole vocabulary; `future` is its discounted gap."""
    p_V, q_V = log_p_V.exp(), log_q_V.exp()
    surrogate = (log_p_V[token] - behaviour).exp() * future
    if how.estimator == "sampled":
        return surrogate
    if how.estimator == "top_k":
        top = log_q_V.topk(TOP_K).indices
        if how.divergence == "reverse_kl":
            fixed = (log_p_V - log_q_V).detach()
            inside = (p_V[top] * fixed[top]).sum()
            return inside if token in top else inside + surrogate
        outside = torch.ones(VOCAB_SIZE).scatter(0, top, 0)
        p_V = torch.cat([p_V[top], (outside * p_V).sum()[None]])
        q_V = torch.cat([q_V[top], (outside * q_V).sum()[None]])
    if how.divergence == "reverse_kl":
        return (p_V * (p_V.log() - q_V.log())).sum()
    if how.divergence == "forward_kl":
        return (q_V * (q_V.log() - p_V.log())).sum()
    m_V = JSD_BETA * q_V + (1 - JSD_BETA) * p_V
    of_teacher = (q_V * (q_V.log() - m_V.log())).sum()
    return JSD_BETA * of_teacher + (1 - JSD_BETA) * (p_V * (p_V.log() - m_V.log())).sum()


def naive_gradient(
    models: tuple[PreTrainedModel, PreTrainedModel], groups: list[TrajectoryGroup],
    how: ObjectiveConfig,
) -> Tensor:  # fmt: skip
    student, teacher = models
    segments = [made for group in groups for made in group.segments()]
    tokens_of_step = sum(made.num_actions for made in segments)
    loss = torch.zeros(())
    for made in segments:
        tokens = made.tokens_T.tolist()
        log_p = logprobs_at(student, tokens, made.temperature)
        log_q = teacher_logprobs(teacher, made)
        actions = np.flatnonzero(made.action_mask_T).tolist()
        future, terms = 0.0, []
        for t, log_q_V in reversed(list(zip(actions, log_q, strict=True))):
            behaviour = float(made.behaviour_logprobs_T[t])
            gap = (log_p[t - 1][tokens[t]] - log_q_V[tokens[t]]).item()  # the learner's own
            future = gap + how.kl_discount_factor * future
            terms.append(token_loss(how, log_p[t - 1], log_q_V, tokens[t], behaviour, future))
        loss = loss + KL_COEF * torch.stack(terms).sum() / tokens_of_step
    gradients = torch.autograd.grad(loss, list(student.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("settings", OBJECTIVES.values(), ids=OBJECTIVES)
def test_a_step_has_the_naive_gradient(
    settings: dict[str, Any], models: tuple[PreTrainedModel, PreTrainedModel],
    groups: list[TrajectoryGroup], new_learner: NewLearner, tiny_pair: TinyPair,
) -> None:  # fmt: skip
    """In several micro-batches, whose teachers each use their own context."""
    how = ObjectiveConfig(**settings, kl_coef=KL_COEF)
    teachers = None
    if how.estimator == "full":
        teachers = LocalTeachers({"": tiny_pair.teacher}, dtype=torch.float32, device="cpu")
    learner = new_learner(token_budget=40)
    learner.step(
        Part(
            rows_D=policy_rows(groups, how),
            loss=PolicyObjectiveLoss(objective=how, teachers=teachers),
        )
    )
    made = torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None])
    naive = naive_gradient(models, groups, how)
    assert error(made, naive) < 1e-3  # a cosine of at least 0.999999
