"""Likeliest and given tokens of each decode step: one tensor for the whole batch.

For `top_logprobs_num` and `token_ids_logprob`, SGLang gathers and copies values request by request,
and builds a list of Python numbers for each token. For requests with
`custom_params={"isotherm_listed_output": true}` these hooks return the same numbers as bytes:

    ScheduleBatch.prepare_for_extend          moves the two options from the request to the plugin
    ForwardBatch.init_new                     records the options of each row (in hooks.py)
    Sampler.forward                           adds the step's `ListedStep` to the output
    OutputLogprobProcessor.compute_logprobs   passes the sampler's log-probs to the `ListedStep`

In the response's `meta_info`:

    output_logprobs_listed      [text, ...], one for each sampled token, read by `read_steps`.

SGLang's own fields of the output are then empty. Speculative decoding is left to SGLang.

Letters: G requests of the batch, E given tokens, K likeliest, T sampled tokens, V vocabulary.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.sglang.plugin.row_temperatures import UnknownPassError, to_device

LISTED_OUTPUT_KEY = "output_logprobs_listed"
LISTED_OUTPUT_SWITCH = "isotherm_listed_output"

_WANTED = "_isotherm_wanted"
_STEP = "_isotherm_step"


class Wanted(NamedTuple):
    """Tokens listed with each sampled token of a request.

    Attributes:
        top: number of likeliest tokens.
        given: ids of given tokens.
    """

    top: int
    given: Sequence[int]


class ListedStep:
    """Listed tokens of a decode step.

    After the step, `step[g]` is base64 of float32 values for request g: the log-probs of its given
    tokens, then pairs of log-prob and id for its likeliest tokens. An id is stored as the bits of
    an int32. None if the request lists no tokens.
    """

    def __init__(self, wanted_G: Sequence[Wanted | None]) -> None:
        self._wanted_G = wanted_G
        self._given = max(len(wanted.given) for wanted in wanted_G if wanted)
        self._copied: torch.cuda.Event | None = None

    def take(self, logprobs_GV: Tensor) -> None:
        """Gather the listed values from the sampler's log-probs, and start the copy to main memory.

        Raises:
            UnknownPassError: the number of rows is not the number of requests.
        """
        if len(logprobs_GV) != len(self._wanted_G):
            raise UnknownPassError(
                f"{len(logprobs_GV)} rows are sampled, of {len(self._wanted_G)} requests"
            )
        top = max(wanted.top for wanted in self._wanted_G if wanted)
        # Padded on the left, so that each request's values are contiguous.
        ids_GE = [
            [0] * (self._given - len(given)) + list(given)
            for given in (wanted.given if wanted else () for wanted in self._wanted_G)
        ]
        ids = torch.tensor(ids_GE, dtype=torch.int64)
        given_GE = logprobs_GV.gather(1, to_device(ids, logprobs_GV.device))
        best_GK, ids_GK = logprobs_GV.topk(top, dim=1)
        pairs = torch.stack([best_GK.float(), ids_GK.int().view(torch.float32)], dim=2)
        rows = torch.cat([given_GE.float(), pairs.flatten(1)], dim=1)
        if rows.is_cuda:
            self._rows = torch.empty(rows.shape, pin_memory=True)
            self._rows.copy_(rows, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._rows = rows.cpu()

    @cached_property
    def _bytes_of_rows(self) -> memoryview:
        if self._copied is not None:
            self._copied.synchronize()
        return self._rows.numpy().astype("<f4", copy=False).reshape(-1).data.cast("B")

    def __getitem__(self, g: int) -> str | None:
        wanted = self._wanted_G[g]
        if wanted is None:
            return None
        edge = g * self._rows.shape[1] + self._given
        begin, end = edge - len(wanted.given), edge + 2 * wanted.top
        return base64.b64encode(self._bytes_of_rows[4 * begin : 4 * end]).decode()


class ListedSteps(NamedTuple):
    """Log-probs of given tokens, and the likeliest tokens, at each of T steps."""

    given_TE: np.ndarray
    ids_TK: np.ndarray
    logprobs_TK: np.ndarray


def read_steps(texts: Sequence[str], given: int, top: int) -> ListedSteps:
    """Decode `ListedStep`s.

    Raises:
        ValueError, TypeError: a text is not base64, or has another size.
    """
    content = b"".join(binascii.a2b_base64(text, strict_mode=True) for text in texts)
    rows_TN = np.frombuffer(content, "<f4").reshape(len(texts), given + 2 * top)
    pairs_TK2 = rows_TN[:, given:].reshape(len(texts), top, 2)
    ids_TK = np.ascontiguousarray(pairs_TK2[..., 1]).view("<i4")
    return ListedSteps(rows_TN[:, :given], ids_TK, pairs_TK2[..., 0])


def move_logprob_options(batch: Any) -> None:
    """BEFORE ScheduleBatch.prepare_for_extend, which reads the options: move them to the plugin."""
    if not batch.spec_algorithm.is_none():
        return
    for req in batch.reqs:
        options = req.logprob
        if (req.sampling_params.custom_params or {}).get(LISTED_OUTPUT_SWITCH) and (
            options.top_logprobs_num > 0 or options.token_ids_logprob is not None
        ):
            wanted = Wanted(options.top_logprobs_num, options.token_ids_logprob or ())
            setattr(req, _WANTED, wanted)
            options.top_logprobs_num, options.token_ids_logprob = 0, None


def store_wanted(batch: Any) -> None:
    """Store the listed tokens of the requests on the batch's sampling info, for the sampler."""
    wanted_G = [getattr(req, _WANTED, None) for req in batch.reqs]
    setattr(batch.sampling_info, _WANTED, wanted_G if any(wanted_G) else None)


def sample(
    original: Callable[..., Any],
    sampler: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND Sampler.forward: add the step's `ListedStep` to the output."""
    wanted_G = getattr(sampling_info, _WANTED, None) if return_logprob else None
    if wanted_G is None:
        return original(sampler, logits_output, sampling_info, return_logprob, *args, **kwargs)
    processor, step = sampler.output_logprob_processor, ListedStep(wanted_G)
    setattr(processor, _STEP, step)
    try:
        tokens_G = original(sampler, logits_output, sampling_info, return_logprob, *args, **kwargs)
    finally:
        delattr(processor, _STEP)
    others = logits_output.customized_info or {}
    logits_output.customized_info = {**others, LISTED_OUTPUT_KEY: step}
    return tokens_G


def compute_logprobs(_result: Any, processor: Any, logprobs_GV: Tensor, *_args: Any) -> None:
    """AFTER OutputLogprobProcessor.compute_logprobs: pass the log-probs to the `ListedStep`."""
    step: ListedStep | None = getattr(processor, _STEP, None)
    if step is not None:
        step.take(logprobs_GV)
