"""Disk that the checkpoints of a run need, and whether `out=` has it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from cluster.config.common import CommonConfig
from distill.errors import ConfigError
from distill.gpu import readable
from learner.memory import FROZEN, estimate_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPlan:
    """Bytes of a run's checkpoints: `count` of them at most, and `final/` with weights alone.

    A checkpoint holds what the learner does but gradients, in fp32: weights, those of a teacher
    that follows, and moments.
    """

    checkpoint: int
    count: int
    final: int

    @staticmethod
    def of(config: CommonConfig) -> DiskPlan | None:
        """The plan, from the headers of the model's files; None where there are none to read."""
        estimate = estimate_memory(config.model.path)
        if estimate is None or config.only_keeps:
            return None
        held, kept = config.learner_holding, config.checkpoint
        apart = config.steps // kept.keep_every if kept.keep_every else 0
        written = 1  # the newest is complete before the oldest goes
        return DiskPlan(
            checkpoint=estimate.parameters * (held.weights + held.moments),
            count=kept.keep_last + written + apart + bool(kept.keep_best),
            final=estimate.parameters * FROZEN.weights,
        )

    @property
    def bytes(self) -> int:
        return self.checkpoint * self.count + self.final

    def require_room(self, out: Path) -> None:
        """Raise ConfigError if the file system of `out` has less room than the run needs.

        What earlier starts of the run wrote there counts as room: it is replaced.
        """
        place = next(path for path in (out, *out.parents) if path.exists())
        mine = sum(file.stat().st_size for file in out.glob("checkpoints/**/*") if file.is_file())
        free = shutil.disk_usage(place).free
        if self.bytes > free + mine:
            raise ConfigError(
                f"out={out} needs {self} and has {readable(free)} free; keep fewer "
                "(keep_last=1, keep_every=, keep_best=), train an adapter (lora.rank=), or "
                "give an out= on a larger disk",
                field="out",
            )

    def __str__(self) -> str:
        return (
            f"{readable(self.bytes)} of disk (up to {self.count} checkpoints of "
            f"{readable(self.checkpoint)}, and final/)"
        )
