"""Parser of SGLang's answers: pure functions that check lengths, token ids and finite values.

All functions raise EngineError if an answer is invalid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from actors.sglang.plugin.hooks import LISTED_KEY, STATES_KEY, TEMPERATURE_KEY, UNSCALED_KEY
from actors.sglang.plugin.listed_steps import LISTED_OUTPUT_KEY, ListedSteps, read_steps
from actors.sglang.plugin.row_temperatures import decoded, read_listed, read_states
from distill.engine import Sample, ScoreRequest
from distill.errors import DataError, EngineError
from distill.routing import ExpertArray, MixtureShape
from distill.states import HiddenStates
from distill.stops import hits, merged
from distill.types import FloatArray, StopReason, TokenArray, TopLogprobs


def answers_of(content: Any, expected: int) -> list[Mapping[str, Any]]:
    """Return the answers of a batch request. Raise EngineError unless there are `expected`."""
    if not isinstance(content, list) or not all(
        isinstance(answer, dict) and isinstance(answer.get("meta_info"), dict) for answer in content
    ):
        raise EngineError(f"the server's answer is not in SGLang's format: {str(content)[:200]}")
    if len(content) != expected:
        raise EngineError(f"the server answered {len(content)} of {expected} requests")
    return content


def read_sample(
    answer: Mapping[str, Any],
    event: tuple[int, ...] = (),
    top_k: int = 0,
    version: int | None = None,
) -> Sample:
    """Read a sample, with the ids of the `top_k` likeliest outcomes at each sampled token.

    Args:
        event: ids of the tokens of the stop event; empty if there is none.
        version: weight version of all tokens; None: read each token's version from the answer.
    """
    meta = answer["meta_info"]
    logprobs_T, tokens_T = _columns(meta, "output_token_logprobs")
    if tokens_T.tolist() != list(answer.get("output_ids") or []):
        raise EngineError(
            f"the server returned {len(tokens_T)} output log-probs for "
            f"{len(answer.get('output_ids') or [])} tokens, or log-probs of other tokens"
        )
    reason = _stop_reason(meta)
    if len(tokens_T) == 0 and reason is not StopReason.ABORTED:
        raise EngineError("the server returned a sample without a token")
    listed = _listed_by_plugin(meta, len(tokens_T), top_k, event)
    if (ended_T := hits(tokens_T, event)).any():
        logprobs_T[ended_T] = _output_event(meta, len(tokens_T), event, listed)[ended_T]
    return Sample(
        tokens_T=tokens_T,
        logprobs_T=_finite(logprobs_T, "output_token_logprobs"),
        versions_T=(
            _versions(meta, len(tokens_T))
            if version is None
            else np.full(len(tokens_T), version, np.int32)
        ),
        stop_reason=reason,
        cached_tokens=meta.get("cached_tokens"),
        top_ids_TK=(_output_top_ids(meta, len(tokens_T), top_k, event, listed) if top_k else None),
    )


def read_experts(
    answer: Mapping[str, Any], tokens: int, mixture: MixtureShape
) -> ExpertArray | None:
    """Read the routed experts of `tokens` tokens; None if the sample was aborted before any."""
    text = answer["meta_info"].get("routed_experts")
    if text is None and _stop_reason(answer["meta_info"]) is StopReason.ABORTED:
        return None
    shape = (tokens, mixture.layers, mixture.top_k)
    try:
        experts_NLK = np.frombuffer(decoded(text or ""), "<i4").reshape(shape)
    except (TypeError, ValueError) as error:
        raise EngineError(
            f"the server returned no experts of {tokens} tokens in {mixture.layers} layers, "
            f"{mixture.top_k} each: {error!r}"
        ) from error
    if tokens and (experts_NLK.min() < 0 or experts_NLK.max() >= mixture.experts):
        raise EngineError(
            f"the server's routed_experts are {experts_NLK.min()} to {experts_NLK.max()}, and the "
            f"model has {mixture.experts}"
        )
    if tokens and mixture.top_k > 1 and not experts_NLK.any():
        raise EngineError(
            "the server's routed_experts are all 0: it chooses experts inside a kernel, where "
            "SGLang does not record them. Use policy.server_flags='--moe-runner-backend "
            "triton', or routing_replay=False"
        )
    return experts_NLK.astype(mixture.dtype)


def _listed_by_plugin(
    meta: Mapping[str, Any], length: int, k: int, event: tuple[int, ...]
) -> ListedSteps | None:
    """Log-probs and tokens from the plugin; None if the answer does not have them."""
    texts = meta.get(LISTED_OUTPUT_KEY)
    if texts is None or not (k or event):
        return None
    try:
        if len(texts) != length:
            raise ValueError(f"{len(texts)} of {length} tokens'")
        return read_steps(texts, len(event), k and k + merged(event))
    except (TypeError, ValueError) as error:
        raise EngineError(f"the server's {LISTED_OUTPUT_KEY} cannot be read: {error!r}") from error


def _output_event(
    meta: Mapping[str, Any], length: int, event: tuple[int, ...], listed: ListedSteps | None
) -> FloatArray:
    """Log-prob of the event at each sampled token."""
    if listed is None:
        return _together(meta, "output_token_ids_logprobs", length, event)
    return _as_one(listed.given_TE)


def _output_top_ids(
    meta: Mapping[str, Any],
    length: int,
    k: int,
    event: tuple[int, ...],
    listed: ListedSteps | None,
) -> TokenArray:
    if not length:
        return np.empty((0, k), np.int32)
    if listed is not None:
        ids_TK, logprobs_TK = listed.ids_TK, listed.logprobs_TK
    else:
        ids_TK, logprobs_TK = _likeliest(meta, "output_top_logprobs", 0, length, k + merged(event))
    if event:
        together_T = _output_event(meta, length, event, listed)
        ids_TK, _ = _with_event(ids_TK, logprobs_TK, together_T, k, event)
    return ids_TK.astype(np.int32)


def _columns(meta: Mapping[str, Any], name: str) -> tuple[FloatArray, TokenArray]:
    """Log-probs and token ids from a list of [log-prob, id, text]."""
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
    """Log-prob of the event at the last `length` positions, from the log-probs of its tokens."""
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
    return _as_one(values_NE)


def _as_one(logprobs_NE: np.ndarray) -> FloatArray:
    """Log-prob, for each row, that any of the tokens is sampled."""
    return np.logaddexp.reduce(logprobs_NE.astype(np.float64), axis=1).astype(np.float32)


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
    """Log-probs of the scored tokens.

    The first entry of the answer belongs to the context's last token and has no log-prob.
    """
    echo = read_echo(answer)
    if echo is not None and echo != np.float32(temperature):
        raise EngineError(
            f"the server scored at temperature {echo:g}, requested was {temperature:g}; restart it "
            "with isotherm's plugin of this version"
        )
    logprobs_N, tokens_N = _columns(answer["meta_info"], "input_token_logprobs")
    expected_N = request.tokens_T[request.start - 1 :]
    # SGLang reports the vocabulary's last id as 0 here, with the log-prob of the last id.
    expected_N = np.where(expected_N == vocab_size - 1, 0, expected_N)
    if not np.array_equal(np.where(tokens_N == vocab_size - 1, 0, tokens_N), expected_N):
        raise EngineError(
            f"the server returned {len(tokens_N)} input log-probs for {len(expected_N)} tokens, or "
            "log-probs of other tokens"
        )
    logprobs_N, stopped_N = logprobs_N[1:], hits(request.tokens_T[request.start :], event)
    if stopped_N.any():
        meta, length = answer["meta_info"], len(logprobs_N)
        together_N = _together(meta, "input_token_ids_logprobs", length, event)
        logprobs_N = np.where(stopped_N, together_N, logprobs_N)
    return _finite(logprobs_N, "input_token_logprobs")


def read_echo(answer: Mapping[str, Any]) -> np.float32 | None:
    """Temperature that the plugin echoes; None from a server without the plugin."""
    echo = answer["meta_info"].get(TEMPERATURE_KEY)
    if isinstance(echo, list):
        echo = next((value for value in echo if value is not None), None)
    return None if echo is None else np.float32(echo)


def read_unscaled(answer: Mapping[str, Any], request: ScoreRequest) -> FloatArray | None:
    """Log-probs at T = 1 from the plugin, of the same pass; None if they are incomplete."""
    found = answer["meta_info"].get(UNSCALED_KEY)
    # One entry for the one sampled token; null if it was not requested.
    if not (isinstance(found, list) and len(found) == 1 and isinstance(found[0], list)):
        return None
    if len(found[0]) != len(request.tokens_T) - request.start:
        return None  # the plugin returned only the last of several prefill chunks
    return _finite(np.asarray(found[0], np.float32), UNSCALED_KEY)


def read_hidden_states(
    answer: Mapping[str, Any], request: ScoreRequest, dtype: str
) -> HiddenStates | None:
    """Hidden states of the request's `states_N`; None if it asks for none.

    They come from the plugin, or in the form of stock SGLang: one list of numbers for each prompt
    token that was not in the prefix cache. Without the last list, the scored positions are at the
    end.

    Args:
        dtype: compute precision of the server; its numbers are exact in it.
    """
    if request.states_N is None:
        return None
    meta, expected = answer["meta_info"], len(request.states_N)
    found = meta.get(STATES_KEY) or meta.get("hidden_states")
    try:
        if isinstance(found, list) and isinstance(found[0], str):
            return read_states(found[0], expected).at(request.states_N)
        assert isinstance(found, list)
        rows_NH = np.asarray(found[0], np.float32)[:-1]
        states = HiddenStates.rounded(rows_NH[len(rows_NH) - expected :], dtype)
        if len(rows_NH) >= expected:
            return states.at(request.states_N)
    except (AssertionError, IndexError, ValueError, TypeError, DataError) as error:
        raise EngineError(
            f"the server returned no hidden states of {expected} positions ({error!r}). Install "
            "isotherm where it runs, or start it with --enable-return-hidden-states"
        ) from error
    raise EngineError(
        f"the server returned hidden states of {len(rows_NH)} positions, requested were {expected}:"
        " it returns only those of a prompt's last prefill chunk. Start it with "
        "--chunked-prefill-size -1, or install isotherm where it runs"
    )


def read_top(
    answer: Mapping[str, Any],
    request: ScoreRequest,
    k: int,
    vocab_size: int,
    event: tuple[int, ...] = (),
) -> TopLogprobs | None:
    """The k likeliest outcomes at each scored position; None if none were requested.

    If the request gives tokens (`given_NK`), the given tokens and the k likeliest others. An event
    has the id of its first token.

    Unlike the ids of the scored tokens, these ids include the vocabulary's last one: SGLang 0.5.23
    clips only those of input_token_logprobs
    (managers/scheduler_components/logprob_result_processor.py).
    """
    if request.given_NK is not None:
        return _read_listed(answer, request.given_NK, k, event)
    if k == 0:
        return None
    meta, expected = answer["meta_info"], len(request.tokens_T) - request.start
    # The first entry belongs to the context's last token.
    ids_NK, logprobs_NK = _likeliest(meta, "input_top_logprobs", 1, expected, k + merged(event))
    if ids_NK.max() >= vocab_size:
        raise EngineError(
            f"the server's input_top_logprobs name token {ids_NK.max()}, outside its vocabulary "
            f"of {vocab_size}"
        )
    if event:
        together_N = _together(meta, "input_token_ids_logprobs", expected, event)
        ids_NK, logprobs_NK = _with_event(ids_NK, logprobs_NK, together_N, k, event)
    return _distribution(ids_NK, logprobs_NK, "input_top_logprobs")


def _read_listed(
    answer: Mapping[str, Any], given_NK: TokenArray, k: int, event: tuple[int, ...]
) -> TopLogprobs:
    """Log-probs of given outcomes and of the k likeliest others, from the plugin."""
    found = answer["meta_info"].get(LISTED_KEY)
    text = found[0] if isinstance(found, list) and found else None
    if not isinstance(text, str):
        raise EngineError(
            "the server returned no log-probs of the given tokens: it runs without isotherm's "
            "plugin, or with a plugin of another version. Install isotherm where it runs, or use "
            "settings that any server supports: top_k_from=teacher, or estimator=sampled"
        )
    given = given_NK.shape[1]
    try:
        logprobs_NK, others_NK, ids_NK = read_listed(text, given + len(event), k)
    except ValueError as error:
        raise EngineError(f"the server's {LISTED_KEY} cannot be read: {error}") from error
    if len(logprobs_NK) != len(given_NK):
        raise EngineError(
            f"the server returned log-probs of given tokens at {len(logprobs_NK)} positions, "
            f"requested were {len(given_NK)}"
        )
    if event:
        together_N = _as_one(logprobs_NK[:, given:])
        is_event_NK = given_NK == event[0]
        logprobs_NK = np.where(is_event_NK, together_N[:, None], logprobs_NK[:, :given])
        if k:  # the event is one of the others, unless it was given
            other_N = np.where(is_event_NK.any(axis=1), -np.inf, together_N)
            ids_NK, others_NK = _with_event(ids_NK, others_NK, other_N, k, event)
    return _distribution(
        np.concatenate([given_NK, ids_NK], axis=1).astype(np.int32),
        np.concatenate([logprobs_NK, others_NK], axis=1).astype(np.float32),
        LISTED_KEY,
    )


def _distribution(ids_NK: TokenArray, logprobs_NK: FloatArray, what: str) -> TopLogprobs:
    try:
        return TopLogprobs(ids_NK=ids_NK, logprobs_NK=logprobs_NK)
    except DataError as error:
        raise EngineError(f"the server's {what} are not a distribution: {error}") from error


def _likeliest(
    meta: Mapping[str, Any], name: str, nulls: int, expected: int, asked: int
) -> tuple[TokenArray, FloatArray]:
    """Ids and log-probs of the likeliest tokens, (expected, asked), after `nulls` empty entries.

    They are two blocks in base64, or from an older server a list of [log-prob, id, text] for each
    position.
    """
    try:
        if f"{name}_shape" in meta:
            before, shape = meta[f"{name}_null_prefix"], meta[f"{name}_shape"]
            ids_NK = _block(meta, f"{name}_idx_flat_b64").reshape(shape).astype(np.int32)
            logprobs_NK = _block(meta, f"{name}_val_flat_b64").reshape(shape).astype(np.float32)
        else:
            before, rows = nulls, meta[name][nulls:]
            ids_NK = np.asarray([[token for _, token, *_ in row] for row in rows], np.int32)
            values_NK = [[np.nan if value is None else value for value, *_ in row] for row in rows]
            logprobs_NK = np.asarray(values_NK, np.float32)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"the server's {name} cannot be read: {error!r}") from error
    if before != nulls or ids_NK.shape != (expected, asked) or logprobs_NK.shape != ids_NK.shape:
        raise EngineError(
            f"the server's {name} have shape {logprobs_NK.shape} after {before} empty entries; "
            f"requested were {asked} tokens at each of {expected} positions"
        )
    return ids_NK, logprobs_NK


def _block(meta: Mapping[str, Any], name: str) -> np.ndarray:
    """Decode numbers from base64 of their little-endian bytes."""
    return np.frombuffer(decoded(meta[name]), np.dtype(meta[f"{name}_dtype"]).newbyteorder("<"))


def _with_event(
    ids_NK: TokenArray,
    logprobs_NK: FloatArray,
    together_N: FloatArray,
    k: int,
    event: tuple[int, ...],
) -> tuple[TokenArray, FloatArray]:
    """Merge the tokens of an event into one outcome, and return the k likeliest outcomes.

    Of the k + |event| - 1 listed tokens, at most |event| belong to the event, so k - 1 others
    remain besides the event. If all of its tokens are listed, the event is likelier than any token
    that is not listed.

    Args:
        ids_NK: ids of the k + |event| - 1 likeliest tokens.
        together_N: log-prob of the event.
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
    fields = reason if isinstance(reason, dict) else {}
    kind = fields.get("type")
    if kind == "abort":
        code = fields.get("status_code")
        if code is not None and int(code) >= 400:  # ended by a failure of the server
            raise EngineError(f"the server ended a sample: {reason}")
        return StopReason.ABORTED
    if kind == "stop":
        return StopReason.EOS
    if kind == "length":
        return StopReason.LENGTH
    raise EngineError(f"the server ended a sample with the unknown reason {reason!r}")


def _versions(meta: Mapping[str, Any], length: int) -> TokenArray:
    """Weight version of each sampled token, from the spans that SGLang reports."""
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
    """Parse a weight version; 0 if it is not a number.

    Servers that receive no pushes may have any text as their only version.
    """
    try:
        return int(text)
    except (TypeError, ValueError):
        return 0
