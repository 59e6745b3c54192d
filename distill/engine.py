"""The `Engine` protocol: models that sample and score, embedded or served, local or on Ray.

Also its requests and answers, the ways in which new weights arrive, and checks of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np

from distill.errors import DataError
from distill.routing import ExpertArray
from distill.sampling import Sampling, check_temperature
from distill.states import HiddenStates
from distill.stops import merged
from distill.tokenizer import TokenizerProbe
from distill.types import BoolArray, FloatArray, StopReason, TokenArray, TopLogprobs

if TYPE_CHECKING:  # rollout workers import this module, and start without torch
    from distill.weights.adapter import AdapterTensors
    from distill.weights.model_weights import TensorLayout
    from distill.weights.shared_memory import SharedTensors


def _wrong(field: str, problem: str) -> DataError:
    return DataError(f"{field} {problem}", field=field)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """Sample `num_samples` continuations of one prompt.

    With `seed`, the samples are a function of (weights, prompt, sampling, seed), independent of the
    engine's other requests; sample g of the request uses (seed, g).

    Attributes:
        session: requests of one session share a prefix, so a pool prefers the engine that has the
            prefix cached; "": no shared prefix.
        top_k: number of the likeliest tokens whose ids are returned at each sampled position; 0:
            none.
        experts: if True, return the experts of a mixture that tokens are routed to.
        known: number of leading prompt tokens whose experts the caller already has.
    """

    prompt_tokens_T: TokenArray
    sampling: Sampling
    num_samples: int
    seed: int
    session: str = ""
    top_k: int = 0
    experts: bool = False
    known: int = 0

    def __post_init__(self) -> None:
        if len(self.prompt_tokens_T) == 0:
            raise _wrong("GenerateRequest.prompt_tokens_T", "is empty: give at least one token")
        if self.num_samples < 1:
            raise _wrong("GenerateRequest.num_samples", f"= {self.num_samples} must be at least 1")
        if self.top_k < 0:
            raise _wrong("GenerateRequest.top_k", f"= {self.top_k} must be 0 (none) or above")
        if not 0 <= self.known <= (length := len(self.prompt_tokens_T)):
            raise _wrong(
                "GenerateRequest.known",
                f"= {self.known} must be in [0, {length}]: tokens of the prompt",
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One continuation. All `_T` arrays cover the new tokens only, the stop token included.

    `logprobs_T` are log softmax(z / T) of the distribution before any truncation, at the request's
    temperature (at temperature 0: of the unscaled distribution; evaluation never trains on them).

    Attributes:
        cached_tokens: number of prompt tokens that were in the engine's cache; None: the engine has
            no cache, or does not report it.
        top_ids_TK: int32 ids of the likeliest outcomes at each sampled position, under the weights
            that sampled there; the first id of the engine's `stop_event` stands for the event.
            None: not requested.
        experts_NLK: experts of the prompt's tokens from the request's `known` on, and of the new
            tokens except the last, which has passed through no layer yet; in the format of
            `distill.routing`. None: not requested, or unknown because the sample was aborted.
        sampled_by: number of the replica that sampled it, as in `Score.scored_by`.
    """

    tokens_T: TokenArray
    logprobs_T: FloatArray
    versions_T: TokenArray
    stop_reason: StopReason
    cached_tokens: int | None = None
    top_ids_TK: TokenArray | None = None
    experts_NLK: ExpertArray | None = None
    sampled_by: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreRequest:
    """Score given tokens: log softmax(z / T)[token] for positions `start` to the end.

    Attributes:
        tokens_T: the whole chain, context and scored tokens.
        start: first position scored, at least 1 (position 0 has no context).
        temperatures: temperatures T to score at; they share one forward pass.
        given_NK: int32 ids of further tokens whose log-probs at the first T are returned, one row
            per scored position, distinct within a row. The first id of an engine's `stop_event`
            stands for the event. None: no further tokens.
        top_k: number of the likeliest tokens, other than the given ones, whose log-probs at the
            first T are returned at each scored position. 0: none.
        states_N: mask over the scored positions: True to return the hidden state that predicts the
            token there. None: no hidden states.
    """

    tokens_T: TokenArray
    start: int
    temperatures: tuple[float, ...]
    given_NK: TokenArray | None = None
    top_k: int = 0
    states_N: BoolArray | None = None

    def __post_init__(self) -> None:
        scored = len(self.tokens_T) - self.start
        if self.start < 1 or scored < 1:
            raise _wrong(
                "ScoreRequest.start",
                f"= {self.start} must be in [1, {len(self.tokens_T)}): position 0 has no context, "
                "and at least one token must be scored",
            )
        if not self.temperatures:
            raise _wrong("ScoreRequest.temperatures", "is empty")
        if self.top_k < 0:
            raise _wrong("ScoreRequest.top_k", f"= {self.top_k} must be 0 (none) or above")
        if (given_NK := self.given_NK) is not None and (
            given_NK.ndim != 2 or len(given_NK) != scored or given_NK.shape[1] == 0
        ):
            raise _wrong(
                "ScoreRequest.given_NK",
                f"has shape {given_NK.shape}; it must have a row of ids for each of {scored} "
                "scored positions",
            )
        if (states_N := self.states_N) is not None and (
            states_N.shape != (scored,) or not states_N.any()
        ):
            raise _wrong(
                "ScoreRequest.states_N",
                f"has shape {states_N.shape}; it must be True at some of {scored} scored positions",
            )
        for temperature in self.temperatures:
            check_temperature(temperature, "ScoreRequest.temperatures")

    @property
    def listed(self) -> int:
        """Number of tokens listed at each position: the given tokens and the likeliest."""
        return self.top_k + (0 if self.given_NK is None else self.given_NK.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Score:
    """Log-probs of positions `start` to the end, one array per temperature of the request.

    A token of the engine's `stop_event` has the event's log-prob, as in a `Sample`.

    Attributes:
        top: one row per scored position, at the request's first temperature: the given tokens in
            their order, then the likeliest other tokens, the best first; None if neither was
            requested.
        scored_by: number of the replica that scored, if a pool numbers its replicas; else None. A
            replica is one process lifetime of an engine.
        version: version of the weights that scored; None if the engine receives no pushes.
        states: hidden states at the positions of `states_N`, in the served dtype; None if none were
            requested. An engine's Ray actor returns a reference to an object that it owns.
    """

    logprobs_by_temperature: tuple[FloatArray, ...]
    top: TopLogprobs | None = None
    scored_by: int | None = None
    version: int | None = None
    states: HiddenStates | Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDirectory:
    """Weights as a Hugging Face checkpoint directory, at a path that the engine can read."""

    path: str


# Words of rank 0 in a weight group, and the number of the agreement to form it. Pushes begin at 1.
SENDS, ABORTS = "sends", "aborts"
JOINING = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """An engine's membership in a weight group; see cluster/weights/collective.py.

    Attributes:
        address, port: address of the group's TCPStore, which rank 0 holds.
        name: name of the group, a new one for each group that is formed.
        backend: torch's name of the backend.
        rank: this engine's first rank; its tensor-parallel ranks follow.
        join_deadline_s: longest time that forming the group may take.
        timeout_s: longest time that rank 0 may wait for the other engines.
    """

    address: str
    port: int
    name: str
    backend: Literal["gloo", "nccl"]
    world_size: int
    rank: int
    join_deadline_s: float
    timeout_s: float

    def ready_key(self, number: int) -> str:
        """Key that an engine sets when it is ready to receive the push of this number, or to join
        (`JOINING`); rank 0 waits for all engines."""
        return f"isotherm/{self.name}/{number}/{self.rank}"

    def word_key(self, number: int) -> str:
        """Key that rank 0 sets when all are ready: `SENDS`, or `ABORTS` if an engine refuses."""
        return f"isotherm/{self.name}/{number}/word"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveBroadcast:
    """Weights that rank 0 of a torch.distributed group sends; see cluster/weights/collective.py.

    Attributes:
        number: number of this push in the group, from 1.
        buckets: tensors of each broadcast, concatenated in this order.
    """

    member: GroupMember
    number: int
    buckets: Sequence[Sequence[TensorLayout]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LentWeights:
    """Weights that a learner lends bucket by bucket; see cluster/weights/ipc.py.

    Attributes:
        push: unique name of the push.
        buckets: tensors of each bucket; a call of `load_bucket` delivers one bucket.
        timeout_s: longest time that the engine may wait for a bucket.
    """

    push: str
    buckets: Sequence[Sequence[TensorLayout]]
    timeout_s: float


# A model's new weights reach an engine in memory that it shares with the learner, as files, over a
# network, or in buckets that the learner lends.
ModelSource: TypeAlias = "SharedTensors | CheckpointDirectory | CollectiveBroadcast | LentWeights"
# Weights of a model, or of an adapter by value.
WeightSource: TypeAlias = "ModelSource | AdapterTensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """An engine's description of itself; compared across parties before a run starts.

    Attributes:
        vocab_size: exclusive upper bound of the token ids in requests.
        dtype: compute precision; determines how far log-probs may differ.
        eos_token_ids: ids that end a generation; None if unknown (a remote server).
        tokenizer: token ids of known texts under its tokenizer; None if it has none.
        temperature_scaling: description of how given tokens are scored at T, for people to read.
        stop_event: ids that are one outcome: each has the log-prob of all of them together; see
            `distill.stops`.
        scores_given: True if it supports `ScoreRequest.given_NK`; a server without our plugin does
            not.
        longest_states: longest row, in tokens, for which it supports `ScoreRequest.states_N`; None:
            no limit. For a server without our plugin it is 0, or the length of one prefill chunk if
            the server was started with --enable-return-hidden-states.
        scores_at_t: True if it announces that given tokens are scored at T. A server without our
            plugin does not: its log-probs of given tokens are at T = 1.
    """

    kind: str
    model: str
    vocab_size: int
    context_length: int
    weight_version: int
    dtype: str
    eos_token_ids: tuple[int, ...] | None
    tokenizer: TokenizerProbe | None
    temperature_scaling: str
    stop_event: tuple[int, ...] = ()
    scores_given: bool = True
    longest_states: int | None = None
    scores_at_t: bool = True

    @property
    def is_server(self) -> bool:
        """True for an SGLang server: one that the run starts, or an external one."""
        return self.kind.startswith("sglang")


class SamplingModel(Protocol):
    """The part of `Engine` that an episode needs."""

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        """Sample `num_samples` continuations. Concurrent requests are batched together."""
        ...


class ScoringModel(SamplingModel, Protocol):
    """A model that generates and scores. Every method may be called concurrently.

    Raises (all methods): EngineError if the engine cannot serve a request; DataError if it refuses
    one (a token id outside the vocabulary, a prompt that fills the context).
    """

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Compute log-probs of given tokens: one `Score` per request, in order."""
        ...

    async def decode_score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Compute the scores of `score` by the decode path: the handshake's reference.

        For each position, the engine prefills the context and samples one token at T, which is
        discarded. The log-prob of the given token is read from the distribution that was sampled.
        Slow, but correct on any server whose decode log-probs are scaled by T.
        """
        ...

    async def info(self) -> EngineInfo:
        """Describe the engine. Only a healthy engine answers."""
        ...


class Engine(ScoringModel, Protocol):
    """A scoring model with replaceable weights and monitored health.

    Raises (all methods): as `ScoringModel`.
    """

    async def load_weights(self, weights: WeightSource, version: int) -> float:
        """Replace the weights and drop every cached prefix. Returning is the acknowledgement.

        Requests in flight continue under the new weights with their context recomputed; each
        token has the version of the weights that sampled it. Returns the seconds for which
        generation paused.

        Raises:
            EngineError: the weights do not fit or did not arrive. The engine continues with its
                previous weights; if it cannot, the error says that it must be restarted.
        """
        ...

    async def health(self) -> int:
        """Answer the heartbeat: return soon, and only if requests would be answered.

        The returned number changes between two calls if requests made progress: tokens were
        generated, or chains scored.

        Raises:
            EngineLost: the engine is broken and must be restarted.
        """
        ...

    async def queue_length(self) -> int:
        """Count the samples and chains, of all callers, in progress or queued; return soon."""
        ...

    async def abort(self) -> int:
        """End every request in flight with StopReason.ABORTED; return the number of samples."""
        ...


def check_prompt(
    request: GenerateRequest,
    vocab_size: int,
    context_length: int,
    event: tuple[int, ...],
    *,
    records_experts: bool,
) -> int:
    """Check a request; return the number of tokens to sample: as requested, or as the context fits.

    Args:
        event: the engine's `stop_event`.

    Raises:
        DataError: an id outside the vocabulary, a prompt that fills the context, more likeliest
            tokens than there are outcomes, or experts that the engine does not record.
    """
    if request.experts and not records_experts:
        raise _wrong(
            "GenerateRequest.experts",
            "cannot be returned: the engine does not record experts; start it with "
            "routed_experts=True",
        )
    _check_listed(request.top_k, vocab_size, event, "GenerateRequest.top_k")
    check_token_ids(request.prompt_tokens_T, vocab_size, "GenerateRequest.prompt_tokens_T")
    room = context_length - len(request.prompt_tokens_T)
    if room < 1:
        raise DataError(
            f"a prompt of {len(request.prompt_tokens_T)} tokens leaves no room for an answer in "
            f"the model's context of {context_length}; shorten or condense it"
        )
    return min(request.sampling.max_new_tokens, room)


def check_chains(
    requests: Sequence[ScoreRequest],
    vocab_size: int,
    context_length: int,
    event: tuple[int, ...],
) -> None:
    """Raise DataError for an id outside the vocabulary, a chain longer than the context, or more
    listed tokens than there are outcomes. Arguments as for `check_prompt`."""
    for request in requests:
        check_token_ids(request.tokens_T, vocab_size, "ScoreRequest.tokens_T")
        if len(request.tokens_T) > context_length:
            raise DataError(
                f"a chain of {len(request.tokens_T)} tokens exceeds the model's context of "
                f"{context_length}"
            )
        _check_listed(request.listed, vocab_size, event, "ScoreRequest.top_k")
        if request.given_NK is not None:
            check_token_ids(request.given_NK, vocab_size, "ScoreRequest.given_NK")


def _check_listed(listed: int, vocab_size: int, event: tuple[int, ...], field: str) -> None:
    """Raise DataError if more tokens are listed than there are outcomes: a server would crash.

    The tokens of the event count as one outcome.
    """
    outcomes = vocab_size - merged(event)
    if listed > outcomes:
        raise DataError(
            f"{field}: {listed} tokens per position are requested, but the engine has {outcomes} "
            f"outcomes (vocabulary {vocab_size}); request at most that many",
            field=field,
        )


def check_token_ids(tokens_T: TokenArray, vocab_size: int, what: str) -> None:
    """Raise DataError if an id lies outside the vocabulary: a server would crash."""
    highest = int(np.max(tokens_T))
    if highest >= vocab_size or int(np.min(tokens_T)) < 0:
        raise DataError(
            f"{what} has token id {highest if highest >= vocab_size else int(np.min(tokens_T))}, "
            f"outside the engine's vocabulary of {vocab_size}; was it encoded by another tokenizer?"
        )
