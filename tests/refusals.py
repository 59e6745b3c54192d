"""Assertions on the class and the field of errors that users see."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from distill.errors import IsothermError


@contextmanager
def refuses(
    error: type[IsothermError], field: str | None, *, names: str = ""
) -> Iterator[pytest.ExceptionInfo[IsothermError]]:
    """Assert that the block raises `error` about `field`.

    `names` is a datum in its message, such as a file and a line.
    """
    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.field == field
    assert names in str(caught.value)
