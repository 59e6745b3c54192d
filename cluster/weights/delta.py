"""Weights by what changed, through Ray's object store: for engines behind a slow network.

    learner   keeps what was sent last, in the engines' precision; puts into the store what differs
              now, and all of it for engines that hold something else
    engine    keeps the same copy in main memory and patches it; its model, or its server, reads
              that as it reads shared memory

Who joined, was restarted, or refused the last push gets all. Either is of the learner's copy,
whatever has become of the weights since. The copies: distill/weights/delta.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cluster.handles import calls, errors
from cluster.weights.transport import Transport
from distill.errors import EngineError, NonFiniteError
from distill.weights.delta import SentWeights, WeightDelta
from distill.weights.model_weights import Weights


class _Order(NamedTuple):
    """What an engine was last told to hold, and its acknowledgement to be."""

    engine: Any
    digest: str
    acknowledgement: Any


class DeltaSender:
    """The copy of what was sent, and who has it; of one learner, for all of its pushes."""

    def __init__(self) -> None:
        self._sent = SentWeights()
        self._orders: dict[str, _Order] = {}
        self._bytes: dict[str, int] = {}
        self._whole: set[str] = set()
        self._changed_share: float | None = None

    def send(self, engines: Mapping[str, Any], weights: Weights, version: int) -> dict[str, Any]:
        """The engines' acknowledgements to be, by name. Raises as `Transport.start`."""
        if (bad := weights.first_non_finite()) is not None:
            raise NonFiniteError(f"{bad!r} is not finite: version {version} is not pushed")
        up_to_date = [name for name, engine in engines.items() if self._holds(name, engine)]
        self._sent.advance(weights, version)
        if self._changed_share is None:  # again for engines that failed: nothing has changed since
            self._changed_share = self._sent.changed_share
        delta = self._sent.delta()
        pending: dict[str, Any] = {}
        if delta is not None:
            pending = self._load({name: engines[name] for name in up_to_date}, delta)
        others = {name: engine for name, engine in engines.items() if name not in pending}
        return pending | self.send_whole(others, version)

    def send_whole(self, engines: Mapping[str, Any], version: int) -> dict[str, Any]:
        """All of the copy, whatever the weights are by now; returns as `send`."""
        assert version == self._sent.version, "the copy is of another version"
        self._whole |= engines.keys()
        return self._load(engines, self._sent.whole())

    def _load(self, engines: Mapping[str, Any], source: WeightDelta) -> dict[str, Any]:
        if not engines:
            return {}
        reference = calls.shared(source, list(engines.values()))
        for name, engine in engines.items():
            acknowledgement = engine.load_weights.remote(reference, source.version)
            self._orders[name] = _Order(engine, source.result, acknowledgement)
            self._bytes[name] = self._bytes.get(name, 0) + source.nbytes
        return {name: self._orders[name].acknowledgement for name in engines}

    def _holds(self, name: str, engine: Any) -> bool:
        """True if the engine has acknowledged what was sent last."""
        order = self._orders.get(name)
        if order is None or order.engine != engine or order.digest != self._sent.digest:
            return False
        if not calls.wait([order.acknowledgement], timeout=0)[0]:
            return False
        try:
            calls.get(order.acknowledgement)
        except (errors.RayError, EngineError):
            return False
        return True

    def count(self) -> None:
        """Begins to count anew what is sent."""
        self._bytes, self._whole, self._changed_share = {}, set(), None

    def metrics(self, engines: Mapping[str, Any], whole_bytes: int) -> dict[str, float]:
        """What was sent since: the bytes of an engine on the mean of these, those reached otherwise
        included; how many got all; the share of values that changed."""
        sent = [self._bytes.get(name, whole_bytes) for name in engines]
        made: dict[str, float] = {"push/whole_engines": len(self._whole & engines.keys())}
        if sent:
            made["push/bytes"] = sum(sent) / len(sent)
        if self._changed_share is not None:
            made["push/changed_share"] = self._changed_share
        return made


class DeltaTransport(Transport):
    """What changed to engines that hold the weights before, all to the others."""

    copies = True

    def __init__(self, engines: Mapping[str, Any], sender: DeltaSender) -> None:
        super().__init__(engines)
        self._sender = sender

    def describe(self) -> str:
        return "what changed, by Ray's object store,"

    def start(self, weights: Weights, version: int) -> dict[str, Any]:
        return self._sender.send(self.engines, weights, version)

    def load(self, engines: Mapping[str, Any], version: int) -> dict[str, Any]:
        return self._sender.send_whole(engines, version)
