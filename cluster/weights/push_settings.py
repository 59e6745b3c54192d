"""Settings of a run's pushes, and the ways to engines that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.config.pools import WeightsChoice
from cluster.weights.transport import Transport
from cluster.weights.transports import choose_transports
from distill.weights.lending import LenderPlace
from distill.weights.model_weights import BUCKET_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSettings:
    """Settings of a run's pushes. `choose_transports` explains most of it.

    Attributes:
        temperature: the run's; the probe scores at it.
        learner_dtype: what the learner computes in; how far it may be from an engine.
        probe_every, prove_every: versions between two that are probed, and proven; 0: none is.
        bucket_bytes: most that a collective sends at once.
        timeout_s: longest that a push may not get on: no engine answers, nothing is sent. Engines
            that load by themselves have it, and a second for each 100 MB.
    """

    choice: WeightsChoice
    served: bool
    device: str
    directory: str
    model: str
    temperature: float
    learner_dtype: str
    probe_every: int
    prove_every: int
    timeout_s: float
    bucket_bytes: int = BUCKET_BYTES
    nodes: int = 1
    teacher_nodes: int = 1
    gpus: int | None = None

    def ways_to(
        self, engines: Mapping[str, Any], lenders: Sequence[LenderPlace]
    ) -> list[Transport]:
        """Transports to policy engines; raises as `choose_transports`."""
        if not engines:
            return []
        return choose_transports(
            self.choice,
            engines,
            served=self.served,
            device=self.device,
            directory=self.directory,
            model=self.model,
            timeout_s=self.timeout_s,
            bucket_bytes=self.bucket_bytes,
            nodes=self.nodes,
            gpus=self.gpus,
            lenders=lenders or [LenderPlace.own(self.device)],
        )

    def ways_to_teachers(self, engines: Mapping[str, Any]) -> list[Transport]:
        """Transports to teacher engines; their files are apart from the policy's versions.

        Nothing is lent them: a worker has one bucket, which is the policy's. Raises as `ways_to`.
        """
        if not engines:
            return []
        return choose_transports(
            "auto" if self.choice == "ipc" else self.choice,
            engines,
            served=self.served,
            device=self.device,
            directory=f"{self.directory}-teacher",
            model=self.model,
            timeout_s=self.timeout_s,
            bucket_bytes=self.bucket_bytes,
            nodes=self.teacher_nodes,
        )

    def is_probed(self, version: int) -> bool:
        return _is_due(version, self.probe_every)

    def is_proven(self, version: int) -> bool:
        return _is_due(version, self.prove_every)


def _is_due(version: int, every: int) -> bool:
    return every > 0 and version % every == 0
