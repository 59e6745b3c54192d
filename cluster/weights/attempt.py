"""One attempt to push weights over several transports: start each one, then collect the answers.

If every transport sends a copy (`Transport.copies`), the rest of the push does not read the
learner's weights after `Attempt.begin` has returned, and can continue while they change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.weights.gather import GatherResult, collect
from cluster.weights.transport import Transport
from distill.errors import EngineError, NonFiniteError
from distill.pace import loading_s
from distill.weights.model_weights import Weights, total_bytes


@dataclass(frozen=True, slots=True)
class Attempt:
    """A push that has been started on its transports.

    Attributes:
        started: each started transport with its pending acknowledgements, by engine name.
        failures: reason that a transport could not start, by engine name.
        nbytes: total size of the pushed tensors, bytes.
        waiting: called repeatedly while answers are outstanding.
    """

    version: int
    started: list[tuple[Transport, dict[str, Any]]]
    failures: dict[str, str]
    nbytes: int
    waiting: Callable[[], None]

    @classmethod
    def begin(
        cls,
        transports: Sequence[Transport],
        weights: Weights,
        version: int,
        waiting: Callable[[], None],
    ) -> Attempt:
        """Start the push on all transports. Transports by copy have made their copy on return.

        Raises:
            NonFiniteError: the weights hold a NaN or an infinity, with which a server would crash.
        """
        if (bad := weights.first_non_finite()) is not None:
            raise NonFiniteError(f"{bad!r} is not finite: version {version} is not pushed")
        begun = cls(version, [], {}, total_bytes(weights), waiting)
        for transport in transports:
            try:
                begun.started.append((transport, transport.start(weights, version)))
            except EngineError as error:
                transport.abort()
                begun.failures.update(dict.fromkeys(transport.engines, str(error)))
        return begun

    @property
    def allowance_s(self) -> float:
        """Seconds that loading this many bytes may take, added to the deadline of any answer."""
        return loading_s(self.nbytes)

    @property
    def needs_weights(self) -> bool:
        """True if the rest of the push, a retry included, still reads the learner's weights."""
        return bool(self.failures) or not all(each.copies for each, _ in self.started)

    def answers(self, timeout_s: float) -> GatherResult:
        """Wait for every engine, then finish or abort the push on each transport."""
        total = GatherResult(failures=dict(self.failures))
        for transport, pending in self.started:
            answers = collect(
                pending,
                timeout_s + self.allowance_s,
                linked=transport.linked,
                problem=transport.problem,
                give_up=transport.give_up,
                sent=lambda transport=transport: transport.sent,
                waiting=self.waiting,
            )
            try:
                if answers.failures or answers.problem:
                    transport.abort()
                else:
                    transport.finish()
            except EngineError as error:
                answers.problem = str(error)
            if answers.problem:
                late = pending.keys() - answers.values.keys() - answers.failures.keys()
                answers.failures |= dict.fromkeys(late, answers.problem)
            total.values |= answers.values
            total.failures |= answers.failures
            total.lost |= answers.lost
            total.problem = total.problem or answers.problem
        return total

    def again(self, engines: Mapping[str, Any], timeout_s: float) -> GatherResult:
        """Retry the load on some engines, from the copies that the transports hold."""
        assert not self.needs_weights
        pending: dict[str, Any] = {}
        for transport, _ in self.started:
            some = {name: engines[name] for name in transport.engines if name in engines}
            pending |= transport.load(some, self.version)
        return collect(pending, timeout_s + self.allowance_s, waiting=self.waiting)

    def to_others(self, transports: Sequence[Transport], timeout_s: float) -> GatherResult | None:
        """Load the existing copies into other engines.

        Args:
            transports: transports to those engines.

        Returns:
            None if no copy exists for the transport of one of them.
        """
        made = {type(transport): transport for transport, _ in self.started if transport.copies}
        if not all(type(transport) in made for transport in transports):
            return None
        pending: dict[str, Any] = {}
        for transport in transports:
            pending |= made[type(transport)].load(transport.engines, self.version)
        return collect(pending, timeout_s + self.allowance_s, waiting=self.waiting)
