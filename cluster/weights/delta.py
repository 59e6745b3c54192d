"""Weight deltas through Ray's object store, for engines behind a slow network.

    learner   keeps a copy of the last sent weights in the engines' precision; stores the values
              that differ now, and the whole copy for engines that hold other weights
    engine    keeps the same copy in main memory and patches it; its model or server reads that
              copy as it reads shared memory

An engine that joined, was restarted, or refused the last push receives the whole copy. Deltas and
whole copies are both made from the learner's copy, so the weights may change meanwhile. The copies
are implemented in distill/weights/delta.py.
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
    """Last load request to an engine: digest of the weights, and the pending acknowledgement."""

    engine: Any
    digest: str
    acknowledgement: Any


class DeltaSender:
    """Copy of the last sent weights and the engines that hold it, for all pushes of a learner."""

    def __init__(self) -> None:
        self._sent = SentWeights()
        self._orders: dict[str, _Order] = {}
        self._bytes: dict[str, int] = {}
        self._whole: set[str] = set()
        self._changed_share: float | None = None

    def send(self, engines: Mapping[str, Any], weights: Weights, version: int) -> dict[str, Any]:
        """Send `weights`, as a delta where possible.

        Returns:
            The engines' pending acknowledgements, by name.

        Raises:
            As `Transport.start`.
        """
        if (bad := weights.first_non_finite()) is not None:
            raise NonFiniteError(f"{bad!r} is not finite: version {version} is not pushed")
        up_to_date = [name for name, engine in engines.items() if self._holds(name, engine)]
        self._sent.advance(weights, version)
        if self._changed_share is None:  # set already in a retry, where nothing changed
            self._changed_share = self._sent.changed_share
        delta = self._sent.delta()
        pending: dict[str, Any] = {}
        if delta is not None:
            pending = self._load({name: engines[name] for name in up_to_date}, delta)
        others = {name: engine for name, engine in engines.items() if name not in pending}
        return pending | self.send_whole(others, version)

    def send_whole(self, engines: Mapping[str, Any], version: int) -> dict[str, Any]:
        """Send the whole copy, even if the weights have changed since. Returns as `send`."""
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
        """Reset the counters behind `metrics`."""
        self._bytes, self._whole, self._changed_share = {}, set(), None

    def metrics(self, engines: Mapping[str, Any], whole_bytes: int) -> dict[str, float]:
        """Metrics since the last `count`.

        Args:
            engines: all engines of the push, those reached by other transports included.
            whole_bytes: bytes counted for an engine that was reached by another transport.

        Returns:
            Mean bytes per engine, number of engines that received the whole copy, and the share of
            values that changed.
        """
        sent = [self._bytes.get(name, whole_bytes) for name in engines]
        made: dict[str, float] = {"push/whole_engines": len(self._whole & engines.keys())}
        if sent:
            made["push/bytes"] = sum(sent) / len(sent)
        if self._changed_share is not None:
            made["push/changed_share"] = self._changed_share
        return made


class DeltaTransport(Transport):
    """Sends a delta to engines that hold the previous weights, and the whole copy to the others."""

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
