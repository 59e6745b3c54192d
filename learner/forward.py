"""The learner's own log-probs, or scores: one forward pass over a batch, for trained tokens only.

The samples of a group continue one prompt. Where that saves enough, the prompt is run once for all
of them, forward and backward: their gradients meet in its keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel

from distill.errors import ConfigError
from distill.models.attention_probe import shares_prefixes
from distill.models.loading import rope_length, silence, train_time_noise
from distill.models.logprobs import (
    DivergenceOf,
    Event,
    TokenStats,
    VocabularyHead,
    kept_until_backward,
    model_width,
)
from distill.models.reward import score_head
from distill.models.shared_prefix import PlainModel, SharedPrefixModel
from distill.objective.batching import Batch, BatchShape, TrainingRow
from distill.objective.losses import Metrics, StepCounts
from learner.routing_replay import Piece, RoutingReplay
from learner.sharding import Root


class Forward:
    """`Batch` -> log p_T and entropy of its trained tokens, at each row's own temperature.

    Of a reward model, which has no vocabulary projection: the score of each row.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype | None = None,
        gradient_checkpointing: bool = False,
        dropout: bool = False,
        root: Root | None = None,
        shares: bool | None = None,
        packs: bool = False,
        event: Event = (),
        replay: RoutingReplay | None = None,
    ) -> None:
        """Takes the model over: its attention function is switched, run it through this only.

        Args:
            dtype: what matrix products are computed in, by torch's autocast; None: in that of the
                weights. Log-probs are float32 in any case.
            gradient_checkpointing: layers keep their inputs alone, and run again in the backward
                pass.
            dropout: in training, the model has the dropout and the router noise that its config
                names. By default it has none: log-probs are those of the policy that sampled.
            root: of a sharded model, which is used inside it.
            shares: what `shares_prefixes` said of the model before it was sharded: inside FSDP a
                pass that raises would leave a layer as it is between FSDP's hooks. None: probed
                here.
            packs: rows follow one another unpadded, in one row.
            event: tokens that are one outcome in all statistics (`distill.stops`).
            replay: has the model's routers choose the experts that rows bring along.

        Raises:
            ConfigError: its logits cannot be reproduced, or it cannot pack.
        """
        assert shares is not None or root is None, "a model is probed before it is sharded"
        model.eval()
        self._root = root
        self._longest = rope_length(model.config)
        self._score = score_head(model)
        self._head: VocabularyHead | None = None
        if self._score is None:
            self._head = self._run(lambda: VocabularyHead(model, event))
        shares = shares_prefixes(model) if shares is None else shares
        # Our attention has no dropout; a model that trains with any keeps its own.
        noisy = dropout and train_time_noise(model.config)
        self._model = SharedPrefixModel(model) if shares and not noisy else PlainModel(model)
        if packs and isinstance(self._model, PlainModel):
            raise ConfigError(
                f"packing=True: {type(model).__name__} runs with its own attention, which would "
                "let packed rows see one another; use packing=False"
            )
        self.packs, self._replay = packs, replay
        # Of the last pass's tokens, as layers saw them: those that are no padding. None: all.
        self.real_tokens: Tensor | None = None
        self._causal_lm, self._dropout = model, dropout
        self._autocast = partial(
            torch.autocast, model.device.type, dtype=dtype, enabled=dtype not in (None, model.dtype)
        )
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.training_mode()

    def training_mode(self) -> None:
        """Sets the mode of a step: evaluation mode, but for what has to be in training mode:
        adapters' dropout, which is a setting of their own, and layers that are checkpointed."""
        self._causal_lm.train(self._dropout)
        for module in () if self._dropout else self._causal_lm.modules():
            if isinstance(module, LoraLayer):
                module.lora_dropout.train()
            elif isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
                silence(module)
                module.training = True

    @property
    def head(self) -> VocabularyHead:
        """The vocabulary projection."""
        assert self._head is not None, "a reward model has no distribution of tokens"
        return self._head

    @property
    def most_mask(self) -> int:
        """Largest attention mask, as `BatchShape` takes it."""
        return self._model.most_mask

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
    def distribution_of(self, batch: Batch, *, kept: bool) -> Callable[[slice], Tensor]:
        """log p_T of slices of the batch's trained tokens, (n, V), without noise or gradient.

        The model runs once over the batch, to its hidden states. The distributions are made of them
        a few positions at a time, in a later pass of this model.

        Args:
            kept: by then the weights are others, so those of the projection are copied.
        """
        head, temperature_N = self.head, batch.temperature_N

        def read() -> tuple[Tensor, dict[str, Tensor]]:
            return self.hidden(batch), head.trained_weights() if kept else {}

        self._causal_lm.eval()
        with self._autocast():
            hidden_NH, weights = self._run(read)
        self.training_mode()

        @torch.no_grad()
        def log_p(positions: slice) -> Tensor:
            with self._autocast():
                return head.log_distribution(
                    hidden_NH[positions], temperature_N[positions], weights
                )

        elements = len(batch.tokens_N) * model_width(head.projection)
        return kept_until_backward(log_p, elements)

    def scores(self, batch: Batch) -> Tensor:
        """A reward model's scores, fp32 (rows,), before each row's last trained token.

        That is a token of no meaning behind the row (`distill.data.preferences.scored_row`).
        """
        score = self._score
        assert score is not None, "a language model has no score"

        def read() -> Tensor:
            last_B = batch.sum_by_row(torch.ones_like(batch.temperature_N)).long().cumsum(0) - 1
            hidden_BH = self.hidden(batch).index_select(0, last_B)
            with torch.autocast(hidden_BH.device.type, enabled=False):
                # FSDP warns of what is a view, such as a column of the head's output.
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
        """Hidden states that predict the trained tokens, of rows one after another."""
        assert isinstance(self._model, SharedPrefixModel)
        self.real_tokens = None
        self._route([(row, slice(None)) for row in rows_B], padded=False)
        hidden_LH = self._model.hidden_packed([row.tokens_T for row in rows_B])
        trained_L = np.concatenate([row.loss_mask_T for row in rows_B])
        position_N = torch.from_numpy(trained_L.nonzero()[0] - 1)  # a row's first is never trained
        return hidden_LH.index_select(0, position_N.to(hidden_LH.device))

    def _with_shared_prefixes(self, rows_B: Sequence[TrainingRow]) -> Tensor:
        """Hidden states that predict the trained tokens; each prefix is run once."""
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
                once.append((row, slice(0, end)))  # as the first row that has it was routed
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


def _real(lengths: Sequence[int], device: torch.device) -> Tensor:
    """(N * longest,): True of the tokens of right-padded rows."""
    position_T = torch.arange(max(lengths), device=device)
    return (position_T < torch.tensor(lengths, device=device)[:, None]).flatten()


class LossFunction(Protocol):
    """Runs the forward pass over a micro-batch."""

    def __call__(
        self, forward: Forward, batch: Batch, counts: StepCounts, /
    ) -> tuple[Tensor, Metrics]:
        """Its share of the step's loss, and metrics as `distill.objective.losses` has them."""
        ...
