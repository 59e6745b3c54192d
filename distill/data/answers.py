"""Reference answers of rows, as text for rewards to compare responses with."""

from __future__ import annotations

from decimal import Decimal

import numpy as np

from distill.errors import DataError


def answer_text(value: object) -> str | None:
    """A row's `answer` as text; None if the row has none.

    Numbers are written in plain decimal notation: 72.0 (a whole number in a column with gaps) is
    "72" and 1e-05 is "0.00001".

    Raises:
        DataError: the value is blank, not finite, or neither a string nor a number.
    """
    if value is None:
        return None
    if isinstance(value, str):
        if not value.strip():
            raise DataError(
                f"`answer` is blank ({value!r}), so all responses or none would be right; give "
                "the answer, or leave the field out",
                field="answer",
            )
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | float | np.number | Decimal):
        raise DataError(
            f"`answer` must be a string or a number, got {repr(value)[:80]}; write it as text",
            field="answer",
        )
    number = Decimal(str(value))
    if not number.is_finite():
        raise DataError(
            f"`answer` must be finite, got {value}; write a number, or text", field="answer"
        )
    text = format(number, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return text if number else "0"
