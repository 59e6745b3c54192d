"""Disk space that the checkpoints of a run need, and a check that `out=` has it."""

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
    """Bytes of a run's checkpoints: at most `count` checkpoints, and `final/`, which has weights.

    A checkpoint has the learner's fp32 tensors except gradients: weights, those of an EMA or lagged
    teacher, and moments.
    """

    checkpoint: int
    count: int
    final: int

    @staticmethod
    def of(config: CommonConfig) -> DiskPlan | None:
        """Plan from the headers of the model's files; None if there are no files to read."""
        estimate = estimate_memory(config.model.path)
        if estimate is None or config.only_keeps:
            return None
        held, kept = config.learner_holding, config.checkpoint
        apart = config.steps // kept.keep_every if kept.keep_every else 0
        written = 1  # the oldest is deleted after the newest is complete
        return DiskPlan(
            checkpoint=estimate.parameters * (held.weights + held.moments),
            count=max(kept.keep_last, config.replayed_checkpoints)
            + written
            + apart
            + bool(kept.keep_best),
            final=estimate.parameters * FROZEN.weights,
        )

    @property
    def bytes(self) -> int:
        return self.checkpoint * self.count + self.final

    def require_room(self, out: Path) -> None:
        """Raise ConfigError if the file system of `out` has less room than the run needs.

        Existing checkpoints of the run count as free space, because they are replaced.
        """
        place = next(path for path in (out, *out.parents) if path.exists())
        mine = sum(file.stat().st_size for file in out.glob("checkpoints/**/*") if file.is_file())
        free = shutil.disk_usage(place).free
        if self.bytes > free + mine:
            raise ConfigError(
                f"out={out} needs {self} and has {readable(free)} free; keep fewer (keep_last=1, "
                "keep_every=, keep_best=, keep=), train an adapter (lora.rank=), or give an out= "
                "on a larger disk"
            )

    def __str__(self) -> str:
        return (
            f"{readable(self.bytes)} of disk (up to {self.count} checkpoints of "
            f"{readable(self.checkpoint)}, and final/)"
        )
