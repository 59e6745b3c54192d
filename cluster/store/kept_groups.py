"""Groups that a run keeps for inspection: `out/groups/kept-000011.arrow`, a file per kept step.

The files are those of `group_format`, with the advantages of the loss, and without the routing of a
mixture's tokens. Of the teacher's likeliest tokens, the first `ALTERNATIVES` are kept. The note:

    version       weights at the beginning of the step
    group_ids     ids of the file's groups
    step_tokens   tokens with the largest shares of the whole step's KL (`TokenGap`)

Only the learner's leader writes the files, with data from the workers that trained on the groups.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cluster.store.group_format import (
    UNWRITABLE,
    StoredGroups,
    read_groups,
    read_note,
    write_groups,
)
from distill.errors import DataError
from distill.group_share import EVERY_GROUP, GroupShare
from distill.objective.metrics import TokenGap, TokenTable, tokens_by_gap
from distill.types import FloatArray, Segment, TopLogprobs, TrajectoryGroup

if TYPE_CHECKING:
    from distill.objective.batching import TrainingRow

logger = logging.getLogger(__name__)

# Number of the teacher's likeliest tokens that are kept per position.
ALTERNATIVES = 5
# Number of tokens that are kept per step, by their shares of the step's KL.
STEP_TOKENS = 20
_REMEDY = "remove the file"


class KeptGroupWriter:
    """Writer of the kept groups.

    Kept are groups of the first step, of every `every`th step after it (0: of no step), and of the
    `last` step: the first group that a teacher scored, or the first group if there is none. Of a
    step whose groups were all filtered out, none is kept.

    Args:
        whole: keep all groups of these steps.
        trains: True if each step creates a weight version.
        scored: groups that a teacher scored.
    """

    def __init__(
        self,
        root: Path,
        every: int,
        *,
        whole: bool = False,
        last: int | None = None,
        trains: bool = True,
        scored: GroupShare = EVERY_GROUP,
    ) -> None:
        self._root, self._every, self._whole, self._last = root, every, whole, last
        self._trains, self._scored = trains, scored

    def chosen(self, step: int, group_ids: Sequence[int]) -> Sequence[int]:
        """Choose the groups to keep among those that `step` trained on, by id."""
        if self._every == 0 or ((step - 1) % self._every and step != self._last):
            return []
        if self._whole:
            return group_ids
        return sorted(group_ids, key=lambda group_id: group_id not in self._scored)[:1]

    def keep(
        self,
        step: int,
        groups_P: Sequence[TrajectoryGroup],
        rows_D: Sequence[TrainingRow],
        tables: Sequence[TokenTable | None],
    ) -> None:
        """Write the chosen groups, with their rows' advantages and the tokens of the whole step.

        If they cannot be written, for example to a full disk, the step's groups are not kept.
        """
        from distill.objective.rows import rows_by_group  # torch, which readers do not need

        note = {
            "version": step - 1 if self._trains else 0,
            "group_ids": [group.group_id for group in groups_P],
            "step_tokens": tokens_by_gap(tables, STEP_TOKENS),
        }
        advantages_P = [
            np.concatenate([row.advantages_T for row in rows])
            for _, rows in rows_by_group(groups_P, rows_D)
        ]
        try:
            write_groups(_path(self._root, step), list(map(_reduced, groups_P)), note, advantages_P)
        except UNWRITABLE as error:
            logger.warning("no groups of step %d are kept for cluster.report: %s", step, error)

    def rewind(self, step: int) -> None:
        """Delete the groups of steps after `step`, which are repeated.

        Raises:
            OSError: a file cannot be deleted.
        """
        for later in kept_steps(self._root):
            if later > step:
                _path(self._root, later).unlink(missing_ok=True)


def _reduced(group: TrajectoryGroup) -> TrajectoryGroup:
    return replace(
        group,
        trajectories_G=tuple(
            replace(member, segments=tuple(map(_reduced_segment, member.segments)))
            for member in group.trajectories_G
        ),
    )


def _reduced_segment(segment: Segment) -> Segment:
    if (top := segment.teacher_top) is not None:
        likeliest_NK = np.argsort(-top.logprobs_NK, axis=1, kind="stable")[:, :ALTERNATIVES]
        top = TopLogprobs(
            ids_NK=np.take_along_axis(top.ids_NK, likeliest_NK, 1),
            logprobs_NK=np.take_along_axis(top.logprobs_NK, likeliest_NK, 1),
        )
    return replace(segment, teacher_top=top, experts_TLK=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptGroup:
    """A group that `step` trained on, starting from the weights of `version`.

    Attributes:
        advantages_S: advantages of each segment's tokens, in the order of `group.segments()`; 0 at
            tokens that were not trained.
    """

    step: int
    version: int
    group: TrajectoryGroup
    advantages_S: Sequence[FloatArray]


class KeptGroups:
    """The groups that a run has kept, in order of steps.

    The constructor reads the notes; groups are read on access, a file at a time.

    Args:
        root: folder of the files.
        after: leave out steps up to this one.

    Attributes:
        steps: kept steps, in order.
        places: step and id of each group.

    Raises:
        DataError: a file is damaged; the message names it. Accesses raise it, too.
    """

    def __init__(self, root: Path, after: int = 0) -> None:
        self._root = root
        self.steps = [step for step in kept_steps(root) if step > after]
        self._notes = {step: read_note(_path(root, step), _REMEDY) for step in self.steps}
        self.places: list[tuple[int, int]] = [
            (step, group_id) for step, note in self._notes.items() for group_id in note["group_ids"]
        ]
        self._read: tuple[int, list[KeptGroup]] = 0, []  # the step that was read last

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[KeptGroup]:
        return chain.from_iterable(map(self.of_step, self.steps))

    def __getitem__(self, index: int) -> KeptGroup:
        step, group_id = self.places[index]
        return next(kept for kept in self.of_step(step) if kept.group.group_id == group_id)

    def of_step(self, step: int) -> list[KeptGroup]:
        """Groups of a kept step."""
        if self._read[0] != step:
            stored = read_groups(_path(self._root, step), _REMEDY)
            self._read = step, list(_kept(step, stored))
        return self._read[1]

    def step_tokens(self, step: int) -> list[TokenGap]:
        """Tokens with the largest shares of a kept step's KL; empty without a teacher."""
        return [TokenGap(*each) for each in self._notes[step]["step_tokens"]]


def kept_steps(root: Path) -> list[int]:
    """Steps of which groups are kept in a folder, in order."""
    return sorted(int(path.stem.removeprefix("kept-")) for path in root.glob("kept-*.arrow"))


def _kept(step: int, stored: StoredGroups) -> Iterator[KeptGroup]:
    for group, advantages_L in zip(stored.groups_P, stored.advantages_P, strict=True):
        ends = np.cumsum([len(segment) for segment in group.segments()])
        if len(advantages_L) != ends[-1]:
            raise DataError(f"group {group.group_id} of step {step} lacks advantages; {_REMEDY}")
        yield KeptGroup(
            step=step,
            version=stored.note["version"],
            group=group,
            advantages_S=np.split(advantages_L, ends[:-1]),
        )


def _path(root: Path, step: int) -> Path:
    return root / f"kept-{step:06d}.arrow"
