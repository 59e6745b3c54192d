"""Gathering of several engines' answers under one deadline, each failure by its engine's name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.handles import calls, errors
from cluster.supervision.failures import is_death, root_cause
from distill.errors import EngineError, EngineLost

# Once one of several linked engines has failed, the others have this long to come out of what they
# share, seconds.
GRACE_S = 15.0
_POLL_S = 0.25


@dataclass(slots=True)
class GatherResult:
    """Values by engine, failures by engine, and what went wrong on this side.

    `lost` are the failing engines that must be restarted: an actor, or its server, is gone, or is
    in a collective that does not end.
    """

    values: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    problem: str | None = None

    def complaint(self) -> str:
        """All that went wrong, in a line."""
        own = [self.problem] if self.problem else []
        return "; ".join([f"{name}: {why}" for name, why in self.failures.items()] + own)


def collect(
    pending: Mapping[str, Any],
    timeout_s: float,
    *,
    linked: bool = False,
    problem: Callable[[], str | None] = lambda: None,
    give_up: Callable[[], None] = lambda: None,
    sent: Callable[[], int] = lambda: 0,
    waiting: Callable[[], None] = lambda: None,
) -> GatherResult:
    """Waits for each engine's call and returns answers and failures.

    Args:
        timeout_s: longest that no answer comes, and nothing is sent.
        linked: a failure of one keeps the others from answering, so they are given up soon, and
            are lost.
        give_up: called once when one of the linked has failed; may have the others answer.
        problem: asked now and then; an answer counts as an engine's failure does.
        sent: a count that moves while this side sends.
        waiting: called now and then, while there is still time.
    """
    deadline = time.monotonic() + timeout_s
    names = {reference: name for name, reference in pending.items()}
    answers = GatherResult()
    stuck_since: str | None = None  # who of the linked failed first
    seen = sent()
    while names:
        if stuck_since is None and seen != (seen := sent()):
            deadline = time.monotonic() + timeout_s
        left = deadline - time.monotonic()
        if left <= 0:
            for name in names.values():
                answers.failures[name] = f"no answer in {timeout_s:.0f} s"
                if linked and stuck_since is not None:
                    answers.failures[name] = f"still in the collective that {stuck_since} left"
                    answers.lost.add(name)
            break
        # A look at all every so often, not one at each answer: those would be N looks at N.
        ready, _ = calls.wait(list(names), num_returns=len(names), timeout=min(_POLL_S, left))
        waiting()
        failed_before = bool(answers.failures or answers.problem)
        if ready and stuck_since is None:
            deadline = time.monotonic() + timeout_s
        for reference in ready:
            name = names.pop(reference)
            try:
                answers.values[name] = calls.get(reference)
            except errors.RayError as error:
                answers.failures[name] = "died" if is_death(error) else str(root_cause(error))
                if isinstance(error, EngineLost) or not isinstance(error, errors.RayTaskError):
                    answers.lost.add(name)
        answers.problem = answers.problem or problem()
        failed = bool(answers.failures or answers.problem)
        if linked and failed and not failed_before:
            stuck_since = next(iter(answers.failures), "the learner")
            give_up()
            timeout_s = min(GRACE_S, left)
            deadline = time.monotonic() + timeout_s
    # By engine, whoever answered first.
    answers.values = {n: answers.values[n] for n in pending if n in answers.values}
    answers.failures = {n: answers.failures[n] for n in pending if n in answers.failures}
    return answers


def values(pending: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
    """The value of each engine's call, by the engine's name.

    Args:
        what: the calls have in common, for the errors.

    Raises:
        EngineError: names every engine that refused, died, or did not answer.
    """
    answers = collect(pending, timeout_s)
    if answers.failures:
        raise EngineError(f"{what} failed: {answers.complaint()}")
    return answers.values
