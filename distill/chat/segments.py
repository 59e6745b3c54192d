"""Segment builder: each turn extends the chain that is its prefix, or begins a new chain."""

from __future__ import annotations

import numpy as np

from distill.engine import Sample
from distill.errors import DataError
from distill.privileged import check_context
from distill.routing import ExpertArray, merged_experts
from distill.types import FloatArray, Segment, TokenArray


class _Chain:
    """Tokens of one segment so far, and its trained turns with the positions of their samples."""

    def __init__(self) -> None:
        self.tokens: list[TokenArray] = []
        self.length = 0
        self.trained: list[tuple[int, Sample, FloatArray | None]] = []
        self.experts: list[tuple[int, ExpertArray]] = []  # (position of the first entry, experts)

    def seen_T(self) -> TokenArray:
        return np.concatenate(self.tokens, dtype=np.int32)

    def append(
        self, new_T: TokenArray, sample: Sample, bonuses_T: FloatArray | None, trained: bool
    ) -> None:
        self.tokens += [new_T, sample.tokens_T]
        start = self.length + len(new_T)
        self.length = start + len(sample.tokens_T)
        if trained:
            self.trained.append((start, sample, bonuses_T))
        if (experts_NLK := sample.experts_NLK) is not None:
            self.experts.append((self.length - 1 - len(experts_NLK), experts_NLK))

    def is_prefix_of(self, observation_T: TokenArray) -> bool:
        return self.length <= len(observation_T) and np.array_equal(
            observation_T[: self.length], self.seen_T()
        )

    def begins_with(self, observation_T: TokenArray) -> bool:
        """True if `observation_T` is a prefix of the chain's first observation."""
        return np.array_equal(self.tokens[0][: len(observation_T)], observation_T)

    def segment(
        self,
        temperature: float,
        *,
        with_bonuses: bool,
        teacher_context_T: TokenArray | None,
        teacher_replaces: int,
    ) -> Segment:
        mask_T = np.zeros(self.length, np.bool_)
        logprobs_T = np.zeros(self.length, np.float32)
        versions_T = np.full(self.length, -1, np.int32)
        bonuses_T = np.zeros(self.length, np.float32) if with_bonuses else None
        for start, sample, paid_T in self.trained:
            sampled = slice(start, start + len(sample.tokens_T))
            mask_T[sampled] = True
            logprobs_T[sampled] = sample.logprobs_T
            versions_T[sampled] = sample.versions_T
            if bonuses_T is not None and paid_T is not None:
                bonuses_T[sampled] = paid_T
        return Segment(
            tokens_T=self.seen_T(),
            action_mask_T=mask_T,
            behaviour_logprobs_T=logprobs_T,
            versions_T=versions_T,
            temperature=temperature,
            first_action=self.trained[0][0],
            policy_top_ids_NK=self._top_ids_NK(),
            teacher_context_T=teacher_context_T,
            teacher_replaces=teacher_replaces,
            bonuses_T=bonuses_T,
            experts_TLK=merged_experts(self.length, self.experts),
        )

    def _top_ids_NK(self) -> TokenArray | None:
        known = [ids for _, sample, _ in self.trained if (ids := sample.top_ids_TK) is not None]
        return np.concatenate(known) if known and len(known) == len(self.trained) else None


class SegmentBuilder:
    """Builder of the segments of one episode. Sampled tokens are never re-encoded.

    Args:
        temperature: the T at which the turns were sampled.
        teacher_context_T: tokens that the teacher sees in place of the episode's first observation,
            in every segment that begins with that observation. In other segments, whose history was
            condensed or rewritten, the teacher sees the policy's tokens.
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
        """Add one turn. It extends the longest segment that is a prefix of the observation.

        Args:
            observation_T: all tokens that the model saw.
            sample: the tokens that it sampled.
            bonuses_T: rewards of the sampled tokens; None: none. If one turn has bonuses, all
                segments of the episode have them, 0 elsewhere.
            trained: False for a turn that is only context.

        Raises:
            DataError: the number of log-probs, versions or bonuses differs from that of the tokens,
                or the observation is empty.
        """
        self._with_bonuses = self._with_bonuses or bonuses_T is not None
        sampled = len(sample.tokens_T)
        for name, values_T in (
            ("logprobs_T", sample.logprobs_T),
            ("versions_T", sample.versions_T),
            ("bonuses_T", bonuses_T),
        ):
            if values_T is not None and len(values_T) != sampled:
                raise DataError(
                    f"{name} has {len(values_T)} entries for {sampled} sampled tokens", field=name
                )
        if len(observation_T) == 0:
            raise DataError(
                "observation_T is empty: the first sampled token has no context",
                field="observation_T",
            )
        extended = [chain for chain in self._chains if chain.is_prefix_of(observation_T)]
        if extended:
            chain = max(extended, key=lambda chain: chain.length)
        else:
            chain = _Chain()
            self._chains.append(chain)
        new_T = np.asarray(observation_T[chain.length :], np.int32)
        chain.append(new_T, sample, bonuses_T, trained)

    def build(self) -> tuple[Segment, ...]:
        """Segments of the episode, in order, except those without a trained turn.

        Raises:
            DataError: no turn is trained, or the teacher's context is empty.
        """
        segments = tuple(self._segment(chain) for chain in self._chains if chain.trained)
        if not segments:
            raise DataError("no turn of the episode is trained: there is nothing to learn from")
        return segments

    def _segment(self, chain: _Chain) -> Segment:
        context_T = self._teacher_context_T
        first_T = self._chains[0].tokens[0]
        if context_T is not None and not chain.begins_with(first_T):
            context_T = None
        replaces = 0 if context_T is None else len(first_T)
        segment = chain.segment(
            self._temperature,
            with_bonuses=self._with_bonuses,
            teacher_context_T=context_T,
            teacher_replaces=replaces,
        )
        check_context(context_T, replaces, segment.first_action, "teacher_replaces")
        return segment
