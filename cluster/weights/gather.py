"""Collection of several engines' answers under one deadline, with failures by engine name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.handles import calls, errors
from cluster.supervision.failures import is_death, root_cause
from distill.errors import EngineError, EngineLost

# Time that linked engines have to leave their shared collective after one of them failed, seconds.
GRACE_S = 15.0
_POLL_S = 0.25


@dataclass(slots=True)
class GatherResult:
    """Values by engine, failures by engine, and a problem on the caller's side.

    `lost` names the failed engines that must be restarted: their actor or server is gone, or is
    stuck in a collective.
    """

    values: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    problem: str | None = None

    def complaint(self) -> str:
        """One line that lists every failure and the problem on the caller's side."""
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
    """Wait for each engine's call and return answers and failures.

    Args:
        timeout_s: longest time without an answer and without progress of `sent`, seconds.
        linked: one engine's failure keeps the others from answering, so these get `GRACE_S` more
            and then count as lost.
        give_up: called once after a linked engine failed; may unblock the others.
        problem: polled; a returned message has the effect of an engine's failure.
        sent: counter that increases while the caller's side sends.
        waiting: called at every poll before the deadline.
    """
    deadline = time.monotonic() + timeout_s
    names = {reference: name for name, reference in pending.items()}
    answers = GatherResult()
    stuck_since: str | None = None  # the first linked engine that failed
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
        # Poll all of them at intervals. Waking at each answer would scan N references N times.
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
    # In the order of `pending`, not of arrival.
    answers.values = {n: answers.values[n] for n in pending if n in answers.values}
    answers.failures = {n: answers.failures[n] for n in pending if n in answers.failures}
    return answers


def values(pending: Mapping[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
    """The value of each engine's call, by the engine's name.

    Args:
        what: what the calls do, for the error.

    Raises:
        EngineError: an engine refused, died, or did not answer; the message names each.
    """
    answers = collect(pending, timeout_s)
    if answers.failures:
        raise EngineError(f"{what} failed: {answers.complaint()}")
    return answers.values
