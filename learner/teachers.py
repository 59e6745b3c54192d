"""Teachers in the learner, and DPO's reference: frozen models, heads, and a copy that follows.

A learner with several workers shards frozen models like the student (`learner.sharding`): each
worker holds its share of the weights, and a layer is gathered while it runs. A pass is then
collective: all workers run the same models in the same order, each on its own rows. Every
`LearnerWorker` gets the same number of micro-batches. If the micro-batches of one round have
different teachers, `LocalTeachers` runs each of these teachers on every worker.

A frozen model cuts rows into passes of its own (`Forward.batches`): the student's micro-batch may
be larger in its shape, because it pads what the student packs, or sees a privileged context.

A head needs no pass of the model: the teacher's engine returned the hidden states
(`distill.states`). The computation from hidden states to distributions is the same for copies and
heads (`VocabularyHead.distribution_of`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from distill.models.attention_probe import shares_prefixes
from distill.models.head import in_dtype, load_head
from distill.models.loading import load_causal_lm
from distill.models.logprobs import Event, as_outcomes
from distill.objective.batching import Batch, TrainingRow, collate
from distill.objective.objectives import TeacherDistribution
from distill.privileged import in_context
from distill.states import joined
from distill.types import FloatArray, TokenArray
from learner.config import ShadowRule
from learner.forward import Forward, shortest
from learner.initial_weights import InitialWeights
from learner.memory import check_fits, frozen_in
from learner.process_group import WorkerGroup
from learner.sharding import Root, local, reshard, shard

# Suffix of the shadow's tensors, which are saved with AdamW's moments of the same weights.
SUFFIX = ".teacher"


class Teacher(ABC):
    """A teacher in the learner: a copy of the model, or only its head.

    Attributes:
        path: the checkpoint.
        event: tokens that are one outcome (`distill.stops`).
    """

    path: str
    event: Event
    _device: str

    @abstractmethod
    def distribution_of(self, batch: Batch, token_budget: int) -> TeacherDistribution:
        """log q_T of slices of the batch's trained tokens, with each row's teacher context.

        Args:
            token_budget: largest number of tokens in a pass of more than one row.
        """

    def read(
        self, rows_B: Sequence[TrainingRow], ids_K: TokenArray, token_budget: int
    ) -> list[tuple[FloatArray, FloatArray]]:
        """Read log q_T from the distributions that the loss uses.

        Returns for each row log q_T of its N trained tokens, (N,), and of the tokens `ids_K` at the
        same positions, (N, K).
        """
        batch = collate(rows_B, self._device)
        log_q = self.distribution_of(batch, token_budget)
        columns_N = as_outcomes(batch.tokens_N, self.event)
        columns_K = torch.from_numpy(ids_K.astype(np.int64)).to(batch.tokens_N.device)
        found, start = [], 0
        for row in rows_B:  # one at a time: its positions times the vocabulary
            here, start = slice(start, start + row.num_trained), start + row.num_trained
            log_q_NV = log_q(here)
            own_N = log_q_NV.gather(1, columns_N[here, None]).squeeze(1)
            listed_NK = log_q_NV.index_select(1, columns_K)
            found.append((own_N.cpu().numpy(), listed_NK.cpu().numpy()))
        return found

    def logprobs(self, rows_D: Sequence[TrainingRow], token_budget: int) -> list[FloatArray]:
        """log q_T of each row's trained tokens."""
        return [own_N for own_N, _ in self.read(rows_D, np.empty(0, np.int32), token_budget)]


class TeacherHead(Teacher):
    """Vocabulary projection of a served teacher, applied to the hidden states in the rows.

    Every worker holds the whole head. It is used in the dtype of the states, which is the dtype
    that the teacher is served in.
    """

    def __init__(self, path: str, *, device: str, event: Event = ()) -> None:
        """Load only the head of the checkpoint.

        Raises:
            CheckpointError: the head cannot be read.
        """
        self.path, self.event, self._device = path, event, device
        self.head, self.config = load_head(path, device=device, event=event)
        self._served = self.head  # in the dtype of the states
        self._autocast = partial(torch.autocast, torch.device(device).type, enabled=False)

    @property
    def projection(self) -> nn.Linear:
        """The projection in the dtype of its checkpoint."""
        return cast(nn.Linear, self.head.projection)

    def distribution_of(self, batch: Batch, token_budget: int) -> TeacherDistribution:
        states = [row.teacher_states for row in batch.rows]
        assert None not in states, "a row without the states that its teacher's head needs"
        hidden_NH = joined([each for each in states if each is not None], self._device)
        self._served = in_dtype(self._served, self.config, hidden_NH.dtype)
        return self._served.distribution_of(hidden_NH, batch.temperature_N, self._autocast)


class FrozenModel(Teacher):
    """A model without optimizer; each worker of a replica holds a share of its weights.

    Attributes:
        model: the model; its parameters are sharded if the group has several workers.
    """

    def __init__(
        self,
        path: str,
        group: WorkerGroup,
        *,
        dtype: torch.dtype,
        device: str,
        compute_dtype: torch.dtype | None = None,
        packing: bool = False,
        event: Event = (),
        room: int | None = None,
    ) -> None:
        """Load the model. Collective: every worker of the group calls it.

        Args:
            dtype: dtype of the weights.
            compute_dtype: dtype of matrix products; None: that of the weights.
            packing: pack rows if the model's architecture allows it, else pad them.
            event: tokens that are one outcome (`distill.stops`).
            room: bytes that the workers on this device may fill; None: the free memory.

        Raises:
            CheckpointError: the checkpoint cannot be loaded.
            ConfigError: the worker's share does not fit into memory.
        """
        share = group.sharers(device) / group.shards
        check_fits(path, device, frozen_in(dtype), share, room)
        self.path, self.event, self._device = path, event, device
        self._group = group
        self._root: Root | None = None
        if group.size == 1:
            self.model = load_causal_lm(path, dtype=dtype, device=device).requires_grad_(False)
            shares = shares_prefixes(self.model.eval())
        else:
            initial = InitialWeights(path, group, dtype=dtype)
            self.model = initial.model.requires_grad_(False)
            shares = group.broadcast(initial.probe() if group.rank == 0 else None)
            self._root = shard(self.model, group, compute_dtype or dtype, initial)
        self._forward = Forward(
            self.model,
            dtype=compute_dtype,
            root=self._root,
            shares=shares,
            packs=packing and shares,
            event=event,
        )
        reshard(self._root)

    def distribution_of(self, batch: Batch, token_budget: int) -> TeacherDistribution:
        """log q_T of slices of the batch's trained tokens, with each row's teacher context.

        The model runs once over the batch, to its hidden states; its distributions are computed a
        chunk of positions at a time together with the learner's own. If the model is sharded, the
        result holds a copy of its vocabulary projection, so that it gathers nothing.
        """
        seen = [teacher_row(row) for row in batch.rows]
        copies = "none" if self._root is None else "all"
        try:
            return self._forward.distribution_of(seen, token_budget, self._group, copies=copies)
        finally:
            reshard(self._root)

    def logprobs(self, rows_D: Sequence[TrainingRow], token_budget: int) -> list[FloatArray]:
        """log q_T of each row's trained tokens, without teacher contexts. Collective."""
        made = self._forward.logprobs(rows_D, token_budget, self._group)
        reshard(self._root)
        return made


class LocalTeachers:
    """The learner's copies and heads of teachers by name.

    Each teacher returns distributions for the rows with its name, at each row's own T.

    Attributes:
        models: the copies and heads by name.
    """

    def __init__(
        self,
        models: Mapping[str, str],
        *,
        dtype: torch.dtype,
        device: str,
        packing: bool = False,
        event: Event = (),
        group: WorkerGroup | None = None,
        heads: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            models: checkpoints to copy, by the teachers' names.
            heads: checkpoints of which only the head is loaded, by the teachers' names.

        The other arguments are those of `FrozenModel`.

        Raises:
            CheckpointError: a checkpoint cannot be loaded.
            ConfigError: a copy does not fit into memory.
        """
        group = group or WorkerGroup(None, device)
        load = partial(
            FrozenModel, group=group, dtype=dtype, device=device, packing=packing, event=event
        )
        self.models: dict[str, Teacher] = {name: load(path) for name, path in models.items()}
        for name, path in heads.items():
            self.models[name] = TeacherHead(path, device=device, event=event)

    @property
    def heads(self) -> list[str]:
        """Names of the teachers of which the learner has only the head."""
        return [name for name, each in self.models.items() if isinstance(each, TeacherHead)]

    def distribution_of(
        self, batch: Batch, token_budget: int, in_round: Sequence[str] | None = None
    ) -> TeacherDistribution:
        """log q_T of slices of the batch's trained tokens, by the batch's teacher.

        Args:
            token_budget: see `Teacher.distribution_of`.
            in_round: names of the teachers of all workers' batches in this round, the same on every
                worker; None: there is one worker.
        """
        own, *others = {row.teacher for row in batch.rows}
        assert not others, "a batch has one teacher"
        if in_round is None:
            in_round = [own]
        found = None
        for name in in_round:
            if name == own:
                found = self.models[name].distribution_of(batch, token_budget)
            elif isinstance(self.models[name], FrozenModel):
                self.models[name].logprobs([shortest(batch.rows[0])], token_budget)
        assert found is not None, f"{own} is not among the round's teachers {in_round}"
        return found


def teacher_row(row: TrainingRow) -> TrainingRow:
    """The row as its teacher sees it: with the privileged context, if any.

    Its trained tokens are those of the row, in the same order. The experts that the engine chose
    are dropped, because the teacher's own routers choose.
    """
    row = row if row.experts_TLK is None else replace(row, experts_TLK=None)
    context_T = row.teacher_context_T
    if context_T is None:
        return row

    def behind(values_T: np.ndarray) -> np.ndarray:
        nothing_T = np.zeros(len(context_T), values_T.dtype)
        return in_context(values_T, nothing_T, row.teacher_replaces)

    return replace(
        row,
        tokens_T=in_context(row.tokens_T, context_T, row.teacher_replaces),
        loss_mask_T=behind(row.loss_mask_T),
        advantages_T=behind(row.advantages_T),
        behaviour_logprobs_T=behind(row.behaviour_logprobs_T),
        proximal_logprobs_T=None,
        reference_logprobs_T=None,
        teacher_context_T=None,
        teacher_replaces=0,
        sampled_kl_coef_T=None,
        clipped_kl_coef_T=None,
        teacher_gaps_T=None,
    )


class Shadow:
    """A lagged or EMA teacher: a second set s of the trained weights w, updated from them.

        every=n    s <- w, at each version that n divides: the student 0 to n - 1 steps before
        ema=a      s <- a s + (1 - a) w, after every step (Polyak & Juditsky 1992; Tarvainen &
                   Valpola 2017): at version v it is  a^v w_0 + (1 - a) sum_{i=1}^{v} a^{v-i} w_i

    It is fp32, initially equal to the weights, and sharded like them: each worker updates its own
    share. Weights that are not trained exist once.
    """

    def __init__(self, model: nn.Module, rule: ShadowRule) -> None:
        self._rule = rule
        self._weights = {
            name: p.detach() for name, p in model.named_parameters() if p.requires_grad
        }
        self._shadows = {name: weight.clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def follow(self, version: int) -> None:
        """Update the shadow. Call this after each step, with the new version of the weights."""
        if not self._rule.moves_at(version):
            return
        shadows, weights = map(list, zip(*self._pairs(), strict=True))
        if self._rule.ema is None:
            for shadow, weight in zip(shadows, weights, strict=True):
                shadow.copy_(weight)
        else:
            get_ema_multi_avg_fn(self._rule.ema)(shadows, weights, version)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the exact values of the weights and the shadow. Call it again to undo."""
        for shadow, weight in self._pairs():
            own = weight.clone()
            weight.copy_(shadow)
            shadow.copy_(own)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Context manager in which the model has the shadow's values."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def state(self) -> Mapping[str, Tensor]:
        """The tensors, not copied, by their names in checkpoints."""
        return {f"{name}{SUFFIX}": shadow for name, shadow in self._shadows.items()}

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for name, weight in self._weights.items():
            yield local(self._shadows[name]), local(weight)
