"""Forward pass of the learner over a batch: log-probs of the trained tokens only, or scores.

The samples of a group have a common prompt. If this saves enough, the prompt is run once for all
samples, forward and backward: the samples' gradients accumulate in the prompt's keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel

from distill.errors import ConfigError
from distill.models.attention_probe import shares_prefixes
from distill.models.autocast import cast_grouped_products
from distill.models.loading import rope_length, silence
from distill.models.logprobs import DivergenceOf, Event, TokenStats
from distill.models.reward import score_head
from distill.models.shared_prefix import PlainModel, SharedPrefixModel
from distill.models.vocabulary_head import VocabularyHead
from distill.objective.batching import (
    Batch,
    BatchShape,
    TrainingRow,
    collate,
    split_by_token_budget,
)
from distill.objective.losses import Metrics, StepCounts
from distill.objective.rows import row_to_score
from distill.types import FloatArray
from learner.process_group import WorkerGroup
from learner.routers import Piece, RoutingReplay
from learner.sharding import Root


class Forward:
    """`Batch` -> log p_T and entropy of its trained tokens, at each row's own temperature.

    For a reward model, which has no vocabulary projection: the score of each row.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype | None = None,
        gradient_checkpointing: bool = False,
        root: Root | None = None,
        shares: bool | None = None,
        packs: bool = False,
        event: Event = (),
        replay: RoutingReplay | None = None,
    ) -> None:
        """Replace the model's attention function. Then run the model only through this object.

        Args:
            dtype: autocast dtype of matrix products; None: the dtype of the weights. Log-probs are
                float32 in any case.
            gradient_checkpointing: layers keep only their inputs, and run again in the backward
                pass.
            root: FSDP root of a sharded model; the model is used inside its forward.
            shares: result of `shares_prefixes` before the model was sharded: inside FSDP, a forward
                pass that raises would leave a layer unsharded. None: probe here.
            packs: concatenate rows into one row without padding.
            event: tokens that are one outcome in all statistics (`distill.stops`).
            replay: makes the model's routers choose the experts that are recorded in the rows.

        Raises:
            ConfigError: the model's logits cannot be reproduced, or packing is not supported.
        """
        assert shares is not None or root is None, "a model is probed before it is sharded"
        model.eval()
        self._root = root
        self._longest = rope_length(model.config)
        self._score = score_head(model)
        self._head: VocabularyHead | None = None
        if self._score is None:
            self._head = self._run(lambda: VocabularyHead.of(model, event))
        shares = shares_prefixes(model) if shares is None else shares
        self._model = SharedPrefixModel(model) if shares else PlainModel(model)
        if packs and isinstance(self._model, PlainModel):
            raise ConfigError(
                f"packing=True: {type(model).__name__} has its own attention code, in which "
                "packed rows would attend to each other; use packing=False",
                field="learner.packing",
            )
        self.packs, self._replay = packs, replay
        # Mask of the last pass's tokens that are not padding, in the order of the layers' inputs.
        # None: there is no padding.
        self.real_tokens: Tensor | None = None
        self._causal_lm = model
        mixed = dtype not in (None, model.dtype)
        self._autocast = partial(torch.autocast, model.device.type, dtype=dtype, enabled=mixed)
        if mixed:
            cast_grouped_products(model.device.type)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.training_mode()

    def training_mode(self) -> None:
        """Set the modules' mode for a training step.

        This is evaluation mode, without dropout and router noise: log-probs are those of the policy
        that sampled. Only layers with gradient checkpointing need training mode.
        """
        self._causal_lm.eval()
        for module in self._causal_lm.modules():
            if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
                silence(module)
                module.training = True

    @property
    def head(self) -> VocabularyHead:
        """The vocabulary projection."""
        assert self._head is not None, "a reward model has no distribution of tokens"
        return self._head

    @property
    def most_mask(self) -> int:
        """Largest attention mask in elements, for `BatchShape`."""
        return self._model.most_mask

    def batches(
        self, rows_D: Sequence[TrainingRow], token_budget: int, group: WorkerGroup
    ) -> list[list[TrainingRow]]:
        """Micro-batches of the rows under the token budget, in the shape in which this model runs.

        Another model may pad rows that this one packs, or run a context once that this one repeats.
        Collective: passes of a sharded model are collective, so a worker with fewer micro-batches
        than others gets some of one short row, last. `rows_D` is empty on all workers or on none.
        """
        found = list(split_by_token_budget(rows_D, token_budget, 1, self.most_mask, self.packs))
        missing = int(group.max_over_workers(len(found))) - len(found)
        return found + [[shortest(rows_D[0])] for _ in range(missing)]

    def _collated(self, rows_B: Sequence[TrainingRow]) -> Batch:
        return collate(rows_B, str(self._causal_lm.device))

    @torch.no_grad()
    def logprobs(
        self,
        rows_D: Sequence[TrainingRow],
        token_budget: int,
        group: WorkerGroup,
        after_pass: Callable[[], None] = lambda: None,
    ) -> list[FloatArray]:
        """log p_T of each row's trained tokens, in main memory, in the passes of `batches`."""
        by_row: dict[int, FloatArray] = {}
        self._causal_lm.eval()
        for rows_B in self.batches(rows_D, token_budget, group):
            logprobs_N = self(self._collated(rows_B)).logprobs_N.cpu().numpy()
            ends = np.cumsum([row.num_trained for row in rows_B])[:-1]
            by_row |= zip(map(id, rows_B), np.split(logprobs_N, ends), strict=True)
            after_pass()
        self.training_mode()
        return [by_row[id(row)] for row in rows_D]

    def __call__(
        self,
        batch: Batch,
        *,
        divergence_of: DivergenceOf | None = None,
        entropy_gradient: bool = False,
    ) -> TokenStats:
        """Token statistics, fp32 (N,), N the batch's trained tokens, in the order of `batch`."""

        def stats() -> TokenStats:
            return self.head.token_stats(
                self.hidden(batch),
                batch.tokens_N,
                batch.temperature_N,
                divergence_of=divergence_of,
                entropy_gradient=entropy_gradient,
            )

        with self._autocast():
            return self._run(stats)

    @torch.no_grad()
    def distribution_of(
        self,
        rows_D: Sequence[TrainingRow],
        token_budget: int,
        group: WorkerGroup,
        *,
        copies: Literal["none", "trained", "all"],
    ) -> Callable[[slice], Tensor]:
        """Return a function: slice of the rows' trained tokens -> log p_T, shape (n, V).

        There is no dropout and no gradient. The model runs once over the rows, in the passes of
        `batches`, up to its hidden states. The distributions are computed from them a few positions
        at a time, during a later pass.

        Args:
            copies: weights of the projection that are copied for that pass: none, those that are
                trained, because they change before it, or all, because they are no longer gathered.
        """
        head = self.head
        batches = self.batches(rows_D, token_budget, group)

        def read(batch: Batch, last: bool) -> tuple[Tensor, dict[str, Tensor]]:
            hidden_NH = self.hidden(batch)
            if copies == "none" or not last:
                return hidden_NH, {}
            return hidden_NH, head.copied_weights(frozen=copies == "all")

        self._causal_lm.eval()
        by_row: dict[int, tuple[Tensor, Tensor]] = {}
        weights: dict[str, Tensor] = {}
        with self._autocast():
            for rows_B in batches:
                batch, last = self._collated(rows_B), rows_B is batches[-1]
                hidden_NH, weights = self._run(partial(read, batch, last))
                lengths = [row.num_trained for row in rows_B]
                parts = zip(
                    hidden_NH.split(lengths), batch.temperature_N.split(lengths), strict=True
                )
                by_row |= zip(map(id, rows_B), parts, strict=True)
        self.training_mode()
        hidden, temperatures = zip(*(by_row[id(row)] for row in rows_D), strict=True)
        return head.distribution_of(
            torch.cat(hidden), torch.cat(temperatures), self._autocast, weights
        )

    def scores(self, batch: Batch) -> Tensor:
        """Scores of a reward model, fp32 (rows,), read before each row's last trained token.

        That token is a placeholder appended to the row (`distill.data.preferences.scored_row`).
        """
        score = self._score
        assert score is not None, "a language model has no score"

        def read() -> Tensor:
            last_B = batch.sum_by_row(torch.ones_like(batch.temperature_N)).long().cumsum(0) - 1
            hidden_BH = self.hidden(batch).index_select(0, last_B)
            with torch.autocast(hidden_BH.device.type, enabled=False):
                # Not the head's forward: FSDP warns of views, such as a column of its output.
                scores_B = hidden_BH.float() @ score.weight[0].float()
            return scores_B if score.bias is None else scores_B + score.bias[0].float()

        with self._autocast():
            return self._run(read)

    def _run(self, use: Callable[[], Any]) -> Any:
        return use() if self._root is None else self._root(use)

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states that predict the batch's trained tokens, shape (N, H)."""
        assert self._longest is None or batch.tokens_BT.shape[1] <= self._longest, (
            f"past {self._longest} tokens this model's rotary frequencies depend on the longest "
            "row of a batch"
        )
        if BatchShape.of(batch.rows, self.packs).shares(self.most_mask):
            return self._with_shared_prefixes(batch.rows)
        if self.packs:
            return self._packed(batch.rows)
        self._route([(row, slice(None)) for row in batch.rows], padded=True)
        self.real_tokens = _real([len(row) for row in batch.rows], batch.tokens_BT.device)
        hidden_BTH = self._model.hidden_padded(batch.tokens_BT)
        return hidden_BTH.flatten(0, 1).index_select(0, batch.position_N)

    def _route(self, *blocks: Sequence[Piece], padded: bool) -> None:
        if self._replay is not None:
            self._replay.begin(blocks, padded=padded)

    def _packed(self, rows_B: Sequence[TrainingRow]) -> Tensor:
        """Hidden states that predict the trained tokens, shape (N, H), from packed rows."""
        assert isinstance(self._model, SharedPrefixModel)
        self.real_tokens = None
        self._route([(row, slice(None)) for row in rows_B], padded=False)
        hidden_LH = self._model.hidden_packed([row.tokens_T for row in rows_B])
        trained_L = np.concatenate([row.loss_mask_T for row in rows_B])
        # A row's first token is never trained, so no position is in the preceding row.
        position_N = torch.from_numpy(trained_L.nonzero()[0] - 1)
        return hidden_LH.index_select(0, position_N.to(hidden_LH.device))

    def _with_shared_prefixes(self, rows_B: Sequence[TrainingRow]) -> Tensor:
        """Hidden states that predict the trained tokens, shape (N, H); each prefix is run once."""
        assert isinstance(self._model, SharedPrefixModel)
        place_of_prefix: dict[bytes, int] = {}
        prefixes, prefix_of_row, suffixes, positions = [], [], [], []
        once: list[Piece] = []
        for row in rows_B:
            # The last context token predicts the first trained one, so it belongs to the suffix.
            end = row.first_trained - 1
            prefix_T = row.tokens_T[:end]
            place = place_of_prefix.setdefault(prefix_T.tobytes(), len(prefixes))
            if place == len(prefixes):
                prefixes.append(prefix_T)
                once.append((row, slice(0, end)))  # replays the routing of the prefix's first row
            prefix_of_row.append(place)
            suffixes.append(row.tokens_T[end:-1])
            positions.append(torch.from_numpy(row.loss_mask_T[end + 1 :].nonzero()[0]))
        tails = [(row, slice(row.first_trained - 1, -1)) for row in rows_B]
        self._route(once, tails, padded=not self.packs)
        lengths = list(map(len, suffixes))
        if self.packs:
            self.real_tokens = None
            starts = np.cumsum([0, *lengths[:-1]])
            hidden = self._model.hidden_after_packed(prefixes, prefix_of_row, suffixes)
        else:
            device, width = self._model.device, max(lengths)
            starts = range(0, width * len(lengths), width)
            real = (_real(of, device) for of in (list(map(len, prefixes)), lengths))
            self.real_tokens = torch.cat(list(real))
            hidden = self._model.hidden_after(prefixes, prefix_of_row, suffixes).flatten(0, 1)
        place_N = torch.cat(
            [start + position_S for start, position_S in zip(starts, positions, strict=True)]
        )
        return hidden.index_select(0, place_N.to(hidden.device))


def shortest(row: TrainingRow) -> TrainingRow:
    """A row of two tokens, at the T of `row`, for a pass that only other workers need."""
    return row_to_score(np.zeros(2, np.int32), np.array([False, True]), row.temperature, row.source)


def _real(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Mask of the tokens of right-padded rows that are not padding, shape (N * longest,)."""
    position_T = torch.arange(max(lengths), device=device)
    return (position_T < torch.tensor(lengths, device=device)[:, None]).flatten()


class LossFunction(Protocol):
    """Computes a loss on a micro-batch, including the forward pass."""

    def __call__(
        self, forward: Forward, batch: Batch, counts: StepCounts, /
    ) -> tuple[Tensor, Metrics]:
        """Return the micro-batch's share of the step's loss, and its metrics.

        `distill.objective.losses` describes the form of the metrics.
        """
        ...
