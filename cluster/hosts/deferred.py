"""Actor classes without the imports of what they host.

Ray loads an actor's class in every process that a handle to it arrives in, and with a class of a
module all that the module imports: a rollout worker that only asks the embedded engine would load
torch and transformers, seconds and hundreds of megabytes of each of many.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.collector import collector_off


@dataclass(frozen=True, slots=True)
class Early:
    """A setting of a deferred class that is made before the class is imported.

    For a process that starts meanwhile; `make` must import little itself.
    """

    make: Callable[[], Any]


def deferred(plain: type) -> type:
    """A class with the public methods of `plain`, whose module is imported where one is made.

    Ray sends it by value, so its methods hold the names of module and class, never the class. A
    `plain` that no module leads to (of `__main__`, or nested) is sent by value itself: it comes
    back as it is.
    """
    module, name = plain.__module__, plain.__qualname__
    if module == "__main__" or "." in name:
        return plain

    def make(self: Any, *arguments: Any, **settings: Any) -> None:
        made = {
            n: value.make() if isinstance(value, Early) else value for n, value in settings.items()
        }
        with collector_off():
            hosted = importlib.import_module(module)
        self.plain = getattr(hosted, name)(*arguments, **made)

    methods = {
        called: _passed_on(called, inspect.iscoroutinefunction(method))
        for called, method in inspect.getmembers(plain, inspect.isfunction)
        if not called.startswith("_")
    }
    doc = f"`{module}.{name}`, in the process that hosts it."
    return type(name, (), {"__init__": make, "__doc__": doc, "__module__": module, **methods})


def _passed_on(name: str, asynchronous: bool) -> Any:
    """A method that calls the hosted object's."""

    async def awaited(self: Any, *given: Any, **named: Any) -> Any:
        return await getattr(self.plain, name)(*given, **named)

    def called(self: Any, *given: Any, **named: Any) -> Any:
        return getattr(self.plain, name)(*given, **named)

    return awaited if asynchronous else called
