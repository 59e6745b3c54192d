"""The next step's rollouts, fetched and made into rows while the learner computes.

    ahead     waits for: groups that the next step would take     unblocked by: the workers' puts
    hold      waits for: what `ahead` is fetching                 (learner/rollout_share.py)

Nothing is chosen by this: the next step takes what its rule says when it is taken. What was fetched
ahead counts where it is what is held then, to the very object; the rest is let go of.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from distill.records import TrainedGroups, TrajectoryGroupMeta
from learner.process_group import WorkerGroup
from learner.rollout_share import Shares

logger = logging.getLogger(__name__)

# Groups that the step after weights would take as things are: waits a moment for some besides those
# that are known by id, and, if asked to, for the whole step. None: it was taken, or never will be.
Foresee: TypeAlias = Callable[
    [TrainedGroups, Collection[int], bool], Sequence[TrajectoryGroupMeta] | None
]


class Foresight:
    """Has workers fetch ahead, in a thread from `begin` to `end`."""

    def __init__(
        self,
        foresee: Foresee,
        fetch: Callable[[Sequence[TrajectoryGroupMeta], int], None],
        *,
        whole: bool,
    ) -> None:
        """
        Args:
            fetch: `Rollouts.fetch_ahead`.
            whole: only once the step may be taken; else groups as they come.
        """
        self._foresee, self._fetch, self._whole = foresee, fetch, whole
        self._over = threading.Event()
        self._telling = threading.Lock()

    def begin(self, trained: TrainedGroups, turn: int) -> None:
        """Begins with the step after weights that account for `trained`; `turn` is of the one that
        is held."""
        self._over = threading.Event()
        arguments = (trained, turn, self._over)
        threading.Thread(target=self._run, args=arguments, name="ahead", daemon=True).start()

    def end(self) -> None:
        """That step is about to be taken."""
        self._over.set()

    def _run(self, trained: TrainedGroups, turn: int, over: threading.Event) -> None:
        known: set[int] = set()
        try:
            while not over.is_set() and not (self._whole and known):
                groups_P = self._foresee(trained, known, self._whole)
                if groups_P is None:
                    return
                known |= {group.group_id for group in groups_P}
                with self._telling:  # one that has ended may not be done yet
                    if groups_P and not over.is_set():
                        self._fetch(groups_P, turn)
        except Exception as error:  # whatever it is, `hold` meets it again, and raises
            logger.warning("the next step's rollouts are not fetched ahead: %s", error)


def listen_ahead(fetch: Callable[[Shares], None], group: WorkerGroup) -> None:
    """Has a follower do as it is told by the leader's `Foresight`, in a thread that ends with its
    connection."""

    def listen() -> None:
        while True:
            try:
                shares = group.receive_ahead()
            except RuntimeError as error:  # DistError among them
                logger.info("the leader is gone: %s", error)
                return
            try:
                fetch(shares)
            except Exception as error:  # as above
                logger.warning("rollouts are not fetched ahead: %s", error)

    threading.Thread(target=listen, name="ahead", daemon=True).start()
