"""Segment builder: extends the token chain while it is a prefix, and opens a new one where not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distill.engine import Sample
from distill.errors import DataError
from distill.routing import ExpertArray, merged_experts
from distill.types import FloatArray, Segment, TokenArray


class _Chain:
    """The parts of one segment: for each turn what was newly observed, then what was sampled."""

    def __init__(self) -> None:
        self.tokens: list[TokenArray] = []
        self.mask: list[np.ndarray] = []
        self.logprobs: list[FloatArray] = []
        self.versions: list[TokenArray] = []
        self.bonuses: list[FloatArray] = []
        self.top_ids: list[TokenArray | None] = []
        self.experts: list[tuple[int, ExpertArray]] = []  # with the position of the first

    def seen_T(self) -> TokenArray:
        return np.concatenate(self.tokens) if self.tokens else np.empty(0, np.int32)

    @property
    def is_trained(self) -> bool:
        return any(mask.any() for mask in self.mask)

    def begins_with(self, observation_T: TokenArray) -> bool:
        """True if the first observation of the chain begins with all of this one."""
        return np.array_equal(self.tokens[0][: len(observation_T)], observation_T)

    def segment(
        self,
        temperature: float,
        *,
        with_bonuses: bool,
        teacher_context_T: TokenArray | None,
        teacher_replaces: int,
    ) -> Segment:
        tokens_T = np.concatenate(self.tokens)
        return Segment(
            tokens_T=tokens_T,
            action_mask_T=np.concatenate(self.mask),
            behaviour_logprobs_T=np.concatenate(self.logprobs),
            versions_T=np.concatenate(self.versions),
            temperature=temperature,
            policy_top_ids_NK=self._top_ids_NK(),
            teacher_context_T=teacher_context_T,
            teacher_replaces=teacher_replaces,
            bonuses_T=np.concatenate(self.bonuses) if with_bonuses else None,
            experts_TLK=merged_experts(len(tokens_T), self.experts),
        )

    def _top_ids_NK(self) -> TokenArray | None:
        known = [ids_TK for ids_TK in self.top_ids if ids_TK is not None]
        return np.concatenate(known) if known and len(known) == len(self.top_ids) else None


class SegmentBuilder:
    """Collects the turns of one episode. Sampled tokens are kept as sampled, never re-encoded.

    Args:
        temperature: the T that the turns were sampled at.
        teacher_context_T: what the teacher sees in place of the episode's first observation. It
            goes on every segment that begins with that observation. In one that does not, because
            the history was condensed or written anew, there is nothing that it could replace: the
            teacher sees there what the policy saw.
    """

    def __init__(self, temperature: float, teacher_context_T: TokenArray | None = None) -> None:
        self._temperature = temperature
        self._teacher_context_T = teacher_context_T
        self._chains: list[_Chain] = []
        self._with_bonuses = False

    def append(
        self,
        observation_T: TokenArray,
        sample: Sample,
        bonuses_T: FloatArray | None = None,
        *,
        trained: bool = True,
    ) -> None:
        """Adds one turn: all the tokens the model saw (`observation_T`), then what it sampled.

        `bonuses_T` are the rewards of the sampled tokens, one each. Once a turn has some, all
        segments of the episode do, 0 elsewhere. A turn that is not trained is context alone.

        Raises:
            DataError: bonuses for another number of tokens.
        """
        sampled = len(sample.tokens_T)
        if bonuses_T is None:
            bonuses_T = np.zeros(sampled, np.float32)
        else:
            self._with_bonuses = True
        if len(bonuses_T) != sampled:
            raise DataError(
                f"bonuses_T has {len(bonuses_T)} entries for {sampled} sampled tokens",
                field="bonuses_T",
            )
        seen_T = self._chains[-1].seen_T() if self._chains else np.empty(0, np.int32)
        if not self._chains or not np.array_equal(observation_T[: len(seen_T)], seen_T):
            self._chains.append(_Chain())
            seen_T = seen_T[:0]
        chain = self._chains[-1]
        new = len(observation_T) - len(seen_T)
        chain.tokens += [np.asarray(observation_T[len(seen_T) :], np.int32), sample.tokens_T]
        chain.mask += [np.zeros(new, np.bool_), np.full(sampled, trained)]
        if not trained:
            sample = replace(
                sample,
                logprobs_T=np.zeros(sampled, np.float32),
                versions_T=np.full(sampled, -1, np.int32),
            )
            bonuses_T = np.zeros(sampled, np.float32)
        chain.logprobs += [np.zeros(new, np.float32), sample.logprobs_T]
        chain.versions += [np.full(new, -1, np.int32), sample.versions_T]
        if trained:
            chain.top_ids.append(sample.top_ids_TK)
        chain.bonuses += [np.zeros(new, np.float32), np.asarray(bonuses_T, np.float32)]
        if (experts_NLK := sample.experts_NLK) is not None:
            end = len(observation_T) + sampled - 1
            chain.experts.append((end - len(experts_NLK), experts_NLK))

    def build(self) -> tuple[Segment, ...]:
        """The episode's segments, in order, but for those of which nothing is trained.

        Raises:
            DataError: as of `Segment`; no turn is trained.
        """
        if not any(chain.is_trained for chain in self._chains):
            raise DataError("no turn of the episode is trained: there is nothing to learn from")
        return tuple(self._segment(chain) for chain in self._chains if chain.is_trained)

    def _segment(self, chain: _Chain) -> Segment:
        first_T = self._chains[0].tokens[0]
        told = self._teacher_context_T is not None and chain.begins_with(first_T)
        return chain.segment(
            self._temperature,
            with_bonuses=self._with_bonuses,
            teacher_context_T=self._teacher_context_T if told else None,
            teacher_replaces=len(first_T) if told else 0,
        )
