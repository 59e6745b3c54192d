"""Imports without Python's garbage collector, which would cost a fifth more and free nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Context of imports: no collection meanwhile, and none afterwards of what is there by then.

    Modules live as long as the process, so their objects are left out of every later collection,
    that at the interpreter's end included.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
