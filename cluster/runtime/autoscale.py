"""Autoscaling policy: target numbers of engines and rollout workers. No Ray, no clock.

    observe (a window of the run) -> the pools to resize, with reasons

**Grow** when the learner waits for groups: the pool of the stage that holds most groups. A learner
that waits for a share w of its time receives 1 - w of the groups that it could train, so the pool
grows by the factor 1 / (1 - w), by at least one member and at most by a factor of two. Kubernetes'
Horizontal Pod Autoscaler scales by the same ratio (desired = ceil(current * metric / target)).

**Shrink** when the learner does not wait and workers are idle for lack of credit: by one, the pool
with the fewest groups per member. At the end of the run, when no group is left to start, to the
number of groups that a pool may still receive. (Staleness is not a separate input: credit bounds
it, and supply in excess of the bound appears as lack of credit.)

Measures against flapping:

- A condition has to hold without interruption, and with the same members, for `up_after_s` (30 s,
  as Ray Serve's `upscale_delay_s`) or `down_after_s` (120 s; Kubernetes' stabilisation window for
  scaling down is 300 s, Ray Serve's `downscale_delay_s` 600 s). Too many members cost money; too
  few idle the learner, the most expensive part of a run. Growing is therefore faster than
  shrinking. As in Ray Serve (`autoscaling_policy.py`), one window without the condition restarts
  the count.
- Between `_WAIT_LOW` and `_WAIT_HIGH` nothing changes. One member of six or more is less than
  `_WAIT_HIGH` of a pool, so shrinking such a pool once never causes a growth.
- In a smaller pool it can, and lack of credit does not show by how much supply exceeds demand. So a
  size that was too small is remembered for `memory_s`, and twice as long each time that it was
  tried too early: Kubernetes' choice of the largest recommendation within the window, with a
  back-off.
- One decision changes pools at a time, and the next follows after `cooldown_s`: members take that
  long to start (SGLang 15 to 70 s), and the effect of a single change can be measured.
- A growth that achieved less than a quarter of its expected effect is not repeated for `memory_s`,
  or until another growth has helped. A synchronous run (max_staleness=0), for example, waits for
  the length of a rollout, which no number of engines shortens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

PoolName = Literal["policy", "teacher", "rollout"]

# Lower bound of supply as a share of demand, so that ratios stay finite.
_LEAST_SUPPLY = 0.01
# Stages of the groups of each pool.
_STAGES: dict[PoolName, str] = {
    "policy": "being sampled",
    "teacher": "being scored",
    "rollout": "in their environments",
}
# Share of its expected gain that a growth must achieve.
_GAIN = 0.25
# A learner that waits for more than this share of its time is short of groups.
_WAIT_HIGH = 0.2
# A learner that waits for less than this share has enough groups.
_WAIT_LOW = 0.02
# Workers without credit for more than this share of the time are too many.
_STARVED_HIGH = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A window of the run. Shares are in [0, 1]; numbers of groups are means over the window."""

    seconds: float  # length of the window
    learner_wait: float  # share of it in which the learner waited for groups
    credit_starved: float  # share of it without credit, with fewer groups in progress than finished
    sampling: float  # groups in a policy engine
    environment: float  # groups in their environment or reward, outside any engine
    scoring: float  # groups in a teacher engine
    queue_depth: int  # finished groups at its end that are not in published weights yet
    sizes: Mapping[str, int]  # members by pool, those that are starting among them
    ready: Mapping[str, int]  # members by pool that work
    exhausted: bool = False  # every group of the run has been leased

    @property
    def in_progress(self) -> dict[PoolName, float]:
        """Groups in progress, by the pool whose work they wait for."""
        return {"policy": self.sampling, "teacher": self.scoring, "rollout": self.environment}


@dataclass(frozen=True, slots=True)
class Resize:
    """New size of a pool, with the reason for users."""

    pool: PoolName
    size: int
    reason: str


class _RecentWindows:
    """The latest consecutive windows of one kind that make up `needed_s` seconds."""

    def __init__(self, needed_s: float) -> None:
        self._needed_s = needed_s
        self._windows: deque[Observation] = deque()

    def clear(self) -> None:
        self._windows.clear()

    def add(self, observation: Observation) -> None:
        self._windows.append(observation)
        while self._seconds - self._windows[0].seconds >= self._needed_s and len(self._windows) > 1:
            self._windows.popleft()

    @property
    def is_enough(self) -> bool:
        return bool(self._windows) and self._seconds >= self._needed_s

    @property
    def wait(self) -> float:
        """Mean share of the time that the learner waited."""
        return self._mean(lambda window: window.learner_wait)

    @property
    def supply(self) -> float:
        """Share of the learner's demand that was met."""
        return max(1 - self.wait, _LEAST_SUPPLY)

    def groups(self, pool: PoolName) -> float:
        return self._mean(lambda window: window.in_progress[pool])

    @property
    def _seconds(self) -> float:
        return sum(window.seconds for window in self._windows)

    def _mean(self, value: Callable[[Observation], float]) -> float:
        return sum(value(window) * window.seconds for window in self._windows) / self._seconds


@dataclass(slots=True)
class _Memory:
    """Memory of a pool's earlier sizes. Times are seconds since the start of the run."""

    too_few: int = -1  # number of members with which the learner waited
    until: float = 0.0  # until then no shrink goes down to `too_few`
    times: int = 0  # growths in a row that undid a shrink
    shrunk_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class _Growth:
    """The last growth, to be evaluated: the supply before it, and the expected factor."""

    pool: PoolName
    supply: float
    factor: float

    def helped(self, supply: float) -> bool:
        return supply / self.supply >= 1 + _GAIN * (self.factor - 1)


class Autoscaler:
    """Autoscaling policy with a memory; see the module's docstring for its rules.

    Args:
        bounds: smallest and largest size of each pool that may change. Other pools are left alone,
            whatever their stage holds.
        up_after_s: time that the learner waits before a pool grows.
        down_after_s: time that workers lack credit before a pool shrinks; at least `up_after_s`.
        cooldown_s: least time between two decisions that change a pool.
        memory_s: time for which a size that was too small is not tried again.
        settling_windows: number of windows that are ignored after a change of members, because they
            contain groups that the earlier members began.
    """

    def __init__(
        self,
        bounds: Mapping[PoolName, tuple[int, int]],
        *,
        up_after_s: float,
        down_after_s: float,
        cooldown_s: float,
        memory_s: float,
        settling_windows: int = 0,
    ) -> None:
        assert 0 <= up_after_s <= down_after_s, "growth takes precedence"
        assert min(cooldown_s, memory_s) >= 0
        assert all(0 <= least <= most for least, most in bounds.values()), bounds
        self._bounds = bounds
        self._cooldown_s = cooldown_s
        self._memory_s = memory_s
        self._settling_windows, self._unsettled = settling_windows, 0

        self._now = 0.0
        self._changed_at = -math.inf
        self._targets: dict[PoolName, int] = {}
        self._ready: dict[str, int] = {}
        self._shortage = _RecentWindows(up_after_s)
        self._surplus = _RecentWindows(down_after_s)
        self._memory: dict[PoolName, _Memory] = {name: _Memory() for name in bounds}
        self._growth: _Growth | None = None
        self._futile_until: dict[PoolName, float] = {}

    def observe(self, observation: Observation) -> list[Resize]:
        """Changes of the pools after this window. `sizes` and `ready` name every pool.

        The first observation's sizes, brought within their limits, are the first ones.
        """
        self._now += observation.seconds
        self._gather(observation)
        if not self._targets:
            self._targets = {name: observation.sizes[name] for name in self._bounds}
            changes = self._within_limits()
        elif observation.exhausted:
            changes = self._end(observation)
        elif self._shortage.is_enough:
            changes = self._grow(observation)
        elif self._surplus.is_enough:
            changes = self._shrink(observation)
        else:
            return []
        return self._granted(changes)

    def _gather(self, observation: Observation) -> None:
        ready = dict(observation.ready)
        if ready != self._ready:  # observations of other members do not apply to these
            self._shortage.clear()
            self._surplus.clear()
            self._unsettled = self._settling_windows if self._ready else 0
            self._ready = ready
        if self._unsettled:
            self._unsettled -= 1
            return
        if observation.learner_wait > _WAIT_HIGH:
            self._shortage.add(observation)
        else:
            self._shortage.clear()
            self._growth = None
        if observation.learner_wait < _WAIT_LOW and observation.credit_starved > _STARVED_HIGH:
            self._surplus.add(observation)
        else:
            self._surplus.clear()

    def _granted(self, changes: list[Resize]) -> list[Resize]:
        """All changes, or none while the last one is recent."""
        if not changes or self._now - self._changed_at < self._cooldown_s:
            return []
        for change in changes:
            self._remember(change)
            self._targets[change.pool] = change.size
        self._changed_at = self._now
        self._shortage.clear()
        self._surplus.clear()
        return changes

    def _within_limits(self) -> list[Resize]:
        return [
            Resize(name, size, "its size is outside its limits")
            for name, now in self._targets.items()
            if (size := self._clamped(name, now)) != now
        ]

    def _clamped(self, name: PoolName, size: int) -> int:
        least, most = self._bounds[name]
        return max(least, min(size, most))

    def _end(self, observation: Observation) -> list[Resize]:
        """Changes at the end of the run, when no group is left to start.

        A group may return to the policy from its environment; its worker holds it until its end;
        scoring comes last.
        """
        groups = observation.in_progress
        total = math.ceil(sum(groups.values()))
        sampled = math.ceil(observation.sampling + observation.environment)
        needed = {"policy": sampled, "teacher": total, "rollout": total}
        return [
            Resize(
                name,
                size,
                f"no group is left to start, and at most {needed[name]} groups may still reach "
                "this pool",
            )
            for name, now in self._targets.items()
            if (size := self._clamped(name, needed[name])) < now
        ]

    def _grow(self, observation: Observation) -> list[Resize]:
        self._judge_last_growth(observation)
        name = max(_STAGES, key=self._urgency)
        groups, wait = self._shortage.groups(name), self._shortage.wait
        if name not in self._bounds or not groups:
            return []  # no group is in progress, or only in stages whose pools are fixed
        now, (_, most) = self._targets[name], self._bounds[name]
        if now >= most or self._is_futile(name) or observation.ready[name] < now:
            return []
        why = (
            f"the learner waits {wait:.0%} of the time, and most groups ({groups:.1f} on average) "
            f"are {_STAGES[name]}"
        )
        size = max(now + 1, min(math.ceil(now / self._shortage.supply), 2 * now))
        return [Resize(name, min(size, most), why)]

    def _urgency(self, name: PoolName) -> tuple[bool, float]:
        groups = self._shortage.groups(name)
        return groups > 0 and not self._is_futile(name), groups

    def _is_futile(self, name: PoolName) -> bool:
        return self._now < self._futile_until.get(name, -math.inf)

    def _judge_last_growth(self, observation: Observation) -> None:
        """Evaluate the last growth, once all its members work."""
        grown = self._growth
        if grown is None or observation.ready[grown.pool] < self._targets[grown.pool]:
            return
        if grown.helped(self._shortage.supply):
            self._futile_until.clear()  # another pool may have limited an earlier growth
        else:
            self._futile_until[grown.pool] = self._now + self._memory_s
        self._growth = None

    def _shrink(self, observation: Observation) -> list[Resize]:
        """Pool with the fewest groups per member among those that may shrink."""
        able: list[PoolName] = [name for name in self._bounds if self._may_shrink(name)]
        if not able:
            return []
        name = min(able, key=lambda pool: self._surplus.groups(pool) / self._targets[pool])
        return [
            Resize(
                name,
                self._targets[name] - 1,
                f"the learner waits {self._surplus.wait:.0%} of the time, "
                f"{observation.queue_depth} finished groups are queued, workers lack credit, and "
                f"this pool has the fewest groups ({self._surplus.groups(name):.1f} on average) "
                "a member",
            )
        ]

    def _may_shrink(self, name: PoolName) -> bool:
        smaller, memory = self._targets[name] - 1, self._memory[name]
        known_too_few = smaller <= memory.too_few and self._now < memory.until
        return smaller >= self._bounds[name][0] and not known_too_few

    def _remember(self, change: Resize) -> None:
        """Update the pool's memory; call it before the change."""
        memory, now = self._memory[change.pool], self._targets[change.pool]
        if change.size < now:
            memory.shrunk_at = self._now
        elif self._shortage.is_enough:
            undone = self._now - memory.shrunk_at < self._memory_s
            memory.times = memory.times + 1 if undone else 0
            memory.too_few = now
            memory.until = self._now + self._memory_s * 2**memory.times
            self._growth = _Growth(change.pool, self._shortage.supply, change.size / max(now, 1))
