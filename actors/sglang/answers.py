"""Parser of SGLang's answers; checks lengths, token ids, finiteness. Pure; raises EngineError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from actors.sglang.plugin.hooks import TEMPERATURE_KEY, UNSCALED_KEY
from distill.engine import Sample, ScoreRequest
from distill.errors import DataError, EngineError
from distill.stops import hits
from distill.types import FloatArray, StopReason, TokenArray, TopLogprobs


def answers_of(content: Any, expected: int) -> list[Mapping[str, Any]]:
    """The list of answers of a batch request. Raises EngineError if it is anything else."""
    if not isinstance(content, list) or not all(
        isinstance(answer, dict) and isinstance(answer.get("meta_info"), dict) for answer in content
    ):
        raise EngineError(f"the server's answer is not SGLang's: {str(content)[:200]}")
    if len(content) != expected:
        raise EngineError(f"the server answered {len(content)} of {expected} requests")
    return content


def read_sample(answer: Mapping[str, Any], event: tuple[int, ...] = ()) -> Sample:
    meta = answer["meta_info"]
    logprobs_T, tokens_T = _columns(meta, "output_token_logprobs")
    if tokens_T.tolist() != list(answer.get("output_ids") or []):
        raise EngineError(
            f"the server returned {len(tokens_T)} output log-probs for "
            f"{len(answer.get('output_ids') or [])} tokens, or of others"
        )
    reason = _stop_reason(meta)
    if len(tokens_T) == 0 and reason is not StopReason.ABORTED:
        raise EngineError("the server returned a sample without a token")
    if (ended_T := hits(tokens_T, event)).any():
        logprobs_T[ended_T] = _together(meta, "output_token_ids_logprobs", len(tokens_T), event)[
            ended_T
        ]
    return Sample(
        tokens_T=tokens_T,
        logprobs_T=_finite(logprobs_T, "output_token_logprobs"),
        versions_T=_versions(meta, len(tokens_T)),
        stop_reason=reason,
        cached_tokens=meta.get("cached_tokens"),
    )


def _columns(meta: Mapping[str, Any], name: str) -> tuple[FloatArray, TokenArray]:
    """(log-probs, token ids) of a list of [log-prob, id, text]."""
    rows = meta.get(name)
    if not isinstance(rows, list):
        raise EngineError(f"the server returned no {name}")
    try:
        logprobs = np.asarray([np.nan if row[0] is None else row[0] for row in rows], np.float32)
        return logprobs, np.asarray([row[1] for row in rows], np.int32)
    except (TypeError, ValueError, IndexError) as error:
        raise EngineError(f"the server's {name} cannot be read: {str(rows)[:200]}") from error


def _together(
    meta: Mapping[str, Any], name: str, length: int, event: tuple[int, ...]
) -> FloatArray:
    """Log-probs of the event, from rows of its tokens', at the last `length` positions."""
    rows = meta.get(name)
    if not isinstance(rows, list) or len(rows) < length:
        found = len(rows) if isinstance(rows, list) else "no"
        raise EngineError(f"the server returned {found} rows of {name} for {length} tokens")
    try:
        values_NE = np.asarray(
            [
                [-np.inf if logprob is None else logprob for logprob, *_ in row]
                for row in rows[len(rows) - length :]
            ],
            np.float64,
        )
        ids = {tuple(sorted(token for _, token, *_ in row)) for row in rows[len(rows) - length :]}
    except (TypeError, ValueError) as error:
        raise EngineError(f"the server's {name} cannot be read: {str(rows)[:200]}") from error
    if ids != {event} or values_NE.shape != (length, len(event)):
        raise EngineError(f"the server's {name} are not of the tokens {list(event)}: {ids}")
    return np.logaddexp.reduce(values_NE, axis=1).astype(np.float32)


def _finite(logprobs_N: FloatArray, what: str) -> FloatArray:
    if not np.isfinite(logprobs_N).all():
        where = int(np.argmin(np.isfinite(logprobs_N)))
        raise EngineError(
            f"the server's {what} hold {logprobs_N[where]} at {where} of {len(logprobs_N)}"
        )
    return logprobs_N


def read_input_logprobs(
    answer: Mapping[str, Any],
    request: ScoreRequest,
    temperature: float,
    vocab_size: int,
    event: tuple[int, ...] = (),
) -> FloatArray:
    """Log-probs of the scored tokens; the first entry is the context's last token, without one."""
    echo = read_echo(answer)
    if echo is not None and echo != np.float32(temperature):
        raise EngineError(
            f"the server scored at temperature {echo:g}, asked was {temperature:g}; restart it "
            "with isotherm's plugin of this version"
        )
    logprobs_N, tokens_N = _columns(answer["meta_info"], "input_token_logprobs")
    expected_N = request.tokens_T[request.start - 1 :]
    # SGLang reports the vocabulary's last id as 0 here; the log-prob is the last id's.
    expected_N = np.where(expected_N == vocab_size - 1, 0, expected_N)
    if not np.array_equal(np.where(tokens_N == vocab_size - 1, 0, tokens_N), expected_N):
        raise EngineError(
            f"the server returned {len(tokens_N)} input log-probs for {len(expected_N)} tokens, or "
            "of others"
        )
    logprobs_N, stopped_N = logprobs_N[1:], hits(request.tokens_T[request.start :], event)
    if stopped_N.any():
        meta, length = answer["meta_info"], len(logprobs_N)
        together_N = _together(meta, "input_token_ids_logprobs", length, event)
        logprobs_N = np.where(stopped_N, together_N, logprobs_N)
    return _finite(logprobs_N, "input_token_logprobs")


def read_echo(answer: Mapping[str, Any]) -> np.float32 | None:
    """The temperature that the plugin echoes; None from a server without it."""
    echo = answer["meta_info"].get(TEMPERATURE_KEY)
    if isinstance(echo, list):
        echo = next((value for value in echo if value is not None), None)
    return None if echo is None else np.float32(echo)


def read_unscaled(answer: Mapping[str, Any], request: ScoreRequest) -> FloatArray | None:
    """The plugin's log-probs at T = 1 from the same pass; None if they are incomplete."""
    found = answer["meta_info"].get(UNSCALED_KEY)
    # One entry for the one token that was sampled; null where it was not asked for.
    if not (isinstance(found, list) and len(found) == 1 and isinstance(found[0], list)):
        return None
    if len(found[0]) != len(request.tokens_T) - request.start:
        return None  # a plugin that knows the last of several prefill chunks only
    return _finite(np.asarray(found[0], np.float32), UNSCALED_KEY)


def read_top(
    answer: Mapping[str, Any],
    request: ScoreRequest,
    k: int,
    vocab_size: int,
    event: tuple[int, ...] = (),
) -> TopLogprobs | None:
    """The k likeliest outcomes of each scored position; None if none were asked for.

    An event is among them by the id of its first token.

    Unlike the scored tokens' own, these ids are reported as they are, the vocabulary's last one
    included: SGLang 0.5.23 clips input_token_logprobs alone
    (managers/scheduler_components/logprob_result_processor.py).
    """
    if k == 0:
        return None
    rows = answer["meta_info"].get("input_top_logprobs")
    expected = len(request.tokens_T) - request.start
    # As of the scored tokens, the first entry is the context's last token's: null.
    if not isinstance(rows, list) or len(rows) != expected + 1:
        found = len(rows) - 1 if isinstance(rows, list) else "no"
        raise EngineError(f"the server returned {found} rows of input_top_logprobs for {expected}")
    try:
        values_NK = [
            [np.nan if logprob is None else logprob for logprob, *_ in row] for row in rows[1:]
        ]
        logprobs_NK = np.asarray(values_NK, np.float32)
        ids_NK = np.asarray([[token for _, token, *_ in row] for row in rows[1:]], np.int32)
    except (TypeError, ValueError, OverflowError) as error:
        raise EngineError(
            f"the server's input_top_logprobs cannot be read: {str(rows)[:200]}"
        ) from error
    asked = k + max(0, len(event) - 1)
    if logprobs_NK.shape != (expected, asked):
        raise EngineError(
            f"the server's input_top_logprobs have shape {logprobs_NK.shape}, asked for were "
            f"{asked} tokens at each of {expected} positions"
        )
    if ids_NK.max() >= vocab_size:
        raise EngineError(
            f"the server's input_top_logprobs name token {ids_NK.max()}, outside its vocabulary "
            f"of {vocab_size}"
        )
    if event:
        meta = answer["meta_info"]
        together_N = _together(meta, "input_token_ids_logprobs", expected, event)
        ids_NK, logprobs_NK = _with_event(ids_NK, logprobs_NK, together_N, k, event)
    try:
        return TopLogprobs(ids_NK=ids_NK, logprobs_NK=logprobs_NK)
    except DataError as error:
        raise EngineError(
            f"the server's input_top_logprobs are no distribution: {error}"
        ) from error


def _with_event(
    ids_NK: TokenArray,
    logprobs_NK: FloatArray,
    together_N: FloatArray,
    k: int,
    event: tuple[int, ...],
) -> tuple[TokenArray, FloatArray]:
    """The k likeliest outcomes, of the k + |event| - 1 likeliest tokens and the event's log-prob.

    They are among these: at most |event| of the tokens are the event's, and if all are, it is
    likelier than any token that was not listed.
    """
    others_NK = np.where(hits(ids_NK, event), -np.inf, logprobs_NK)
    ids_NK = np.column_stack([np.full(len(ids_NK), event[0], np.int32), ids_NK])
    logprobs_NK = np.column_stack([together_N, others_NK]).astype(np.float32)
    best_NK = np.argsort(-logprobs_NK, axis=1, kind="stable")[:, :k]
    rows_N1 = np.arange(len(ids_NK))[:, None]
    return ids_NK[rows_N1, best_NK], logprobs_NK[rows_N1, best_NK]


def read_forced(answer: Mapping[str, Any], token: int, event: tuple[int, ...] = ()) -> float:
    rows = answer["meta_info"].get("output_token_ids_logprobs")
    if token in event:
        [value] = _together(answer["meta_info"], "output_token_ids_logprobs", 1, event)
        if not np.isfinite(value):
            raise EngineError(f"the server's log-prob of the tokens {list(event)} is {value}")
        return float(value)
    try:
        [[[logprob, token_id, *_]]] = rows
    except (TypeError, ValueError) as error:
        raise EngineError(f"the server's output_token_ids_logprobs are {rows!r}") from error
    if token_id != token or logprob is None or not np.isfinite(logprob):
        raise EngineError(f"the server's log-prob of token {token} is {logprob!r} of {token_id}")
    return float(logprob)


def _stop_reason(meta: Mapping[str, Any]) -> StopReason:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind == "abort":
        code = reason.get("status_code") if isinstance(reason, dict) else None
        if code is not None and int(code) >= 400:  # ended by a failure of the server
            raise EngineError(f"the server ended a sample: {reason}")
        return StopReason.ABORTED
    if kind == "stop":
        return StopReason.EOS
    if kind == "length":
        return StopReason.LENGTH
    raise EngineError(f"the server ended a sample with the unknown reason {reason!r}")


def _versions(meta: Mapping[str, Any], length: int) -> TokenArray:
    """The weight version that sampled each token, from the spans that SGLang reports."""
    spans = meta.get("weight_versions")
    if not isinstance(spans, list):
        return np.full(length, read_version(meta.get("weight_version")), np.int32)
    versions_T = np.full(length, -1, np.int32)
    for span in spans:
        versions_T[span["start"] : span["end"]] = read_version(span["version"])
    if (versions_T < 0).any():
        raise EngineError(f"the server's weight versions {spans} do not cover {length} tokens")
    return versions_T


def read_version(text: Any) -> int:
    """Servers that nobody pushes weights to call their only version what they like."""
    try:
        return int(text)
    except (TypeError, ValueError):
        return 0
