"""All responses of a tiny policy, so that each expectation over samples is a finite sum.

A vocabulary of 5 and at most 3 new tokens give 85 responses. Gradients of the product come from its
rows, batches, forward pass and loss; reference values come from autograd over plain model calls.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.models.loading import new_qwen3
from distill.models.logprobs import TokenStats
from distill.objective.batching import Batch, TrainingRow, collate
from distill.objective.losses import StepCounts
from distill.objective.rows import policy_rows
from distill.objective.settings import ObjectiveConfig, TopKFrom
from distill.types import Segment, TopLogprobs, TrajectoryGroup
from learner.forward import Forward
from learner.policy_loss import PolicyObjectiveLoss, TeacherSamplesLoss
from learner.teachers import LocalTeachers
from tests.samples import segment_of, trajectory
from tests.states import with_states

VOCAB, HORIZON, EOS = 5, 3, 1
PROMPT = (3, 0, 2)
TEMPERATURES = [0.5, 1.0, 2.0]
TOP_K = 2
# Acts at every temperature: gaps go up to 3.6, 1.8 and 0.8 nats.
KL_CLIP = 0.5

# log p and log q of one state, shape (V,) each -> its divergence.
StateDivergence = Callable[[Tensor, Tensor], Tensor]


def conditional(log_q_V: Tensor, log_p_V: Tensor) -> Tensor:
    """log q conditional on the tokens of p, where q has additional padding ids."""
    width = len(log_p_V)
    return log_q_V if len(log_q_V) == width else log_q_V[:width].log_softmax(dim=0)


def reverse_kl(log_p_V: Tensor, log_q_V: Tensor) -> Tensor:
    log_q_V = conditional(log_q_V, log_p_V)
    return (log_p_V.exp() * (log_p_V - log_q_V)).sum()


def clipped_kl(clip: float) -> StateDivergence:
    """Surrogate with a fixed log ratio: only its gradient is meaningful, not its value."""

    def divergence(log_p_V: Tensor, log_q_V: Tensor) -> Tensor:
        total = torch.zeros(())
        for log_p, log_q in zip(log_p_V, log_q_V, strict=True):
            gap = (log_p - log_q).item()
            total = total + log_p.exp() * min(max(gap, -clip), clip)
        return total

    return divergence


def forward_kl(log_p_V: Tensor, log_q_V: Tensor) -> Tensor:
    log_q_V = conditional(log_q_V, log_p_V)
    return (log_q_V.exp() * (log_q_V - log_p_V)).sum()


def jsd(log_p_V: Tensor, log_q_V: Tensor) -> Tensor:
    log_q_V = conditional(log_q_V, log_p_V)
    log_m_V = ((log_p_V.exp() + log_q_V.exp()) / 2).log()
    return (reverse_kl(log_p_V, log_m_V) + reverse_kl(log_q_V, log_m_V)) / 2


def top_tokens(support: TopKFrom, log_p_V: Tensor, log_q_V: Tensor) -> list[int]:
    """Tokens of a top-k objective: the student's top 2, the teacher's, or one of each."""
    each = TOP_K if support != "union" else TOP_K // 2
    own = log_p_V.argsort(descending=True).tolist()[: each if support != "teacher" else 0]
    others = [v for v in log_q_V.argsort(descending=True).tolist() if v not in own]
    return own + others[: each if support != "student" else 0]


def coarse(support: TopKFrom, whole: StateDivergence) -> StateDivergence:
    """Distributions over the listed tokens and one rest token.

    A listed padding id of the teacher is left out; other padding ids count in the teacher's rest.
    """

    def divergence(log_p_V: Tensor, log_q_V: Tensor) -> Tensor:
        listed = top_tokens(support, log_p_V.detach(), log_q_V)
        top = [v for v in listed if v < len(log_p_V)]

        def merged(log_V: Tensor) -> Tensor:
            rest = [v for v in range(len(log_V)) if v not in listed]
            parts = torch.cat([log_V[top], log_V[rest].exp().sum().log()[None]])
            return parts.log_softmax(dim=0)

        return whole(merged(log_p_V), merged(log_q_V))

    return divergence


@dataclass(frozen=True, slots=True)
class Estimator:
    """Objective, and the divergence whose gradient it estimates in every state.

    `per_state` is None for an estimator of the gradient of the sequence KL.
    """

    objective: ObjectiveConfig
    per_state: StateDivergence | None


def _estimator(per_state: StateDivergence | None, **settings: Any) -> Estimator:
    return Estimator(ObjectiveConfig(**settings), per_state)


def _top(support: TopKFrom) -> dict[str, Any]:
    each = TOP_K if support != "union" else TOP_K // 2
    return {"estimator": "top_k", "teacher_top_k": each, "top_k_from": support}


SUPPORTS: tuple[TopKFrom, ...] = ("student", "union", "teacher")
ESTIMATORS = {
    "sampled, g=1": _estimator(None, kl_discount_factor=1.0),
    "sampled, g=0": _estimator(reverse_kl),
    "full, reverse_kl": _estimator(reverse_kl, estimator="full"),
    "full, forward_kl": _estimator(forward_kl, estimator="full", divergence="forward_kl"),
    "full, jsd": _estimator(jsd, estimator="full", divergence="jsd"),
    **{
        f"top_k of the {support}, reverse_kl": _estimator(reverse_kl, **_top(support))
        for support in SUPPORTS
    },
    **{
        f"top_k of the {support}, forward_kl": _estimator(
            coarse(support, forward_kl), divergence="forward_kl", **_top(support)
        )
        for support in SUPPORTS
    },
    f"sampled, kl_clip={KL_CLIP}": _estimator(clipped_kl(KL_CLIP), kl_clip=KL_CLIP),
}


def tiny(seed: int, padding: int = 0, pad_token_id: int | None = 0) -> PreTrainedModel:
    """Model whose embedding of the pad token, one of the five tokens, is 0.

    RMSNorm is not continuous at 0: any other pad embedding would move the model far from this.
    """
    model = new_qwen3(
        vocab_size=VOCAB + padding, hidden_size=32, layers=1, heads=1, context_length=8,
        eos_token_id=EOS, pad_token_id=pad_token_id, seed=seed,
    )  # fmt: skip
    model.model.norm.weight.data.mul_(8)
    return model


@cache
def responses(stops: tuple[int, ...] = (EOS,)) -> tuple[tuple[int, ...], ...]:
    """All responses: each ends with a stop token or at the horizon."""
    made = set()
    for tokens in itertools.product(range(VOCAB), repeat=HORIZON):
        ends = [place for place, token in enumerate(tokens) if token in stops]
        made.add(tokens[: ends[0] + 1 if ends else HORIZON])
    return tuple(sorted(made))


def contexts(stops: tuple[int, ...] = (EOS,)) -> Iterator[tuple[int, ...]]:
    """All states in which a token is sampled."""
    for length in range(HORIZON):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            if not set(stops) & set(tokens):
                yield tokens


def outcomes(stops: tuple[int, ...] = (EOS,)) -> list[int]:
    """Representative token of each outcome in a state; all stop tokens are one outcome."""
    return [v for v in range(VOCAB) if v not in stops[1:]]


def state_logprobs(
    model: PreTrainedModel, response: tuple[int, ...], T: float, stops: tuple[int, ...] = (EOS,)
) -> Tensor:
    """log softmax(z / T) of the outcomes in each state of the response and the state after it."""
    logits = model(input_ids=torch.tensor([[*PROMPT, *response]])).logits[0, len(PROMPT) - 1 :]
    log_p_NV = torch.log_softmax(logits / T, dim=-1)
    if len(stops) == 1:
        return log_p_NV
    stopping_N = log_p_NV[:, list(stops)].exp().sum(1).log()
    return torch.stack(
        [stopping_N if v == stops[0] else log_p_NV[:, v] for v in outcomes(stops)], dim=1
    )


def token_logprobs(
    model: PreTrainedModel, response: tuple[int, ...], T: float, stops: tuple[int, ...] = (EOS,)
) -> Tensor:
    """Log-probs of the response's own tokens."""
    log_p = state_logprobs(model, response, T, stops)[:-1]
    columns = [outcomes(stops).index(stops[0] if v in stops else v) for v in response]
    return log_p[torch.arange(len(response)), torch.tensor(columns, dtype=torch.long)]


def flat_gradient(loss: Tensor, model: PreTrainedModel) -> Tensor:
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def error(made: Tensor, truth: Tensor) -> float:
    """Relative error |made - truth| / |truth|."""
    return ((made - truth).norm() / truth.norm()).item()


class World:
    """Student, teacher, and the learner's copies of both."""

    def __init__(
        self,
        directory: Path,
        stops: tuple[int, ...] = (EOS,),
        device: str = "cpu",
        padding: int = 0,
        pad_token_id: int | None = 0,
        by_states: bool = False,
    ) -> None:
        """Create the models; several `stops` count as one outcome.

        Args:
            directory: receives the teacher's checkpoint.
            padding: number of additional ids in the teacher's vocabulary.
            pad_token_id: None for tests that move weights by small distances (`tiny`).
            by_states: the learner has only the teacher's head, and rows have its hidden states.
            device: device of the learner; reference values are computed on the CPU.
        """
        self.stops = stops
        self._event = event = stops if len(stops) > 1 else ()
        assert not padding or len(stops) == 1
        student, self.teacher, self.current = (
            tiny(seed, more, pad_token_id) for seed, more in ((0, 0), (1, padding), (0, 0))
        )
        self.student, self.learning = student, tiny(0, 0, pad_token_id)
        nn.Module.to(self.learning, device)
        self.teacher.requires_grad_(False)
        self._device = device
        self._forward = Forward(self.learning, event=event)
        self._probabilities: dict[float, Tensor] = {}
        self._segments: dict[tuple[float, float, TopKFrom], list[Segment]] = {}
        for plain, own in zip(self.current.parameters(), self.learning.parameters(), strict=True):
            plain.data = own.data.cpu()  # on a CPU the same memory, for plain calls
        path = str(directory / "teacher")
        self.teacher.save_pretrained(path)
        copies, heads = ({}, {"": path}) if by_states else ({"": path}, {})
        self._by_states = by_states
        self._teachers = LocalTeachers(
            copies, heads=heads, dtype=torch.float32, device=device, event=event
        )

    @torch.no_grad()
    def move_learner(self, away: float) -> None:
        """Move the learner's weights a relative distance from the sampler's, in one direction."""
        generator = torch.Generator().manual_seed(7)
        for own, sampling in zip(
            self.learning.parameters(), self.student.parameters(), strict=True
        ):
            direction = torch.randn(sampling.shape, generator=generator)
            own.copy_(sampling + away * sampling.norm() / sampling.numel() ** 0.5 * direction)

    def probabilities(self, T: float) -> Tensor:
        """p_T of every response under the policy that samples, float64."""
        if T not in self._probabilities:
            with torch.no_grad():
                sums = [  # as it is sampled: each stop token by itself
                    token_logprobs(self.student, response, T).sum()
                    for response in responses(self.stops)
                ]
            self._probabilities[T] = torch.stack(sums).double().exp()
        return self._probabilities[T]

    def sequence_gradient(self, T: float, teacher_T: float) -> Tensor:
        """Gradient of sum_y p_T(y) (log p_T(y) - log q(y)) with q at `teacher_T`, nothing fixed."""
        terms = [p.exp() * (p - q) for p, q in self._sequence_logprobs(T, teacher_T)]
        return flat_gradient(torch.stack(terms).sum(), self.current)

    def _sequence_logprobs(self, T: float, teacher_T: float) -> Iterator[tuple[Tensor, Tensor]]:
        """log p_T (the learner's) and log q of each response."""
        for response in responses(self.stops):
            if set(response) & set(self.stops[1:]):
                continue  # the same outcomes as with the first of the stops
            yield (
                token_logprobs(self.current, response, T, self.stops).sum(),
                token_logprobs(self.teacher, response, teacher_T, self.stops).sum(),
            )

    def state_gradient(self, T: float, divergence: StateDivergence) -> Tensor:
        """Gradient of `state_sum`."""
        return flat_gradient(self.state_sum(T, divergence), self.current)

    def state_sum(
        self, T: float, divergence: StateDivergence, met_by: PreTrainedModel | None = None
    ) -> Tensor:
        """Sum over states of the learner's divergence, weighted by fixed state probabilities.

        The state probabilities are those of the policy that samples, or of `met_by`.
        """
        total = torch.zeros(())
        for context in contexts(self.stops):
            met = token_logprobs(met_by or self.student, context, T).sum().exp().detach()
            log_p_V = state_logprobs(self.current, context, T, self.stops)[-1]
            log_q_V = state_logprobs(self.teacher, context, T, self.stops)[-1]
            total = total + met * divergence(log_p_V, log_q_V)
        return total

    def claimed_gradient(self, estimator: Estimator, T: float) -> Tensor:
        """Exact gradient that the estimator's mean should equal."""
        if estimator.per_state is None:
            return self.sequence_gradient(T, T)
        return self.state_gradient(T, estimator.per_state)

    def sequence_forward_kl_gradient(self, T: float) -> Tensor:
        """Gradient of sum_y q_T(y) (log q_T(y) - log p_T(y)) with the learner's p, by response."""
        terms = [q.exp() * (q - p) for p, q in self._sequence_logprobs(T, T)]
        return flat_gradient(torch.stack(terms).sum(), self.current)

    def gradient_of_teacher_samples(self, objective: ObjectiveConfig, T: float) -> Tensor:
        """Expected gradient over teacher samples, computed by the product's rows and loss."""
        loss = TeacherSamplesLoss(normalisation=objective.normalisation)
        weighted, total = [], 0.0
        for row in self.rows(objective, T, T, by_teacher=True):
            response = tuple(row.tokens_T[row.loss_mask_T].tolist())
            with torch.no_grad():  # as it is sampled: each stop token by itself
                probability = token_logprobs(self.teacher, response, T).sum().exp().item()
            weighted.append(replace(row, advantages_T=probability * row.advantages_T))
            total += probability
        assert abs(total - 1) < 1e-5
        made, _ = loss(self._forward, collate(weighted, self._device), StepCounts(1, 1))
        return flat_gradient(made, self.learning).cpu()

    def rows(
        self, objective: ObjectiveConfig, T: float, teacher_T: float, *, by_teacher: bool = False
    ) -> list[TrainingRow]:
        """One row per response, as the learner gets them from a group of samples."""
        support = objective.support
        if (T, teacher_T, support) not in self._segments:
            self._segments[T, teacher_T, support] = [
                self._segment(response, T, teacher_T, support) for response in responses(self.stops)
            ]
        segments = self._segments[T, teacher_T, support]
        group = TrajectoryGroup(
            group_id=0, trajectories_G=tuple(map(trajectory, segments)), by_teacher=by_teacher
        )
        return policy_rows([group], objective, stop_event=self._event)

    @torch.no_grad()
    def _segment(
        self, response: tuple[int, ...], T: float, teacher_T: float, support: TopKFrom
    ) -> Segment:
        behaviour = token_logprobs(self.student, response, T, self.stops).tolist()
        scored = token_logprobs(self.teacher, response, teacher_T, self.stops).tolist()
        log_p_NV = state_logprobs(self.student, response, T, self.stops)[:-1]
        log_q_NV = state_logprobs(self.teacher, response, teacher_T, self.stops)[:-1]
        top_NK = torch.tensor(
            [
                top_tokens(support, log_p_V, log_q_V)
                for log_p_V, log_q_V in zip(log_p_NV, log_q_NV, strict=True)
            ]
        ).view(len(response), TOP_K)
        columns = [*outcomes(self.stops), *range(VOCAB, self.teacher.config.vocab_size)]
        top_ids_NK = torch.tensor(columns)[top_NK]
        observed = len(PROMPT)
        return segment_of(
            tokens_T=np.array([*PROMPT, *response]),
            action_mask_T=np.arange(observed + len(response)) >= observed,
            behaviour_logprobs_T=np.array([0.0] * observed + behaviour),
            versions_T=np.array([-1] * observed + [0] * len(response)),
            temperature=T,
            teacher_logprobs_T=np.array([0.0] * observed + scored),
            reference_logprobs_T=np.array([0.0] * observed + scored),
            teacher_top=TopLogprobs(
                ids_NK=top_ids_NK.numpy().astype(np.int32),
                logprobs_NK=log_q_NV.gather(1, top_NK).numpy(),
            ),
        )

    def expected_gradient(
        self, objective: ObjectiveConfig, T: float, teacher_T: float | None = None
    ) -> Tensor:
        """Expected gradient over rollouts: one batch of all responses, weighted by p_T."""
        batch = self.rollouts(objective, T, teacher_T)
        return flat_gradient(self.expected_loss(objective, batch), self.learning).cpu()

    def rollouts(
        self, objective: ObjectiveConfig, T: float, teacher_T: float | None = None
    ) -> Batch:
        return collate(self.rows(objective, T, teacher_T or T), self._device)

    def expected_loss(self, objective: ObjectiveConfig, batch: Batch) -> Tensor:
        """Loss whose gradient is the mean over `rollouts`; its value has no meaning."""
        probability_R = self.probabilities(batch.rows[0].temperature).float()
        probability_N = probability_R.to(self._device)[batch.row_N]

        def weighted(batch: Batch, **wanted: Any) -> TokenStats:
            stats = self._forward(batch, **wanted)
            for values_N in stats:
                if values_N is not None and values_N.requires_grad:
                    values_N.register_hook(lambda gradient_N: gradient_N * probability_N)
            return stats

        return self._loss(objective, cast(Forward, weighted), batch)

    def descend(self, objective: ObjectiveConfig, T: float, shown: Sequence[int]) -> list[float]:
        """KL(p || q) in the sampled states after several updates on one set of rollouts.

        The learner starts as the policy that sampled. Each update of Adam uses the mean gradient.
        """
        self.move_learner(0.0)
        batch = self.rollouts(objective, T)
        optimizer = torch.optim.Adam(self.learning.parameters(), lr=1e-3)
        kls = []
        for update in range(max(shown) + 1):
            if update in shown:
                with torch.no_grad():
                    kls.append(self.state_sum(T, reverse_kl).item())
            optimizer.zero_grad()
            self.expected_loss(objective, batch).backward()
            optimizer.step()
        return kls

    def gradients_by_response(
        self, objective: ObjectiveConfig, T: float, teacher_T: float | None = None
    ) -> Tensor:
        """Gradient of one sample, for every response: (responses, parameters)."""
        return torch.stack(
            [
                flat_gradient(self._loss(objective, self._forward, collate([row])), self.learning)
                for row in self.rows(objective, T, teacher_T or T)
            ]
        )

    def naive_gradients_by_response(
        self, token_loss: Callable[[Tensor, Tensor], Tensor], T: float
    ) -> Tensor:
        """Gradients (responses, parameters) of a loss of the tokens' (log p_T, log q_T)."""
        return torch.stack(
            [
                flat_gradient(
                    token_loss(
                        token_logprobs(self.student, response, T),
                        token_logprobs(self.teacher, response, T),
                    ).sum(),
                    self.student,
                )
                for response in responses()
            ]
        )

    def _loss(self, objective: ObjectiveConfig, forward: Forward, batch: Batch) -> Tensor:
        loss = PolicyObjectiveLoss(
            objective=objective, teachers=self._teachers, stop_event=self._event
        )
        distribution = None
        if loss.needs_distribution:
            if self._by_states:
                batch = replace(batch, rows=[with_states(self.teacher, row) for row in batch.rows])
            distribution = self._teachers.distribution_of(batch, 4096)
        return loss(forward, batch, StepCounts(1, 1), distribution)[0]


def k1(log_p_N: Tensor, log_q_N: Tensor) -> Tensor:
    """log p - log q: an estimate of KL(p || q) that is not a loss."""
    return log_p_N - log_q_N


def k2(log_p_N: Tensor, log_q_N: Tensor) -> Tensor:
    return (log_p_N - log_q_N).square() / 2


def k3(log_p_N: Tensor, log_q_N: Tensor) -> Tensor:
    """q / p - 1 - log q / p: an estimate of KL(p || q) that as a loss minimises KL(q || p)."""
    return (log_q_N - log_p_N).exp() - 1 - (log_q_N - log_p_N)


def mean_gradient(gradients_RW: Tensor, probability_R: Tensor) -> Tensor:
    """Expectation of (responses, parameters) under (responses,)."""
    return (probability_R @ gradients_RW.double()).float()


def total_variance(gradients_RW: Tensor, probability_R: Tensor) -> float:
    """Trace of the covariance of one sample's gradient."""
    centred_RW = gradients_RW.double() - mean_gradient(gradients_RW, probability_R)
    return (probability_R @ centred_RW.square().sum(dim=1)).item()
