"""Embedded engine: a transformers model in this process, on one compute thread.

    generate, score,     called on the event loop; each queues its work and awaits a future
    decode_score, load_weights, abort
            |
          pump           one task, alive while there is work. Repeats: aborts and loads, one decode
            |            chunk, one scoring batch. Waits until the compute thread ends a chunk.
    compute thread       owns the model, the live rows and their caches

A chunk is up to `CHUNK_STEPS` tokens per row, and ends early when new work arrives, so a request
waits at most one step for admission. The event loop never computes: `info` returns immediately.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Event
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from actors.embedded.decoding import DecodeBatch, Row, new_rows, reading_rows
from actors.embedded.loaded_model import LoadedModel, WeightMisfit
from actors.embedded.scoring import ScoreBatch, ScoreItem, plan
from actors.embedded.weight_group import WeightReceiver
from distill.engine import (
    CheckpointDirectory,
    CollectiveBroadcast,
    EngineInfo,
    GenerateRequest,
    LentWeights,
    Sample,
    Score,
    ScoreRequest,
    WeightSource,
    check_chains,
    check_prompt,
)
from distill.errors import CheckpointError, EngineError, EngineLost
from distill.models.loading import read_weights
from distill.stops import StopTokens
from distill.types import StopReason
from distill.weights.adapter import AdapterTensors

logger = logging.getLogger(__name__)

CHUNK_STEPS = 8
# Seconds that an idle engine waits for further requests, because a burst arrives over a short time.
GATHER_S = 0.001

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Generation:
    """Rows of one `generate` or `decode_score` call, whose future is set when all have ended."""

    future: asyncio.Future[list[Sample]]
    rows: list[Row] = field(default_factory=list)
    unfinished: int = 0
    unwanted: bool = False  # aborted, cancelled or failed: its live rows must be removed


@dataclass(slots=True, eq=False)
class _PendingScores:
    """A `score` call."""

    future: asyncio.Future[list[Score]]
    items: list[ScoreItem] = field(default_factory=list)
    unfinished: int = 0


@dataclass(slots=True, eq=False)
class _Load:
    """A `load_weights` call."""

    future: asyncio.Future[float]
    weights: Mapping[str, Tensor]
    version: int


class EmbeddedEngine:
    """An `Engine` (distill/engine.py) inside the caller's process.

    Args:
        model_path: Hugging Face checkpoint directory or hub name.
        dtype: torch dtype of weights and activations; log-probs are always fp32.
        device: `auto`, or the name of a torch device.
        max_running_requests: maximum number of samples decoded together; further ones wait.
        score_token_budget: maximum number of tokens, padding included, in one scoring pass.
        threads: torch's CPU threads, a setting of the whole process; None leaves it unchanged.
        stops: tokens that end samples, and whether they count as one event; None: from the
            checkpoint.
        routed_experts: record routed experts of a mixture, so that requests can ask for them.

    Samples are a function of (weights, prompt, sampling, seed, index) up to float rounding: other
    rows in the batch can change the order of a sum, and so the last bits of a logit.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ConfigError: an unknown dtype, or a model whose logits cannot be reproduced.
    """

    def __init__(
        self,
        *,
        model_path: str,
        dtype: str = "float32",
        device: str = "auto",
        max_running_requests: int = 256,
        score_token_budget: int = 16384,
        threads: int | None = None,
        stops: StopTokens | None = None,
        routed_experts: bool = False,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._model = LoadedModel(
            model_path, dtype=dtype, device=device, stops=stops, routed_experts=routed_experts
        )
        self._limits = (
            self._model.vocab_size, self._model.context_length, self._model.stops.event,
        )  # fmt: skip
        self._model_path, self._dtype = model_path, dtype
        self._score_token_budget = score_token_budget
        decoder = self._model.decoder(score_token_budget)
        self._batch = DecodeBatch(
            decoder, self._model.head, self._model.stops, max_running_requests
        )
        self._version, self._pushed = 0, False
        self._receiver = WeightReceiver(self._model.device)
        self._broken: str | None = None
        self._computed = 0  # calls on the compute thread so far
        # Used on the event loop only: queued and unfinished work.
        self._generations: list[_Generation] = []
        self._scorings: list[_PendingScores] = []
        self._new_rows: list[Row] = []
        self._new_items: list[ScoreItem] = []
        self._loads: list[_Load] = []
        self._aborts: list[asyncio.Future[int]] = []
        self._rows_unwanted = False
        self._score_batches: list[ScoreBatch] = []
        self._pump_task: asyncio.Task[None] | None = None
        # Set by the event loop to make the chunk in progress end after its current step.
        self._interrupt = Event()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="embedded-engine")

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        """See `Engine.generate`."""
        self._check_health()
        records = self._model.recorder is not None
        limit = check_prompt(request, *self._limits, records_experts=records)
        call = _Generation(asyncio.get_running_loop().create_future())
        call.rows = new_rows(request, limit, owner=call)
        return await self._decoded(call)

    async def _decoded(self, call: _Generation) -> list[Sample]:
        call.unfinished = len(call.rows)
        self._generations.append(call)
        self._new_rows += call.rows
        self._wake()
        try:
            return await call.future
        finally:
            # Other rows are still live if the caller was cancelled or a row failed.
            call.unwanted = True
            self._rows_unwanted |= call.unfinished > 0
            self._generations.remove(call)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """See `Engine.score`. The requests of one call see the same weights."""
        self._check_health()
        check_chains(requests, *self._limits)
        if not requests:
            return []
        call = _PendingScores(asyncio.get_running_loop().create_future())
        call.items = [ScoreItem(call, request) for request in requests]
        call.unfinished = len(call.items)
        self._scorings.append(call)
        self._new_items += call.items
        self._wake()
        try:
            return await call.future
        finally:
            self._scorings.remove(call)

    async def decode_score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """See `Engine.decode_score`. The rows are decoded in one batch with other live rows.

        Listed tokens are ignored: a row reports the log-prob of one given token.

        Raises:
            EngineError: `abort` was called before the rows ended.
        """
        self._check_health()
        check_chains(requests, *self._limits)
        if not requests:
            return []
        call = _Generation(asyncio.get_running_loop().create_future())
        call.rows = [row for request in requests for row in reading_rows(request, owner=call)]
        samples = await self._decoded(call)
        if any(sample.stop_reason is StopReason.ABORTED for sample in samples):
            raise EngineError("decode_score was aborted")
        logprobs_N = np.concatenate([sample.logprobs_T for sample in samples])
        shapes = [(len(r.temperatures), len(r.tokens_T) - r.start) for r in requests]
        ends = np.cumsum([temperatures * positions for temperatures, positions in shapes])[:-1]
        return [
            Score(logprobs_by_temperature=tuple(part_N.reshape(shape)))
            for shape, part_N in zip(shapes, np.split(logprobs_N, ends), strict=True)
        ]

    async def load_weights(self, weights: WeightSource, version: int) -> float:
        """See `Engine.load_weights`. After an error the old weights are still in place.

        Raises:
            EngineError: a tensor is unknown, missing or has another shape (the message names the
                first one); the weights did not arrive; or they are an adapter or lent weights,
                which only servers support.
        """
        self._check_health()
        if isinstance(weights, LentWeights | AdapterTensors):
            raise EngineError(
                "the embedded engine loads neither lent memory nor adapters; use weights=auto"
            )
        if isinstance(weights, CollectiveBroadcast):
            layouts = [layout for bucket in weights.buckets for layout in bucket]
            await asyncio.to_thread(self._model.check_layout, layouts)
            tensors = await asyncio.to_thread(self._receiver.receive, weights)
        elif isinstance(weights, CheckpointDirectory):
            tensors = await asyncio.to_thread(_read_checkpoint, weights.path)
        else:
            tensors = weights.unpack()
        load = _Load(asyncio.get_running_loop().create_future(), tensors, version)
        self._loads.append(load)
        self._wake()
        return await load.future

    async def weight_checksums(self) -> list[dict[str, str]]:
        """Digests of each rank's parameters, by name (distill/weights/digests.py)."""
        self._check_health()
        return [await self._compute(self._model.digests)]

    async def info(self) -> EngineInfo:
        """See `Engine.info`."""
        self._check_health()
        return EngineInfo(
            kind="embedded",
            model=self._model_path,
            vocab_size=self._model.vocab_size,
            context_length=self._model.context_length,
            weight_version=self._version,
            dtype=self._dtype,
            eos_token_ids=self._model.stops.ids,
            stop_event=self._model.stops.event,
            tokenizer=self._model.tokenizer,
            temperature_scaling="in the engine",
        )

    async def health(self) -> int:
        """See `Engine.health`."""
        self._check_health()
        return self._computed

    async def queue_length(self) -> int:
        """See `Engine.queue_length`."""
        return sum(call.unfinished for call in (*self._generations, *self._scorings))

    async def abort(self) -> int:
        """See `Engine.abort`."""
        self._check_health()
        for call in self._generations:
            call.unwanted = self._rows_unwanted = True
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._aborts.append(done)
        self._wake()
        return await done

    async def close(self) -> None:
        """Stop the compute thread. No call may follow."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _check_health(self) -> None:
        if self._broken is not None:
            raise EngineLost(f"the engine is broken and must be restarted: {self._broken}")

    def _wake(self) -> None:
        self._interrupt.set()
        if self._pump_task is None:
            self._pump_task = asyncio.get_running_loop().create_task(self._pump())

    async def _pump(self) -> None:
        try:
            await asyncio.sleep(GATHER_S)
            while self._has_work():
                await self._turn()
        except asyncio.CancelledError:  # the event loop is closing, and its callers with it
            self._forget()
            raise
        except Exception as error:
            logger.exception("the compute thread failed")
            self._broken = f"{type(error).__name__}: {error}"
            self._fail_everyone(error)
            self._forget()
        finally:
            self._pump_task = None

    def _has_work(self) -> bool:
        waiting = self._new_rows or self._new_items or self._loads or self._aborts
        return bool(waiting or self._score_batches or self._batch)

    async def _turn(self) -> None:
        self._interrupt.clear()
        if self._rows_unwanted or self._aborts:
            await self._take_out_unwanted()
        # Loads wait for scoring in progress: the requests of one call must use the same weights.
        while self._loads and not self._score_batches:
            await self._load_next()
        rows, self._new_rows = self._new_rows, []
        if rows or self._batch:
            self._settle_rows(await self._compute(lambda: self._decode_chunk(rows)))
        if self._new_items and not self._score_batches and not self._loads:
            items, self._new_items = self._new_items, []
            most_mask = self._model.forward.most_mask
            self._score_batches = plan(items, self._score_token_budget, most_mask)
        if self._score_batches:
            batch = self._score_batches.pop(0)
            self._settle_items(
                await self._compute(lambda: batch.run(self._model.forward, self._model.head))
            )

    async def _compute(self, function: Callable[[], _T]) -> _T:
        def on_thread() -> _T:
            with torch.inference_mode():
                return function()

        made = await asyncio.get_running_loop().run_in_executor(self._executor, on_thread)
        self._computed += 1
        return made

    def _decode_chunk(self, rows: Sequence[Row]) -> list[Row]:
        self._batch.add(rows)
        self._batch.admit()
        ended: list[Row] = []
        for _ in range(CHUNK_STEPS):
            ended += self._batch.step(self._version)
            if self._interrupt.is_set() or not self._batch:
                break
        return ended

    async def _take_out_unwanted(self) -> None:
        """End the rows of aborted, cancelled or failed calls, and complete `abort` calls."""
        self._rows_unwanted = False
        out = [row for row in self._new_rows if row.owner.unwanted]
        self._new_rows = [row for row in self._new_rows if not row.owner.unwanted]
        out += await self._compute(lambda: self._batch.take_out(lambda row: row.owner.unwanted))
        aborted = sum(not row.owner.future.done() for row in out)
        for row in out:
            row.stop_reason = StopReason.ABORTED
        self._settle_rows(out)
        aborts, self._aborts = self._aborts, []
        for done in aborts:
            if not done.done():
                done.set_result(aborted)

    def _settle_rows(self, ended: Sequence[Row]) -> None:
        for row in ended:
            call: _Generation = row.owner
            call.unfinished -= 1
            if call.future.done():
                continue
            if row.failed:
                call.unwanted = self._rows_unwanted = True
                call.future.set_exception(
                    EngineError(
                        f"non-finite logits after {len(row.tokens)} new tokens at weight version "
                        f"{self._version}: the weights hold a NaN or an infinity, or overflow"
                    )
                )
            elif call.unfinished == 0:
                call.future.set_result([row.sample() for row in call.rows])

    def _settle_items(self, scored: Sequence[ScoreItem]) -> None:
        for item in scored:
            call: _PendingScores = item.owner
            call.unfinished -= 1
            if call.future.done():
                continue
            if item.found is None:
                call.future.set_exception(
                    EngineError(f"non-finite log-probs from scoring at version {self._version}")
                )
            elif call.unfinished == 0:
                version = self._version if self._pushed else None
                scores = [replace(item.score(), version=version) for item in call.items]
                call.future.set_result(scores)

    async def _load_next(self) -> None:
        load = self._loads.pop(0)
        try:
            pause_s = await self._compute(lambda: self._replace_weights(load.weights, load.version))
        except WeightMisfit as misfit:
            if not load.future.done():
                load.future.set_exception(misfit)
        except BaseException:
            self._loads.append(load)  # `_fail_everyone` sets its error
            raise
        else:
            if not load.future.done():
                load.future.set_result(pause_s)

    def _replace_weights(self, weights: Mapping[str, Tensor], version: int) -> float:
        started = time.perf_counter()
        self._model.copy_weights(weights)
        self._version, self._pushed = version, True
        self._batch.recompute()
        return time.perf_counter() - started

    def _fail_everyone(self, error: Exception) -> None:
        futures: list[asyncio.Future] = [call.future for call in self._generations]
        futures += [call.future for call in self._scorings]
        futures += [load.future for load in self._loads] + self._aborts
        for future in futures:
            if not future.done():
                future.set_exception(EngineLost(f"the compute thread failed: {error}"))

    def _forget(self) -> None:
        """Discard all work. The compute thread clears its batch, after a chunk in progress."""
        self._new_rows, self._new_items, self._loads, self._aborts = [], [], [], []
        self._score_batches = []
        self._interrupt.set()
        self._executor.submit(self._batch.clear)


def _read_checkpoint(path: str) -> dict[str, Tensor]:
    try:
        return read_weights(path)
    except CheckpointError as error:
        raise EngineError(f"{error}; the engine keeps its current weights") from error
