"""Settings of what a run writes: files, checkpoints, trackers."""

from __future__ import annotations

import os
from collections.abc import Collection
from difflib import get_close_matches
from typing import ClassVar, Literal

import chz

from actors.sglang.address import is_url, names_user, split_address
from cluster.config.early_checks import WRITTEN_DIRECTORY
from distill.errors import ConfigError
from distill.lookup import known_names
from distill.rules import at_least, multiple_of, needs, not_with, setting
from distill.settings import ESSENTIAL, FUNCTION, MAY_CHANGE, Section, section_field

# Trackers for track=; each is an extra of the package with the same name.
TRACKERS = ("wandb", "tensorboard", "mlflow")
_NO_CHECKPOINTS = not_with("rollout_only", why="without a learner there are no checkpoints")
WandbMode = Literal["off", "offline", "online"]


@chz.chz
class CheckpointSettings:
    """Intervals between a run's checkpoints, and rules for keeping them."""

    section: ClassVar[Section] = Section.OUTPUT
    within: ClassVar[str] = "checkpoint."

    every: int = setting(
        at_least(1), default=10, doc="steps between checkpoints", metadata=MAY_CHANGE
    )
    keep_last: int = setting(
        at_least(1),
        _NO_CHECKPOINTS,
        default=2,
        doc="number of newest checkpoints that are kept",
        metadata=MAY_CHANGE,
    )
    keep_every: int = setting(
        at_least(0),
        multiple_of("checkpoint.every", "no other steps have checkpoints"),
        _NO_CHECKPOINTS,
        default=0,
        doc="also keep the checkpoints of steps that are multiples of this, itself a multiple of "
        "checkpoint.every; 0: none",
        metadata=MAY_CHANGE,
    )
    keep_best: str | None = setting(
        needs("eval.every", remedy="give eval.every="),
        default=None,
        doc="also keep the checkpoint of the best evaluation (eval.every=) by this metric, for "
        "example eval/accuracy; it is saved at that step. Smaller is better for kl, nll and loss, "
        "larger for all others",
        metadata=MAY_CHANGE,
    )

    def check_measured(self, family: str, known: Collection[str], *, own: bool) -> None:
        """Check `keep_best` before the run, as far as the metrics of its evaluations are known.

        Args:
            family: prefix of the metrics of the run's evaluations: eval/ or validation/.
            known: metrics of that family that the run measures.
            own: an environment may measure more, under names that are known only in the run.

        Raises:
            ConfigError: the run will not measure the metric.
        """
        metric = self.keep_best
        if metric is None or metric in known:
            return
        names, bare = [name.removeprefix(family) for name in known], metric.removeprefix(family)
        near = get_close_matches(bare, names, n=1, cutoff=0.5)
        if near or not own or not metric.startswith(family):
            more = ", and metrics of your own code" if own else ""
            raise ConfigError(
                f"checkpoint.keep_best={metric} is not a metric of this run's evaluations; "
                f"{known_names(family + bare, known)}{more}"
            )


@chz.chz
class TrackingSettings:
    """Trackers and notifications of a run."""

    section: ClassVar[Section] = Section.OUTPUT
    within: ClassVar[str] = "tracking."

    track: str = chz.field(
        default="",
        doc=f"trackers that receive the metrics too: {', '.join(TRACKERS)}, separated by commas "
        "(docs/tracking.md)",
        metadata=MAY_CHANGE,
    )
    wandb: WandbMode = chz.field(
        default="off",
        doc="Weights & Biases, as track=wandb, and its mode; offline needs no network",
        metadata=MAY_CHANGE,
    )
    notify: str | None = chz.field(
        default=None,
        doc="receiver of the run's findings and of a report when it ends: a URL that receives "
        "JSON by POST, or package.module:function, called with the same content as a dict",
        metadata=MAY_CHANGE | FUNCTION,
    )

    @chz.validate
    def _notify_is_an_address_or_a_function(self) -> None:
        if self.notify is None:
            return
        if names_user(self.notify):  # before the address is printed anywhere
            raise ConfigError(
                "tracking.notify= contains a user or a password, which would be written to "
                "config.json; give package.module:function, which can read them from the "
                "environment"
            )
        if is_url(self.notify) and split_address(self.notify) is None:
            raise ConfigError(f"tracking.notify={self.notify} has no host; give https://HOST/PATH")
        if ":" not in self.notify:
            raise ConfigError(
                f"tracking.notify={self.notify} is neither a URL (https://...) nor "
                "package.module:function"
            )

    @chz.validate
    def _trackers_are_known(self) -> None:
        for name in self.trackers:
            if name not in TRACKERS:
                raise ConfigError(
                    f"tracking.track={self.track}: {name!r} is not a tracker; "
                    f"{known_names(name, TRACKERS)}"
                )

    @property
    def trackers(self) -> list[str]:
        """Names of the run's trackers, without duplicates."""
        named = [name.strip() for name in self.track.split(",")] if self.track else []
        return list(dict.fromkeys(named + ["wandb"] * (self.wandb != "off")))

    @property
    def wandb_mode(self) -> str:
        """Mode of W&B: that of wandb=, else of WANDB_MODE, else online."""
        return self.wandb if self.wandb != "off" else os.environ.get("WANDB_MODE", "online")


@chz.chz
class OutputSettings:
    """Output directory of a run, its checkpoints and trackers, and dry runs."""

    section: ClassVar[Section] = Section.OUTPUT

    out: str = chz.field(
        doc="directory of the run's files; it holds one run, which the same command resumes",
        metadata=ESSENTIAL | MAY_CHANGE | WRITTEN_DIRECTORY,
    )
    checkpoint: CheckpointSettings = section_field(CheckpointSettings)
    tracking: TrackingSettings = section_field(TrackingSettings)
    dry_run: bool | Literal["rehearse"] = chz.field(
        default=False,
        doc="check everything and print the plan, but start nothing; rehearse (opd, rl): run in "
        "small, with random twins of the models, a death of every kind of actor, a resume and an "
        "evaluation, and report what works and what to expect at full size (docs/forecast.md)",
        metadata=ESSENTIAL | MAY_CHANGE,
    )

    @property
    def only_plans(self) -> bool:
        """True if the run checks everything, prints its plan, and starts nothing."""
        return self.dry_run is True

    @property
    def rehearses(self) -> bool:
        """True if a small version of the run is run instead."""
        return self.dry_run == "rehearse"

    @property
    def only_keeps(self) -> bool:
        """True if the run only samples and stores groups, without training (rollout_only=True)."""
        return False

    @property
    def replayed_checkpoints(self) -> int:
        """Largest number of checkpoints that replays of the kept steps (keep=N) begin from."""
        return 0
