"""Memory of a process that trains or serves: Python's collector, and malloc."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from distill.main_memory import keep_freed_memory

# New containers after which the collector looks for unreachable cycles among them. A step of short
# answers makes Python's own 700 many times over, and leaves hardly a cycle.
_COLLECT_AFTER = 20_000


@contextmanager
def long_lived() -> Iterator[None]:
    """Context of the imports of a process that trains or serves; prepares it for what follows.

    The collector is off during them: they would cost a fifth more with it, and free nothing.
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
        keep_freed_memory()
