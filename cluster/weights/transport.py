"""Base of the ways by which weights reach engines; the protocol is the publisher's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from distill.weights.model_weights import Weights


class Transport(ABC):
    """The learner's end of one way to some engines: Ray handles, by the name to call them.

    `linked` engines receive together: one that fails keeps the others waiting.

    With `copies`, `start` leaves a copy of the weights, which lasts until the next one: engines
    load from that, whatever has become of the weights.
    """

    linked: ClassVar[bool] = False
    copies: ClassVar[bool] = False

    def __init__(self, engines: Mapping[str, Any]) -> None:
        self.engines = engines
        self._source: Any = None

    @abstractmethod
    def describe(self) -> str: ...

    @abstractmethod
    def start(self, weights: Weights, version: int) -> dict[str, Any]:
        """Starts a push; returns by engine a Ray reference to its pause in seconds."""

    def problem(self) -> str | None:
        """Failure on this side meanwhile, if any."""
        return None

    @property
    def sent(self) -> int:
        """A count that moves while this side sends; 0 where engines fetch by themselves."""
        return 0

    def give_up(self) -> None:  # noqa: B027 - most have nothing under way
        """Called when one of several linked engines has failed: has the others come out."""

    def finish(self) -> None:  # noqa: B027 - most have nothing to finish
        """Called when every engine has acknowledged."""

    def abort(self) -> None:  # noqa: B027 - nor to undo
        """Called when the push failed."""

    def share(self, source: Any, version: int) -> dict[str, Any]:
        """Has every engine load the weights from a source that each can read."""
        self._source = source
        return self.load(self.engines, version)

    def load(self, engines: Mapping[str, Any], version: int) -> dict[str, Any]:
        """Has engines, others than its own too, load what was shared last."""
        assert self._source is not None, "nothing is shared"
        return {
            name: engine.load_weights.remote(self._source, version)
            for name, engine in engines.items()
        }
