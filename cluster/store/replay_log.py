"""Replay log of a run, in out/groups: the groups and the results of steps.

    out/groups/step-000012.arrow     groups that the step took (cluster/store/group_format.py),
                                     written before the step
    out/groups/step-000012.json      metrics and fingerprints of gradient and weights, written after
                                     the step

The newest `keep` steps are kept, and steps that did not end because a value was not finite.
Fingerprints of several workers' shards are merged into fingerprints of whole tensors
(learner/sharding.py).

A run with rollout_only=True keeps only the groups, of all its steps, and in addition:

    out/kept/step-000012/            mark of the newest step: a checkpoint without weights. Groups
                                     of later steps were scored wrongly, or are incomplete
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.config.run_record import KEPT
from cluster.jsonl_log import read_object
from cluster.store.group_format import UNWRITABLE, StoredGroups, read_groups, write_groups
from cluster.store.group_store import GROUPS
from distill.durable_files import write_whole
from distill.errors import ConfigError
from distill.objective.whole_groups import LocalGroups
from distill.records import Fetched, StepGroups, TrainedGroups, TrajectoryId
from distill.types import TrajectoryGroup
from learner.checkpoint import Checkpoint, CheckpointStore

if TYPE_CHECKING:
    from distill.weights.model_weights import Weights
    from learner.sharding import Fingerprints

logger = logging.getLogger(__name__)

# Fields of a step's choice that are kept with its groups: plain fields, and mappings by group id.
_CHOICE = ("overdue", "restarts", "start_max")
_BY_ID = ("set_aside", "replaced")
_NAME = re.compile(r"step-(\d{6,})\.(arrow|json)$")


class ReplayLog:
    """Keeps the newest `keep` steps of a run for replay. A `learner.loop.StepRecorder`."""

    def __init__(self, out: Path, keep: int) -> None:
        self._root, self._keep = out / GROUPS, keep
        self._failed = False

    def taken(self, step: int, taken: StepGroups, groups_P: Sequence[TrajectoryGroup]) -> None:
        """Write the data that `step` is about to train on; `groups_P` are its whole groups."""
        with self._warn_on_error(step):
            # Results of an earlier attempt at this step.
            _path(self._root, step, "json").unlink(missing_ok=True)
            write_step(self._root, step, taken, groups_P)

    def trained(
        self, step: int, metrics: Mapping[str, float], prints: Fingerprints, workers: int
    ) -> None:
        outcome = {"step": step, "metrics": dict(metrics), "workers": workers, **prints}
        with self._warn_on_error(step):
            write_whole(_path(self._root, step, "json"), json.dumps(outcome).encode())
            self._drop(step)

    @contextmanager
    def _warn_on_error(self, step: int) -> Iterator[None]:
        """Report the first OSError, such as a full disk; training continues without the replay."""
        try:
            yield
        except UNWRITABLE as error:
            if not self._failed:
                self._failed = True
                logger.warning("step %d and others cannot be replayed: %s", step, error)

    def _drop(self, newest: int) -> None:
        """Delete steps that have left the window, except those that did not end."""
        for step in steps_in(self._root):
            if step <= newest - self._keep and _path(self._root, step, "json").exists():
                for kind in ("arrow", "json"):
                    _path(self._root, step, kind).unlink()


class KeptSteps:
    """Steps that a run has kept for replay."""

    def __init__(self, out: Path) -> None:
        self._root = out / GROUPS
        self._store = CheckpointStore(out / "checkpoints", keep=1 << 30)
        self.steps = steps_in(self._root)
        if (marks := out / KEPT).is_dir():
            made = max((each.step for each in CheckpointStore(marks, 1).complete()), default=0)
            self.steps = [step for step in self.steps if step <= made]

    def start_of(self, step: int) -> Checkpoint | None:
        """Newest checkpoint from which `step` can be replayed; None for the run's beginning.

        Raises:
            ConfigError: the step, or a step between, is not kept. The message lists the steps that
                can be replayed.
        """
        checkpoints = {each.step: each for each in self._store.complete()}
        starts = {0: None, **checkpoints}

        def start(of: int) -> int | None:
            found = [
                at for at in starts if at < of and set(range(at + 1, of + 1)) <= set(self.steps)
            ]
            return max(found, default=None)

        if (at := start(step)) is not None:
            return starts[at]
        can = ", ".join(str(each) for each in self.steps if start(each) is not None)
        raise ConfigError(
            f"step={step} cannot be replayed: it, or a step between it and the checkpoint before "
            f"it, is not kept. {f'Steps that can: {can}' if can else 'No step can'}; a run with "
            "keep=N keeps its newest N steps"
        )

    def groups(self, step: int) -> list[TrajectoryGroup]:
        return self._read(step).groups_P

    def taken(self, step: int, source: LocalGroups) -> StepGroups:
        """Data that `step` trained on, registered with `source`."""
        groups_P, _, choice = self._read(step)
        for name in _BY_ID:
            choice[name] = {int(group_id): value for group_id, value in choice[name].items()}
        return source.taken(groups_P, **choice)

    def _read(self, step: int) -> StoredGroups:
        return read_groups(_path(self._root, step, "arrow"), "sample these groups again")

    def outcome(self, step: int) -> dict[str, Any] | None:
        """Metrics and fingerprints after `step`; None if the step did not end."""
        return read_object(_path(self._root, step, "json"))


class KeptGroupSource(LocalGroups):
    """`GroupSource` that returns the groups of kept steps, one step after another.

    Each of the learner's workers has its own source. The leader's is called with `take`; a
    follower's reads further steps until it has the requested trajectories.
    """

    def __init__(self, kept: KeptSteps, steps: Sequence[int]) -> None:
        super().__init__()
        self._kept, self._steps = kept, list(steps)

    def take(self, trained: TrainedGroups) -> StepGroups:
        return self._kept.taken(self._steps.pop(0), self)

    def trajectories(self, places: Sequence[TrajectoryId], ahead: bool = False) -> Fetched:
        while not all(place.group_id in self for place in places):
            self._kept.taken(self._steps.pop(0), self)
        return super().trajectories(places)


def push_nowhere(_weights: Weights, _version: int, _trained: TrainedGroups) -> dict[str, float]:
    """No-op `Publish` of a learner without engines."""
    return {}


def write_step(
    root: Path, step: int, taken: StepGroups, groups_P: Sequence[TrajectoryGroup]
) -> None:
    """Write the data of `step` atomically; `groups_P` are its whole groups.

    Raises:
        OSError: for example, the disk is full.
    """
    choice = {name: getattr(taken, name) for name in _CHOICE}
    choice |= {name: dict(getattr(taken, name)) for name in _BY_ID}
    write_groups(_path(root, step, "arrow"), groups_P, choice)


def drop_groups_after(root: Path, step: int) -> None:
    """Delete the groups of steps after `step`, which are sampled again."""
    for later in steps_in(root):
        if later > step:
            _path(root, later, "arrow").unlink()


def steps_in(root: Path) -> list[int]:
    """Steps whose groups are kept, in order."""
    names = (_NAME.match(path.name) for path in root.glob("step-*.arrow"))
    return sorted(int(match[1]) for match in names if match)


def _path(root: Path, step: int, kind: str) -> Path:
    return root / f"step-{step:06d}.{kind}"
