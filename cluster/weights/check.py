"""Check of a push: the engines of a pool hold, and use, what the learner sent.

    within a step   push v -> acknowledged -> ask(expect(v, weights)) ..... next push: settle()
    overlapping it  expected = expect(v, weights) -> the learner continues
                    push v -> acknowledged -> ask(expected) ............... next push: settle()

Two methods, each for the versions that `verify.every` sets:

    log-probs   Every engine scores two fixed rows; the results are compared with the learner's own
                log-probs. Detects wrong weights, and prefixes that were cached under older weights,
                if they move log-probs by more than the tolerance of the engines' dtype.
    checksums   Digests of every parameter of every rank are compared with the other engines', and
                with digests of what was sent, if it is known how a server builds the parameter
                (distill/weights/served_parameters.py). Detects a change of one bit.

Answers are collected before the next push, so that a push does not wait for its own check.

If an adapter is pushed alone, each server compares the SHA-256 of every tensor before it loads the
adapter (distill/weights/adapter.py), which proves that the adapter arrived. The log-probs prove
that the adapter is used, if adapter and base differ on the rows by more than the tolerance;
otherwise that proof is void.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.handshake.handshake import probe_row, score_requests
from cluster.weights.transport import PushSettings, collect
from distill.engine import Score
from distill.errors import CalibrationError
from distill.handshake.comparison import Comparison, compare, concatenated, probe_prompts
from distill.models.loading import context_length, load_config, vocab_size
from distill.objective.batching import TrainingRow
from distill.pace import Progress
from distill.types import FloatArray
from distill.weights.model_weights import Weights
from distill.weights.served_parameters import Digests, ShardRule, expected_digests, find_shard_rules

logger = logging.getLogger(__name__)

# Log-probs of rows' trained tokens, one array per row.
Logprobs = Callable[[Sequence[TrainingRow]], list[FloatArray]]

NUM_ROWS = 2
_CHECKSUMS = "return the checksums of its weights"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expected:
    """Answers that engines must give for one version; None if a method is not due or impossible.

    Attributes:
        logprobs_N: the learner's log-probs of the rows, one after the other.
        adapted: True if the adapter changes `logprobs_N` by more than the tolerance; None for
            merged weights.
        digests: digests of the parameters for which a shard rule is known, by rank.
    """

    version: int
    logprobs_N: FloatArray | None = None
    adapted: bool | None = None
    digests: Digests | None = None


class PushCheck:
    """Check of a pool's engines, version by version; its arguments are those of a `Publisher`.

    Args:
        engines: live view of the engines that hold the pushed weights.
    """

    def __init__(
        self,
        engines: Mapping[str, Any],
        settings: PushSettings,
        learner_logprobs: Logprobs,
        progress: Progress,
        base_logprobs: Logprobs | None = None,
    ) -> None:
        self._engines, self._settings, self._progress = engines, settings, progress
        self._learner_logprobs = learner_logprobs
        self._base_logprobs = base_logprobs if settings.choice == "adapter" else None
        self._base_N: FloatArray | None = None  # of the rows by the base: computed once
        self._warned_unadapted = False
        self._rows_D = _probe_rows(settings) if settings.probe_every else []
        self._shard_rules: dict[str, ShardRule] | None = None  # found from the first digests
        self._ranks = 0
        # The expected answers, and the pending scores and digests by engine.
        self._asked: tuple[Expected, Mapping[str, Any], Mapping[str, Any]] | None = None

    def is_ready(self, version: int) -> bool:
        """True if `expect` queries no engine, so that it may precede the acknowledgements."""
        return self._shard_rules is not None or not self._is_proven(version)

    def expect(self, version: int, weights: Weights) -> Expected:
        """Compute the expected answers; call while the learner holds `weights`.

        Unless `is_ready`, the engines must hold `weights`, too, because the shard rules are found
        from an engine's digests.
        """
        self._progress.mark()
        logprobs_N = adapted = digests = None
        if self._is_due(self._settings.probe_every, version):
            logprobs_N = concatenated(self._learner_logprobs(self._rows_D))
            adapted = self._is_adapted(version, logprobs_N)
        if self._is_proven(version):
            if self._shard_rules is None:
                self._find_shard_rules(weights)
            if self._shard_rules is not None:
                digests = expected_digests(self._shard_rules, weights, self._ranks)
        return Expected(version=version, logprobs_N=logprobs_N, adapted=adapted, digests=digests)

    def ask(self, expected: Expected) -> None:
        """Send the requests; call once every engine has acknowledged the version."""
        assert self._asked is None, "settle() comes first: an engine would answer for newer weights"
        scores = digests = {}
        if expected.logprobs_N is not None:
            requests = score_requests(self._rows_D)
            scores = {name: engine.score.remote(requests) for name, engine in self._engines.items()}
        if expected.digests is not None:
            digests = self._ask_digests()
        self._asked = expected, scores, digests

    def settle(self) -> dict[str, float]:
        """Collect the answers; call before the next push and at the end of a run.

        Returns:
            `push/probe_gap`: largest gap of log-probs, nats. `push/void`, for an adapter: 1 if the
            log-probs prove nothing. `push/proven`: share of parameters whose digests were compared
            with what was sent, the smallest of all engines. Each only if an engine has answered.

        Raises:
            CalibrationError: an engine does not hold the weights that it acknowledged.
        """
        if self._asked is None:
            return {}
        (expected, scoring, digesting), self._asked = self._asked, None
        found: dict[str, float] = {}
        if scores := self._collect(scoring, "answer the weight probe"):
            gaps = [self._gap(expected, name, each) for name, each in scores.items()]
            found["push/probe_gap"] = max(gaps)
            if expected.adapted is not None:
                found["push/void"] = float(not expected.adapted)
        served: dict[str, Digests] = self._collect(digesting, _CHECKSUMS)
        if served:
            shares = [_proven_share(expected, name, each) for name, each in served.items()]
            _require_alike(expected.version, served)
            found["push/proven"] = min(shares)
        return found

    def _is_proven(self, version: int) -> bool:
        due = self._is_due(self._settings.prove_every, version)
        return due and self._settings.choice != "adapter"

    def _is_due(self, every: int, version: int) -> bool:
        return every > 0 and version % every == 0 and bool(self._engines)

    def _is_adapted(self, version: int, logprobs_N: FloatArray) -> bool | None:
        """True if log-probs would reveal a missing adapter; None unless an adapter is pushed."""
        if self._base_logprobs is None:
            return None
        if self._base_N is None:
            self._base_N = concatenated(self._base_logprobs(self._rows_D))
        adapted = not self._compared("the base", self._base_N, logprobs_N).agrees
        if not (adapted or self._warned_unadapted):
            logger.warning(
                "weights version %d: the adapter changes the rows' log-probs by at most the "
                "tolerance, so they do not prove that engines use it (push/void=1); its "
                "checksums prove that it arrived",
                version,
            )
        self._warned_unadapted = not adapted
        return adapted

    def _compared(self, name: str, their_N: FloatArray, logprobs_N: FloatArray) -> Comparison:
        return compare(
            name, their_N, "learner", logprobs_N,
            temperature=self._settings.temperature, dtype=self._settings.dtype,
        )  # fmt: skip

    def _collect(self, pending: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Answers by engine, without failed calls and empty answers."""
        answers = collect(pending, self._settings.timeout_s, waiting=self._progress.mark)
        for name, why in answers.failures.items():
            logger.warning("%s did not %s: %s", name, what, why)
        return {name: answer for name, answer in answers.values.items() if answer}

    def _ask_digests(self) -> dict[str, Any]:
        return {name: engine.weight_checksums.remote() for name, engine in self._engines.items()}

    def _gap(self, expected: Expected, name: str, scores: Sequence[Score]) -> float:
        assert expected.logprobs_N is not None
        their_N = concatenated([score.logprobs_by_temperature[0] for score in scores])
        comparison = self._compared(name, their_N, expected.logprobs_N)
        if not comparison.agrees:
            raise CalibrationError(
                f"{name} does not hold weights version {expected.version}: its log-probs are up "
                f"to {comparison.max_gap:.3g} nats from the learner's on {comparison.num_tokens} "
                f"tokens (mean {comparison.mean_gap:.3g}; allowed {comparison.tolerance:.3g}, "
                f"mean {comparison.mean_tolerance:.3g}). The push was incomplete, or the engine "
                "kept prefixes cached under older weights"
            )
        return comparison.max_gap

    def _find_shard_rules(self, weights: Weights) -> None:
        """Find the shard rules from the digests of the first engine that answers."""
        served = next(iter(self._collect(self._ask_digests(), _CHECKSUMS).values()), None)
        if served is None:
            return
        self._ranks, self._shard_rules = len(served), find_shard_rules(served, weights)
        if unproven := served[0].keys() - self._shard_rules.keys():
            logger.warning(
                "%d of %d parameters of the engines (for example %s) cannot be derived from the "
                "pushed weights by a known rule: they are only compared between engines",
                len(unproven),
                len(served[0]),
                min(unproven),
            )


def _probe_rows(settings: PushSettings) -> list[TrainingRow]:
    config = load_config(settings.model)
    prompts = probe_prompts(vocab_size(config), context_length(config))
    # The longest prompts, because only a prefix of some length can be cached under old weights.
    chains = sorted(prompts, key=len)[-NUM_ROWS:]
    return [probe_row(c, max(1, len(c) // 2), settings.temperature) for c in chains]


def _proven_share(expected: Expected, name: str, served: Digests) -> float:
    """Share of an engine's parameters that are proven to be what was sent; raises as `settle`."""
    assert expected.digests is not None
    if len(served) != len(expected.digests):
        return 0.0
    for rank, (held, sent) in enumerate(zip(served, expected.digests, strict=True)):
        if wrong := [n for n, value in sent.items() if held.get(n) != value]:
            raise CalibrationError(
                f"{name} does not hold weights version {expected.version}: {_some(wrong)} of "
                f"rank {rank} {'is' if len(wrong) == 1 else 'are'} not what was sent, by "
                "checksum. The push was incomplete: a tensor was skipped, or an older one kept"
            )
    return len(expected.digests[0]) / len(served[0])


def _require_alike(version: int, served: Mapping[str, Digests]) -> None:
    """Raise CalibrationError if engines with equally many ranks hold different parameters."""
    firsts: dict[int, str] = {}  # name of an engine, by number of ranks
    for name, digests in served.items():
        other = firsts.setdefault(len(digests), name)
        for rank, (mine, others) in enumerate(zip(digests, served[other], strict=True)):
            names = mine.keys() | others.keys()
            if wrong := sorted(n for n in names if mine.get(n) != others.get(n)):
                raise CalibrationError(
                    f"{name} and {other} hold different weights as version {version}: "
                    f"{_some(wrong)} of rank {rank} differ by checksum. The push was incomplete "
                    "at one of them"
                )


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
