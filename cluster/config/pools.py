"""Settings of opd and rl besides the learner: engines, rollout workers, queue and weight push."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import chz

from actors.sglang.parallelism import check_hosted, check_pushed, parallelism
from cluster.config.common import ClusterSettings, ServerSettings
from distill.errors import ConfigError
from distill.records import OnStale
from distill.rules import above, at_least, not_with, only_for, readable_as, setting
from distill.settings import MAY_CHANGE, Section

# Largest number of actors of a pool. Ray supports tens of thousands of actors in a cluster.
MOST_ACTORS = 10_000
# Default number of steps between two canaries.
CANARY_STEPS = 10

Colocation = Literal["no", "share", "sleep"]
WeightsChoice = Literal["auto", "shared_memory", "disk", "group", "ipc", "adapter"]


@chz.chz
class PolicyClusterSettings(ClusterSettings):
    """Placement of a run's actors on the cluster, their resources, and their deadlines."""

    colocate: Colocation = setting(
        only_for("share", not_with("cluster.local", why="all actors are in this process")),
        only_for(
            "sleep",
            not_with(
                "engine.kind",
                "embedded",
                why="the embedded engine keeps its memory",
                remedy="use engine=sglang, or colocate=share",
            ),
        ),
        only_for(
            "sleep",
            not_with(
                "engine.on_weight_update",
                "in_place",
                why="samples under way would need the cache that sleep releases",
                remedy="use on_weight_update=continue",
            ),
        ),
        default="no",
        doc="place learner worker i and policy engine i together: they share memory, and with "
        "gpus_per_actor=0.5, a GPU. share: both stay in GPU memory; sleep: SGLang engines "
        "release GPU memory while the learner computes a step (--enable-memory-saver); with "
        "teacher.gpus=policy the teachers' engines also take turns with both",
        metadata=MAY_CHANGE,
    )

    @property
    def shares_gpus(self) -> bool:
        """True if policy engines are on the GPUs of the learner's workers, if it has any."""
        return self.colocate != "no" and self.gpus_per_actor < 1 and self.device != "cpu"

    @property
    def pair_share(self) -> float:
        """Fraction of a GPU that a learner worker and its policy engine use in turn."""
        return min(1.0, 2 * self.gpus_per_actor)

    def check_sleep(self) -> None:
        """Raise ConfigError if engines would sleep although they share no GPUs."""
        if self.colocate == "sleep" and self.device == "cuda" and self.gpus_per_actor >= 1:
            raise ConfigError(
                f"cluster.colocate=sleep with gpus_per_actor={self.gpus_per_actor:g}: engines and "
                "learner have separate GPUs, so sleep frees no memory for the other; use "
                "gpus_per_actor=0.5, or colocate=share to place them on one node"
            )


class PoolSize(NamedTuple):
    """Number of actors at the start of a pool, and the largest number that it grows to."""

    smallest: int
    largest: int

    @classmethod
    def parse(cls, text: int | str) -> PoolSize:
        """Parse a number, or a range such as 2..8.

        Raises:
            ValueError: the text is not of this form, the smallest size is below 1 or above the
                largest, or the largest is above `MOST_ACTORS`.
        """
        first, _, last = str(text).partition("..")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise ValueError("write 2, or 2..8 for a pool that grows")
        size = cls(int(first), int(last or first))
        if not 1 <= size.smallest <= size.largest:
            raise ValueError(
                "the smallest size must be at least 1, and the largest must not be "
                "below the smallest"
            )
        if size.largest > MOST_ACTORS:
            raise ValueError(f"it is at most {MOST_ACTORS}: each is an actor")
        return size

    def check_place(self, name: str, cluster: ClusterSettings) -> None:
        """Raise ConfigError if the pool grows and the run has no Ray cluster."""
        if cluster.local and self.largest > self.smallest:
            raise ConfigError(
                f"{name}={self.smallest}..{self.largest} with local=True: pools grow on a Ray "
                f"cluster only; use {name}={self.smallest}"
            )


_SIZE = readable_as("number of actors", PoolSize.parse, allows="1..2", refuses="2..1")


@chz.chz
class EnginePoolSettings(ServerSettings):
    """Engines of the policy or of the teachers, and their servers."""

    engines: int | str = setting(
        _SIZE,
        default=1,
        doc="engines (actors); several teachers have as many each. A number, or 2..8 for a pool "
        "that begins with 2 and grows up to 8 while its work is too slow",
        metadata=MAY_CHANGE,
    )

    @chz.validate
    def _engines_can_be_hosted(self) -> None:
        check_hosted(f"{self.within}server_flags", self.server_flags)

    @property
    def size(self) -> PoolSize:
        """Number of engines."""
        return PoolSize.parse(self.engines)

    def check_place(self, cluster: PolicyClusterSettings) -> None:
        """Raise ConfigError for pools or servers that the cluster cannot host."""
        self.size.check_place(f"{self.within}engines", cluster)
        if cluster.local and parallelism(self.server_flags).nodes > 1:
            raise ConfigError(
                f"{self.within}server_flags={self.server_flags} with local=True: this process is "
                "on one node; leave --nnodes or local out"
            )


@chz.chz
class PolicyPoolSettings(EnginePoolSettings):
    """The policy's engines."""

    @chz.validate
    def _weights_reach_the_servers(self) -> None:
        check_pushed("policy.server_flags", self.server_flags)

    def check_place(self, cluster: PolicyClusterSettings) -> None:
        super().check_place(cluster)
        if (nodes := parallelism(self.server_flags).nodes) > 1 and cluster.colocate != "no":
            raise ConfigError(
                f"policy.server_flags={self.server_flags} with colocate={cluster.colocate}: an "
                f"engine over {nodes} nodes cannot be placed together with a learner worker; "
                "leave colocate out",
                field="cluster.colocate",
            )

    def check_shared_gpus(self, cluster: PolicyClusterSettings, workers: int) -> None:
        """Raise ConfigError if engines with several GPUs do not match the workers' GPUs.

        `workers`: number of learner workers, which share their GPUs with the engines.
        """
        gpus = parallelism(self.server_flags).gpus
        if gpus == 1 or not cluster.shares_gpus:
            return
        engines, rest = divmod(workers, gpus)
        if rest or (cluster.gpus_per_actor, *self.size) != (0.5, engines, engines):
            remedy = f"gpus_per_actor=0.5 policy.engines={engines}"
            raise ConfigError(
                f"policy.server_flags={self.server_flags} with colocate={cluster.colocate} "
                f"learner.workers={workers}: each engine shares the GPUs of {gpus} workers; use "
                f"{f'a multiple of {gpus} workers' if rest else remedy}"
            )


def check_served(weights: WeightsChoice, served: bool) -> None:
    """Raise ConfigError for a transport that needs SGLang servers, if engines are embedded."""
    if weights in ("ipc", "adapter") and not served:
        raise ConfigError(
            f"weights={weights} needs engine=sglang: the embedded engine cannot map memory of "
            "the learner, and receives an adapter merged; use weights=auto",
            field="weights.transport",
        )


@chz.chz
class WeightsSettings:
    """Transport of new weights to the policy engines."""

    section: ClassVar[Section] = Section.ENGINES
    within: ClassVar[str] = "weights."
    main: ClassVar[str] = "transport"

    transport: WeightsChoice = setting(
        only_for(
            "group",
            not_with(
                "cluster.local",
                why="the engines are in the learner's own process",
                remedy="use weights=auto",
            ),
        ),
        default="auto",
        doc="transport of new weights to the policy engines. shared_memory: engines on the "
        "learner's node; group: engines on other nodes or GPUs, by torch.distributed (NCCL or "
        "gloo); ipc: SGLang engines on the learner workers' own GPUs (or CPUs), which map one "
        "portion at a time; disk: a directory in out/ that all nodes share; adapter: a LoRA "
        "adapter's tensors alone, which SGLang servers compute beside the base; auto: by each "
        "engine's place, an adapter merged",
        metadata=MAY_CHANGE,
    )

    def check(self, policy: PolicyPoolSettings, *, served: bool) -> None:
        """Raise ConfigError for a transport that does not reach the policy's engines.

        Args:
            served: the engines may be SGLang servers.
        """
        flags, transport = policy.server_flags, self.transport
        if (nodes := parallelism(flags).nodes) > 1 and transport in ("shared_memory", "ipc"):
            raise ConfigError(
                f"weights={transport} reaches the first of the {nodes} nodes of a policy server "
                f"(policy.server_flags={flags}); use weights=auto, which sends to every rank, or "
                "weights=disk",
                field="weights.transport",
            )
        check_served(transport, served)


@chz.chz
class RolloutSettings:
    """Rollout workers, which run environments and rewards."""

    section: ClassVar[Section] = Section.ENGINES
    within: ClassVar[str] = "rollout."

    workers: int | str = setting(
        _SIZE,
        default=1,
        doc="rollout workers (actors): a number, or 2..8 for a pool that begins with 2 and grows "
        "up to 8 while environments and rewards are too slow",
        metadata=MAY_CHANGE,
    )
    cpus: float = setting(
        at_least(0),
        not_with("cluster.local", why="this process reserves no CPUs"),
        default=0.0,
        doc="CPUs that each rollout worker reserves; 0: none reserved",
        metadata=MAY_CHANGE,
    )
    smoke_test: bool = chz.field(
        default=True,
        doc="try a custom environment or reward on the first problem before anything starts, with "
        "the `answer` (or nothing) as the response, in a separate process",
        metadata=MAY_CHANGE,
    )

    @property
    def size(self) -> PoolSize:
        """Number of workers."""
        return PoolSize.parse(self.workers)


@chz.chz
class QueueSettings:
    """Prompt groups in flight: their number, staleness and leases."""

    section: ClassVar[Section] = Section.SAMPLING
    within: ClassVar[str] = "queue."

    max_staleness: int = setting(
        at_least(0),
        default=4,
        doc="maximum staleness of a trained rollout in weight versions; 0: fully synchronous",
    )
    groups_in_flight: int | None = setting(
        at_least("data.batch_size", "a step needs all of its groups"),
        default=None,
        doc="number of groups that are sampled, finished or in training at the same time, which "
        "bounds the mean staleness; default: those of two steps (of one with max_staleness=0)",
    )
    on_stale: OnStale = chz.field(
        default="wait",
        doc="treatment of groups that would become too stale. wait: the step waits for them; "
        "train_late: they are trained beyond max_staleness; restart: those that take "
        "unusually long are restarted (at most 3 times). train_late and restart are for "
        "tools without a time limit",
    )
    lease_s: float = setting(
        above(0),
        default=900.0,
        doc="seconds without progress (of the engine, or to the next turn) after which a prompt "
        "group is also given to another worker",
        metadata=MAY_CHANGE,
    )

    def check(self, prompts_per_step: int) -> None:
        """Raise ConfigError for settings that conflict with `prompts_per_step` groups in a step."""
        most = prompts_per_step * (self.max_staleness + 1)
        given = self.groups_in_flight
        if given is not None and given > most:
            raise ConfigError(
                f"queue.groups_in_flight={given} must be at most {most}, (queue.max_staleness + 1) "
                "* prompts_per_step: additional groups would become too stale; raise max_staleness"
            )
        if self.on_stale != "wait" and self.window(prompts_per_step) == prompts_per_step:
            name = "groups_in_flight" if self.max_staleness else "max_staleness"
            raise ConfigError(
                f"queue.on_stale={self.on_stale} changes nothing with "
                f"queue.{name}={getattr(self, name)}: the next step waits for every group in "
                "flight; raise it, or leave on_stale out"
            )

    def window(self, prompts_per_step: int) -> int:
        """Largest number of groups in flight, with `prompts_per_step` groups in a step."""
        return self.groups_in_flight or prompts_per_step * min(self.max_staleness + 1, 2)


@chz.chz
class VerifySettings:
    """Checks of the scores of all parties, before and during the run."""

    section: ClassVar[Section] = Section.SUPERVISION
    within: ClassVar[str] = "verify."

    handshake: bool = chz.field(
        default=True,
        doc="False: train even if the handshake fails, so that the objective differs from the "
        "configured one; for experiments on such differences",
    )
    every: int | None = setting(
        at_least(0),
        default=None,
        doc="weight versions between two checks of each kind (docs/proof.md): policy engines "
        "hold the weights that the learner sent, by log-probs and by checksums; each "
        "teacher, reference and reward model scores fixed rows (canaries) as it did at "
        "first. 0: none; default: log-probs of every version, checksums of every version on "
        "CUDA and of every 16th on a CPU, where they cost more than a push, canaries of "
        f"every {CANARY_STEPS}th",
        metadata=MAY_CHANGE,
    )

    @property
    def canary_every(self) -> int:
        """Steps between two canaries of each frozen scorer; 0: none."""
        return CANARY_STEPS if self.every is None else self.every

    def of_pushes(self, device: str) -> tuple[int, int]:
        """Number of versions between two comparisons of log-probs, and of checksums; 0: none."""
        if self.every is not None:
            return self.every, self.every
        return 1, 1 if device.startswith("cuda") else 16
