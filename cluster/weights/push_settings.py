"""Settings of a run's weight pushes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.config.pools import WeightsChoice
from distill.weights.model_weights import BUCKET_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSettings:
    """Settings of the pushes to one pool of engines.

    Attributes:
        choice: the transport, or `auto`.
        served: the engines are SGLang servers.
        device: the learner's, cpu or cuda.
        directory: directory for `disk`, shared by all nodes.
        model: checkpoint that is trained.
        temperature: the run's; the probe scores at it.
        learner_dtype: compute precision of the learner; determines the probe's tolerance.
        probe_every, prove_every: versions between two that are probed, and proven; 0: none is.
        timeout_s: longest time without progress: no engine answers, nothing is sent. Engines that
            load by themselves have it, and a second for each 100 MB.
        bucket_bytes: most bytes that a group or `ipc` sends at once.
        nodes: nodes over which each engine's server is spread.
        teacher_nodes: the same for the servers of a teacher that follows the policy.
        gpus: GPUs on which an engine computes, of those that its process sees; None: all of them.
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

    def for_teachers(self) -> PushSettings:
        """Settings of pushes to the engines of a teacher that follows the policy.

        Its files are apart from the policy's, whose version may be the same. Nothing is lent to its
        engines: a worker has one bucket, which is the policy's.
        """
        return replace(
            self,
            choice="auto" if self.choice == "ipc" else self.choice,
            directory=f"{self.directory}-teacher",
            nodes=self.teacher_nodes,
            gpus=None,
        )

    def is_probed(self, version: int) -> bool:
        return _is_due(version, self.probe_every)

    def is_proven(self, version: int) -> bool:
        return _is_due(version, self.prove_every)


def _is_due(version: int, every: int) -> bool:
    return every > 0 and version % every == 0
