"""Settings of `python -m examples.opd_vs_rl`."""

from __future__ import annotations

import chz

from cluster.config.early_checks import WRITTEN_DIRECTORY
from distill.errors import ConfigError


@chz.chz
class OpdVsRlConfig:
    """Measures how many times OPD's optimizer steps RL takes, by the length of the answer."""

    out: str = chz.field(
        doc="directory for data, models and runs; the same command continues in it",
        metadata=WRITTEN_DIRECTORY,
    )
    temperature: float = chz.field(default=0.7, doc="rollout temperature T")
    lengths: tuple[int, ...] = chz.field(
        default=(4, 16, 48, 128), doc="tokens of an answer, ascending, multiples of 4"
    )
    seeds: int = chz.field(
        default=3, doc="runs of each method at the shortest and the longest; one between them"
    )
    steps: int | None = chz.field(
        default=None, doc="most optimizer steps per run, for a quick look"
    )
    sft_steps: int = chz.field(
        default=500,
        doc="optimizer steps of SFT on single sums; the number on chains follows from it",
    )
    seed: int = chz.field(default=0, doc="seed of problems, models and the first run")

    @chz.validate
    def _in_range(self) -> None:
        for name in ("seeds", "sft_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1", field=name)
        given = ",".join(map(str, self.lengths))
        ascending = sorted(set(self.lengths)) == list(self.lengths)
        if not self.lengths or not ascending or any(n < 1 or n % 4 for n in self.lengths):
            raise ConfigError(
                f"lengths={given} must be multiples of 4 (the tokens of a link), ascending: "
                "lengths=4,16,48,128",
                field="lengths",
            )
