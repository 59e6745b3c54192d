"""Saying which names there are where a given one is unknown."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


def known_names(name: str, known: Collection[str]) -> str:
    """The end of an error about an unknown `name`: the nearest known one, if any, and all."""
    near = get_close_matches(name, known, n=1)
    every = ", ".join(sorted(known))
    return f"did you mean {near[0]!r}? Known: {every}" if near else f"known: {every}"
