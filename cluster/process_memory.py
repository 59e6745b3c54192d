"""Settings of garbage collection and malloc for a process that trains or serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from distill.main_memory import keep_freed_memory

# Allocations after which garbage collection runs. A step of short answers reaches Python's default
# of 700 many times, and creates hardly any cycles.
_COLLECT_AFTER = 20_000


@contextmanager
def long_lived() -> Iterator[None]:
    """Context manager for the imports of a process that trains or serves.

    Garbage collection is disabled during the imports, which would otherwise take a fifth longer.
    Modules live as long as the process, so their objects are excluded from all later collections,
    including the one at the interpreter's exit.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(_COLLECT_AFTER)
        gc.enable()
        keep_freed_memory()
