"""Python's garbage collector: off during imports, and rarer afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# New containers after which the collector looks for unreachable cycles among them. A step of short
# answers makes Python's own 700 many times over, and leaves hardly a cycle.
_COLLECT_AFTER = 20_000


@contextmanager
def collector_off() -> Iterator[None]:
    """Context of imports, which would cost a fifth more with the collector, and free nothing.

    Modules live as long as the process, so their objects are left out of every later collection,
    that at the interpreter's end included.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(_COLLECT_AFTER)
        gc.enable()
