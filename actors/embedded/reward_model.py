"""Reward model of a run: a transformers model in its actor's process, on one compute thread.

    rewards        encodes conversations, queues them, and waits for their scores
    pump           one task, active while the queue has rows: scores them batch by batch
    compute thread owns the model

One scorer serves all rollout workers. Requests that arrive while a batch runs form the next batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from distill.errors import EngineError
from distill.models.loading import context_length, resolve_device, vocab_size
from distill.models.reward import load_reward_model, score_head
from distill.rewards.conversations import ConversationEncoder
from distill.rewards.model_reward import RewardInput
from distill.types import TokenArray
from distill.weights.digests import digest_of, tensor_checksum

# Delay of the first batch on an idle model: requests of one group arrive a little apart.
_GATHER_S = 0.002
# Number of canary rows, length of the longest in tokens, and the seed that they are drawn with.
_CANARIES, _LONGEST, _SEED = 4, 24, 19


@dataclass(frozen=True, slots=True)
class RewardAnswer:
    """Canary results of a reward model.

    Attributes:
        digest: digest of the model's weights.
        scores: scores of the canary rows, one list for each requested batch company.
    """

    model: str
    dtype: str
    digest: str
    scores: list[list[float]]


@dataclass(slots=True, eq=False)
class _Waiting:
    """A queued row and the future of its score."""

    tokens_T: TokenArray
    future: asyncio.Future[float]


class EmbeddedRewardModel:
    """A reward model (`distill.rewards.model_reward.scores_of`) inside the caller's process.

    A score depends on the weights and the conversation only, up to float rounding: rows are padded
    on the right, where causal attention ignores the padding.

    Args:
        model_path: Hugging Face checkpoint directory of a reward model.
        dtype: torch dtype of the decoder; the head is float32, and so are scores.
        device: `auto`, or the name of a torch device.
        token_budget: maximum number of tokens, padding included, in one forward pass.
        threads: torch's CPU threads, a setting of the whole process; None leaves it unchanged.

    Raises:
        CheckpointError: there is no reward model at `model_path`, or it cannot be loaded.
    """

    def __init__(
        self,
        *,
        model_path: str,
        dtype: str = "float32",
        device: str = "auto",
        token_budget: int = 16384,
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._path, self._dtype, self._budget = model_path, dtype, token_budget
        self._encode = ConversationEncoder(model_path)
        torch_dtype = getattr(torch, dtype)
        self._device = resolve_device(device)
        self._model: Any = load_reward_model(model_path, dtype=torch_dtype, device=self._device)
        self._model.eval()
        # In half precision, scores near 8 are 0.03 apart; a head in that dtype would save little.
        head = score_head(self._model)
        assert head is not None, "load_reward_model loads no other model"
        head.float().register_forward_pre_hook(lambda _, given: (given[0].float(),))
        self._padding: int | None = self._model.config.get_text_config().pad_token_id
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="reward-model-tokens")
        self._queue: list[_Waiting] = []
        self._pump: asyncio.Task[None] | None = None
        self._scored = 0

    async def rewards(self, conversations: Sequence[RewardInput]) -> list[float]:
        """Return the score of each conversation, in order.

        Raises:
            DataError: the tokenizer or the chat template rejects a conversation, or it exceeds the
                context length.
            EngineError: a score is not finite.
        """
        loop = asyncio.get_running_loop()
        rows = await loop.run_in_executor(
            self._encoding, lambda: [self._encode(asked) for asked in conversations]
        )
        return await self._scores_of(rows)

    async def _scores_of(self, rows: Sequence[TokenArray]) -> list[float]:
        """Queue rows and return their scores."""
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(tokens_T, loop.create_future()) for tokens_T in rows]
        self._queue += waiting
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._serve())
        return list(await asyncio.gather(*(row.future for row in waiting)))

    async def canary(self, filler: Sequence[int] = (0,)) -> RewardAnswer:
        """Score fixed rows, batched with the queued requests, and compute a digest of the weights.

        Args:
            filler: numbers of additional rows of random tokens; the fixed rows are scored once
                with each number of them.

        Raises:
            EngineError: a score is not finite.
        """
        loop = asyncio.get_running_loop()
        digest = await loop.run_in_executor(self._thread, self._digest)
        scores = []
        for number in filler:
            rows = [*self._canaries(_CANARIES, 0), *self._canaries(number, number)]
            scores.append((await self._scores_of(rows))[:_CANARIES])
        return RewardAnswer(self._path, self._dtype, digest, scores)

    def _canaries(self, number: int, seed: int) -> list[TokenArray]:
        """Rows of random tokens without the padding token, which would end a row."""
        random = np.random.default_rng([_SEED, seed])
        ids_V = np.arange(vocab_size(self._model.config), dtype=np.int32)
        if self._padding is not None:
            ids_V = np.delete(ids_V, self._padding)
        longest = min(_LONGEST, context_length(self._model.config))
        return [
            random.choice(ids_V, random.integers(1, longest + 1)).astype(np.int32)
            for _ in range(number)
        ]

    def _digest(self) -> str:
        return digest_of({name: tensor_checksum(t) for name, t in self._model.state_dict().items()})

    async def health(self) -> int:
        """Number of rows scored so far: the heartbeat."""
        return self._scored

    async def queue_length(self) -> int:
        """Number of queued rows."""
        return len(self._queue)

    async def close(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
        for thread in (self._encoding, self._thread):
            thread.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        await asyncio.sleep(_GATHER_S)
        loop = asyncio.get_running_loop()
        while batch := self._take():
            try:
                rows = [row.tokens_T for row in batch]
                scores = await loop.run_in_executor(self._thread, self.score_rows, rows)
            except Exception as error:  # fails this batch only; queued rows are still scored
                for row in batch:
                    _fail(row, error)
                continue
            self._scored += len(batch)
            for row, score in zip(batch, scores, strict=True):
                if np.isfinite(score):
                    _settle(row, score)
                else:
                    _fail(row, EngineError(f"the reward model {self._path} returned {score}"))

    def _take(self) -> list[_Waiting]:
        """Take the next batch from the queue: the shortest rows, as many as the budget allows."""
        self._queue = [row for row in self._queue if not row.future.done()]  # drop cancelled rows
        self._queue.sort(key=lambda row: len(row.tokens_T))
        most = 1
        if self._padding is not None:
            counts = range(1, len(self._queue) + 1)
            most = sum(n * len(self._queue[n - 1].tokens_T) <= self._budget for n in counts)
        most = max(1, most)
        batch, self._queue = self._queue[:most], self._queue[most:]
        return batch

    @torch.inference_mode()
    def score_rows(self, rows: Sequence[TokenArray]) -> list[float]:
        """Compute the scores of rows, at the position that the checkpoint's model class reads."""
        padding = 0 if self._padding is None else self._padding  # unused: batches of one row
        width = max(map(len, rows))
        tokens_NT = np.full((len(rows), width), padding, np.int64)
        mask_NT = np.zeros((len(rows), width), np.int64)
        for n, row_T in enumerate(rows):
            tokens_NT[n, : len(row_T)] = row_T
            mask_NT[n, : len(row_T)] = 1
        scored = self._model(
            input_ids=torch.from_numpy(tokens_NT).to(self._device),
            attention_mask=torch.from_numpy(mask_NT).to(self._device),
            use_cache=False,
        )
        return scored.logits[:, 0].float().tolist()


def _settle(row: _Waiting, score: float) -> None:
    if not row.future.done():
        row.future.set_result(score)


def _fail(row: _Waiting, error: Exception) -> None:
    if not row.future.done():
        row.future.set_exception(error)
