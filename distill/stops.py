"""Stop tokens of a run: the ids at which a response ends, for all parts of the run.

A student and a teacher may end with different tokens: a base model with `<|endoftext|>`, its
instruction-tuned version with `<|im_end|>`. The decision to stop is one event nevertheless. If the
models' stop tokens differ, they are therefore one outcome of the next token: whichever is sampled,
its log-prob is that of all stop tokens together, log sum_s p_T(s), for policy, teacher and learner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import chz
import numpy as np

from distill.errors import ConfigError
from distill.lookup import known_names
from distill.settings import Section
from distill.types import TokenArray, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTokens:
    """The ids at which a response ends, sorted.

    Attributes:
        one_event: True if the ids are one outcome; otherwise each is a token like any other.
    """

    ids: tuple[int, ...]
    one_event: bool = False

    @classmethod
    def of(
        cls,
        ends: Iterable[Collection[int] | None],
        chosen: Collection[int] = (),
        *,
        vocab_size: int | None = None,
    ) -> StopTokens:
        """Stop tokens of models that end at `ends`, one entry per model; None: unknown.

        The ids are `chosen`, or else all ids at which any of the models ends. They are one event
        unless every model ends at exactly these ids.

        Args:
            vocab_size: size of the vocabulary of the model that samples. Ids beyond it, at which a
                model with a larger vocabulary ends, are left out. None: all ids are within it.
        """
        limit = float("inf") if vocab_size is None else vocab_size
        known = [each and [id_ for id_ in each if id_ < limit] for each in ends]
        ids = set(chosen) or {id_ for of_one in known for id_ in of_one or ()}
        differ = any(set(of_one) != ids for of_one in known if of_one is not None)
        unknown = bool(chosen) and None in known
        return cls(ids=tuple(sorted(ids)), one_event=len(ids) > 1 and (differ or unknown))

    @property
    def event(self) -> tuple[int, ...]:
        """The ids that form one outcome; empty if each is an outcome of its own."""
        return self.ids if self.one_event else ()

    def described(self, tokenizer: Tokenizer) -> str:
        """Text for users: the tokens, their ids, and whether they are one event."""
        names = [f"{tokenizer.convert_ids_to_tokens(id_)} ({id_})" for id_ in self.ids]
        return (", ".join(names) or "none") + (", as one event" if self.one_event else "")

    def to_json(self) -> dict[str, Any]:
        return {"ids": list(self.ids), "one_event": self.one_event}


@chz.chz
class StopSettings:
    """Settings of the tokens at which responses end."""

    section: ClassVar[Section] = Section.MODEL
    within: ClassVar[str] = "model."

    stop_tokens: str = chz.field(
        default="",
        doc="tokens that end a response, as text or ids, separated by commas; default: the end "
        "tokens of all the run's models. Written to generation_config.json in final/",
    )

    def stops(
        self,
        tokenizer: Tokenizer,
        ends: Iterable[Collection[int] | None],
        vocab_size: int,
    ) -> StopTokens:
        """The run's stop tokens; the other arguments as in `StopTokens.of`.

        Raises:
            ConfigError: an entry of `stop_tokens` is no token.
        """
        chosen = parse_stop_tokens(self.stop_tokens, tokenizer)
        return StopTokens.of(ends, chosen, vocab_size=vocab_size)


def hits(tokens_N: TokenArray, event: Collection[int]) -> np.ndarray:
    """True where a token belongs to the event, shape (N,)."""
    return np.isin(tokens_N, list(event))


def merged(event: Collection[int]) -> int:
    """Number of event tokens beyond the first: tokens that are not outcomes of their own."""
    return max(0, len(event) - 1)


def parse_stop_tokens(text: str, tokenizer: Tokenizer) -> set[int]:
    """Ids of tokens given as text or by id, separated by commas.

    Raises:
        ConfigError: an entry is no token; the message names it.
    """
    vocabulary = tokenizer.get_vocab()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = [str(token) for token in added.values() if token.special]
    ids: set[int] = set()
    for given in filter(None, (part.strip() for part in text.split(","))):
        if given.isdecimal() and int(given) < len(tokenizer):
            ids.add(int(given))
        elif given in vocabulary and not given.isdecimal():
            ids.add(vocabulary[given])
        else:
            raise ConfigError(
                f"stop_tokens={text}: {given!r} is neither a token nor an id below "
                f"{len(tokenizer)}; {known_names(given, special)}",
                field="model.stop_tokens",
            )
    if text and not ids:
        raise ConfigError(
            f"stop_tokens={text!r} contains no token; leave it out", field="model.stop_tokens"
        )
    return ids
