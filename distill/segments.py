"""From turns to segments: extend the chain while it is a prefix, open a new one when it is not."""

from __future__ import annotations

import numpy as np

from distill.interfaces import Sample
from distill.types import Segment, TokenArray


class SegmentBuilder:
    """Collects the turns of one episode. Sampled tokens are kept as sampled, never re-encoded."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._done: list[Segment] = []
        self._tokens: list[TokenArray] = []
        self._mask: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []

    def append(self, observation_T: TokenArray, sample: Sample) -> None:
        """Adds one turn: all the tokens the model saw (`observation_T`), then what it sampled."""
        seen_T = np.concatenate(self._tokens) if self._tokens else np.empty(0, np.int32)
        if not np.array_equal(observation_T[: len(seen_T)], seen_T):
            self._close()
            seen_T = seen_T[:0]
        new = len(observation_T) - len(seen_T)
        self._tokens += [np.asarray(observation_T[len(seen_T) :], np.int32), sample.tokens_T]
        self._mask += [np.zeros(new, np.bool_), np.ones(len(sample.tokens_T), np.bool_)]
        self._logprobs += [np.zeros(new, np.float32), sample.logprobs_T]
        self._versions += [np.full(new, -1, np.int32), sample.versions_T]

    def _close(self) -> None:
        self._done.append(
            Segment(
                tokens_T=np.concatenate(self._tokens),
                action_mask_T=np.concatenate(self._mask),
                behaviour_logprobs_T=np.concatenate(self._logprobs),
                versions_T=np.concatenate(self._versions),
                temperature=self._temperature,
            )
        )
        self._tokens, self._mask, self._logprobs, self._versions = [], [], [], []

    def build(self) -> tuple[Segment, ...]:
        """The episode's segments, in order."""
        if self._tokens:
            self._close()
        return tuple(self._done)
