"""Local objects with the interface of Ray's actor handles."""

from types import SimpleNamespace
from typing import Any


class Handle:
    """Handle whose `handle.method.remote(...)` runs in the caller's loop."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=getattr(self._plain, method))
