"""The `Engine` protocol of policy and teacher, embedded or served, local or behind Ray."""

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

if TYPE_CHECKING:  # rollout workers ask engines, and start without torch
    from distill.weights.adapter import AdapterTensors
    from distill.weights.model_weights import TensorLayout
    from distill.weights.shared_memory import SharedTensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """Sample `num_samples` continuations of one prompt.

    `seed` makes the samples a function of (weights, prompt, sampling, seed), whatever else the
    engine is doing at the time; sample g of the request uses (seed, g).

    Attributes:
        session: requests of one session share a prefix, so one engine serves them best, which has
            it cached; "": nobody shares its prefix.
        top_k: also the ids of the likeliest tokens where each was sampled, so many; 0: none.
        experts: also the experts of a mixture that tokens are routed to.
        known: of how many of the prompt's tokens the caller has the experts already.
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
            raise DataError(
                "GenerateRequest.prompt_tokens_T is empty: give at least one token",
                field="GenerateRequest.prompt_tokens_T",
            )
        if self.num_samples < 1:
            raise DataError(
                f"GenerateRequest.num_samples = {self.num_samples} must be at least 1",
                field="GenerateRequest.num_samples",
            )
        if self.top_k < 0:
            raise DataError(
                f"GenerateRequest.top_k = {self.top_k} must be 0 (none) or above",
                field="GenerateRequest.top_k",
            )
        if not 0 <= self.known <= (length := len(self.prompt_tokens_T)):
            raise DataError(
                f"GenerateRequest.known = {self.known} must be in [0, {length}]: tokens of the "
                "prompt",
                field="GenerateRequest.known",
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One continuation. All `_T` arrays cover the new tokens only, the stop token included.

    `logprobs_T` are log softmax(z / T) of the distribution before any truncation, at the request's
    temperature (at temperature 0: of the unscaled distribution; evaluation never trains on them).

    Attributes:
        cached_tokens: how much of the prompt the engine had in its cache; None: it has no cache, or
            does not say.
        top_ids_TK: int32 ids of the likeliest outcomes where each token was sampled, by the weights
            that sampled it; the engine's `stop_event` is one by the id of its first token. None:
            not asked for.
        experts_NLK: experts of the prompt's tokens from the request's `known` on, and of the new
            ones but the last, which has been through no layer yet; as `distill.routing` has them.
            None: not asked for, or not known of a sample that was aborted.
        sampled_by: the number of the engine's life where a pool keeps count, as `Score.scored_by`.
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
        temperatures: the T's to score at; the forward pass is shared among them.
        given_NK: int32 ids of tokens, distinct within a row, whose log-probs at the first T are
            wanted beside that of the scored token: a row for each scored position. An engine's
            `stop_event` goes by the id of its first token. None: none.
        top_k: also the likeliest tokens of each scored position, so many, at the first T; of those
            that are not given there. 0: none.
        states_N: mask of the scored positions at which the hidden state is wanted that predicts
            the token there: a value for each scored position. None: none.
    """

    tokens_T: TokenArray
    start: int
    temperatures: tuple[float, ...]
    given_NK: TokenArray | None = None
    top_k: int = 0
    states_N: BoolArray | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.start < len(self.tokens_T):
            raise DataError(
                f"ScoreRequest.start = {self.start} must be in [1, {len(self.tokens_T)}): "
                "position 0 has no context, and at least one token must be scored",
                field="ScoreRequest.start",
            )
        if not self.temperatures:
            raise DataError("ScoreRequest.temperatures is empty", field="ScoreRequest.temperatures")
        if self.top_k < 0:
            raise DataError(
                f"ScoreRequest.top_k = {self.top_k} must be 0 (none) or above",
                field="ScoreRequest.top_k",
            )
        if self.given_NK is not None and (
            self.given_NK.ndim != 2
            or len(self.given_NK) != len(self.tokens_T) - self.start
            or self.given_NK.shape[1] == 0
        ):
            raise DataError(
                f"ScoreRequest.given_NK has shape {self.given_NK.shape}; it must have a row of ids "
                f"for each of {len(self.tokens_T) - self.start} scored positions",
                field="ScoreRequest.given_NK",
            )
        if self.states_N is not None and (
            self.states_N.shape != (len(self.tokens_T) - self.start,) or not self.states_N.any()
        ):
            raise DataError(
                f"ScoreRequest.states_N has shape {self.states_N.shape}; it must be True at some "
                f"of {len(self.tokens_T) - self.start} scored positions",
                field="ScoreRequest.states_N",
            )
        for temperature in self.temperatures:
            check_temperature(temperature, "ScoreRequest.temperatures")

    @property
    def listed(self) -> int:
        """Number of tokens that are wanted at each position: those given, and the likeliest."""
        return self.top_k + (0 if self.given_NK is None else self.given_NK.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Score:
    """Log-probs of positions `start` to the end, one array per temperature of the request.

    A token of the engine's `stop_event` has the event's log-prob here, as it has in a `Sample`.
    `top` has one row per scored position, at the request's first temperature: the given tokens in
    their order, then the likeliest of the others, the best first; None if neither was asked for.
    `scored_by` is the number of the engine's life where a pool of them keeps count, else None.
    `version` is that of the weights which scored it; None of an engine that nobody pushes to.
    `states` are those of the positions of `states_N`, in the served dtype; None if none were asked
    for. From an engine's Ray actor they come as a reference to an object that this actor owns.
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


SENDS, GIVES_UP = "sends", "gives up"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """An engine's membership in a weight group; see cluster/weights/collective.py.

    Attributes:
        address, port: of the group's TCPStore, held by rank 0.
        name: the group's; a new one for every group that is formed.
        backend: what torch calls it.
        rank: this engine's first rank; its tensor-parallel ranks follow.
        join_deadline_s: longest that forming the group may take.
        timeout_s: longest that rank 0 may wait for the other engines.
    """

    address: str
    port: int
    name: str
    backend: Literal["gloo", "nccl"]
    world_size: int
    rank: int
    join_deadline_s: float
    timeout_s: float

    def ready_key(self, version: int) -> str:
        """Set in the store by an engine that is about to receive; rank 0 waits for all of them."""
        return f"isotherm/{self.name}/{version}/{self.rank}"

    def word_key(self, version: int) -> str:
        """Set by rank 0 when all are ready: `SENDS`, or `GIVES_UP` if one of them refuses."""
        return f"isotherm/{self.name}/{version}/word"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveBroadcast:
    """Weights that rank 0 of a torch.distributed group sends; see cluster/weights/collective.py.

    Attributes:
        buckets: tensors of each broadcast, in which they lie end to end.
    """

    member: GroupMember
    buckets: Sequence[Sequence[TensorLayout]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LentWeights:
    """Weights in buckets that a learner lends, one after the other; see cluster/weights/ipc.py.

    Attributes:
        push: a name that no other push has.
        buckets: tensors of each bucket, which comes by a call of `load_bucket`.
        timeout_s: longest that the engine may wait for a bucket.
    """

    push: str
    buckets: Sequence[Sequence[TensorLayout]]
    timeout_s: float


# How a model's new weights reach an engine: in memory shared with the learner, as files, over a
# network, or in buckets that are lent.
ModelSource: TypeAlias = "SharedTensors | CheckpointDirectory | CollectiveBroadcast | LentWeights"
# That, or an adapter by value.
WeightSource: TypeAlias = "ModelSource | AdapterTensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """An engine's description of itself; compared across parties before a run starts.

    Attributes:
        vocab_size: ids below it may be sent.
        dtype: compute precision; decides how far log-probs may differ.
        eos_token_ids: ids that end a generation; None if the engine cannot know (a remote server).
        tokenizer: what its tokenizer makes of known texts; None if it has none.
        temperature_scaling: how given tokens come to be scored at T, for people to read.
        stop_event: ids whose log-probs are those of all of them together; see `distill.stops`.
        scores_given: it heeds `ScoreRequest.given_NK`; a server that lacks our plugin does not.
        longest_states: tokens of the longest row of which it returns `ScoreRequest.states_N`; None:
            any row. A server that lacks our plugin returns none, 0, unless it was started with
            --enable-return-hidden-states; then those of one prefill chunk.
        scores_at_t: it announces that given tokens are scored at T. A server without our plugin
            does not: its log-probs of given tokens are those at T = 1.
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
        """`num_samples` samples; requests in flight at the same time are batched together."""
        ...


class ScoringModel(SamplingModel, Protocol):
    """A model that generates and scores. Every method may be called concurrently.

    Raises (all methods): EngineError when the engine cannot do what was asked; DataError for a
    request it refuses (a token id outside the vocabulary, a prompt that fills the context).
    """

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Log-probs of given tokens, one `Score` a request, in order."""
        ...

    async def decode_score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """The scores of `score`, computed by the decode path: the handshake's reference.

        One position at a time: its context is given, one token is sampled at T and thrown away,
        and the log-prob of the given token is read off the distribution it was sampled from. Slow,
        and right on any server whose decode log-probs are scaled by T.
        """
        ...

    async def info(self) -> EngineInfo:
        """Answers only if the engine is healthy."""
        ...


class Engine(ScoringModel, Protocol):
    """A scoring model whose weights are replaced, and whose health is watched.

    Raises (all methods): as `ScoringModel`.
    """

    async def load_weights(self, weights: WeightSource, version: int) -> float:
        """Replace the weights and drop every cached prefix. Returning is the acknowledgement.

        Requests in flight go on under the new weights with their context recomputed; the version
        of each token tells which weights sampled it. Returns the seconds for which generation
        stood still.

        Raises:
            EngineError: the weights do not fit or did not arrive. The engine goes on with those it
                had; where it cannot, the error says that it must be restarted.
        """
        ...

    async def health(self) -> int:
        """Returns soon, and only where requests would be answered: the heartbeat.

        The number is another one each time if requests got on since the last time: tokens were
        generated, or chains scored.

        Raises:
            EngineLost: the engine is broken and must be restarted.
        """
        ...

    async def queue_length(self) -> int:
        """Samples and chains under way or waiting here, whoever asked for them. Answers at once."""
        ...

    async def abort(self) -> int:
        """End every request in flight with StopReason.ABORTED; returns how many samples."""
        ...


def check_prompt(
    request: GenerateRequest, vocab_size: int, context_length: int, event: tuple[int, ...]
) -> int:
    """The most tokens that may be sampled: what was asked for, or what the context has room for.

    Args:
        event: the engine's `stop_event`.

    Raises:
        DataError: an id outside the vocabulary, a prompt that fills the context, or more likeliest
            tokens than there are outcomes.
    """
    _check_listed(request.top_k, vocab_size, event, "GenerateRequest.top_k")
    check_token_ids(request.prompt_tokens_T, vocab_size, "GenerateRequest.prompt_tokens_T")
    room = context_length - len(request.prompt_tokens_T)
    if room < 1:
        raise DataError(
            f"a prompt of {len(request.prompt_tokens_T)} tokens leaves no room for an answer in "
            f"the model's context of {context_length}; shorten or condense it"
        )
    return min(request.sampling.max_new_tokens, room)


def check_records(request: GenerateRequest, records: bool) -> None:
    """Raises DataError for experts that are asked of an engine which does not record them."""
    if request.experts and not records:
        raise DataError(
            "GenerateRequest.experts of an engine that records none; start it with "
            "routed_experts=True",
            field="GenerateRequest.experts",
        )


def check_chains(
    requests: Sequence[ScoreRequest],
    vocab_size: int,
    context_length: int,
    event: tuple[int, ...],
) -> None:
    """Raises DataError for an id outside the vocabulary, a chain longer than the context, or more
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
    """Raises DataError if more tokens are listed than there are (a served engine would die of it).

    The tokens of the event count as one.
    """
    outcomes = vocab_size - merged(event)
    if listed > outcomes:
        raise DataError(
            f"{field}: {listed} tokens listed at a position, and the engine has {outcomes} "
            f"outcomes (its vocabulary is {vocab_size}); ask for that many at most",
            field=field,
        )


def check_token_ids(tokens_T: TokenArray, vocab_size: int, what: str) -> None:
    """Raises DataError if an id lies outside the vocabulary (a served engine would die of it)."""
    highest = int(np.max(tokens_T))
    if highest >= vocab_size or int(np.min(tokens_T)) < 0:
        raise DataError(
            f"{what} holds token id {highest if highest >= vocab_size else int(np.min(tokens_T))}, "
            f"outside the engine's vocabulary of {vocab_size}; was it encoded by another tokenizer?"
        )
