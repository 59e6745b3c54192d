"""Fields of the rows of supervised examples and preference pairs, checked without a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distill.data.columns import fields_of, refuse_misspelt, with_chats
from distill.errors import DataError

# Fields of each form of an example; the first field is the name of the form.
_FORMS = (("prompt", "completion"), ("messages",), ("tokens", "loss_mask"))
EXAMPLE_FIELDS = frozenset({"tools", "tokenizer"}.union(*_FORMS))
# The responses of a pair.
SIDES = ("chosen", "rejected")
PAIR_FIELDS = frozenset((*SIDES, "prompt", "messages", "tools"))


def check_example(example: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Check the names of the fields of a supervised example (`distill.data.sft_rows`).

    Returns:
        The name of the example's form, `prompt`, `messages` or `tokens`, and the result of
        `with_chats`.

    Raises:
        DataError: a field is misspelt, or the fields match no form or several.
    """
    refuse_misspelt(example, EXAMPLE_FIELDS)
    example = with_chats(example)
    return _form_of(example), example


def _form_of(example: Mapping[str, Any]) -> str:
    """Name of the form of an example: `prompt`, `messages` or `tokens`."""
    given: dict[str, str] = {}
    for fields in _FORMS:
        for name in fields:
            if example.get(name) is not None:
                given.setdefault(fields[0], name)
    if given.get("prompt") == "completion" and "messages" in given:
        del given["prompt"]  # the completion answers the messages
    if len(given) == 1:
        if given.get("prompt") == "prompt" and example.get("completion") is None:
            raise _missing("completion", example)
        return next(iter(given))
    problem = " and ".join(f"`{name}`" for name in given.values()) or "the row has no example"
    found = "" if given else f"; {fields_of(example)}, and columns.prompt= and so on rename columns"
    raise DataError(
        f"{problem}: give either `prompt` and `completion` (strings), `messages` (chat format), or "
        f"`tokens` and `loss_mask` (token ids){found}"
    )


def check_pair(row: Mapping[str, Any]) -> None:
    """Check the names of the fields of a preference pair (`distill.data.preferences`).

    Raises:
        DataError: a field is misspelt, or one of the two responses is missing.
    """
    refuse_misspelt(row, PAIR_FIELDS)
    for side in SIDES:
        if row.get(side) is None:
            raise _missing(side, row)


def _missing(field: str, row: Mapping[str, Any]) -> DataError:
    return DataError(
        f"`{field}` is missing; {fields_of(row)}; give its column with columns.{field}=",
        field=field,
    )
