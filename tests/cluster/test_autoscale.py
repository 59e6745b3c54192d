"""When pools grow and shrink: single rules, arbitrary streams of windows, and a closed loop."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.runtime.autoscale import Autoscaler, Observation, PoolName, Resize

NAMES: tuple[PoolName, ...] = ("policy", "teacher", "rollout")
WINDOW_S = 5.0
# Of the closed loop, which simulates hours.
LONG_WINDOW_S = 15.0


def pools(minimum: int = 1, maximum: int = 8) -> dict[PoolName, tuple[int, int]]:
    return dict.fromkeys(NAMES, (minimum, maximum))


def seen(sizes: Mapping[Any, int] | None = None, **changes: Any) -> Observation:
    """A window without a problem: the learner waits a little, and workers have credit."""
    sizes = sizes or dict.fromkeys(NAMES, 2)
    return Observation(
        **{
            "seconds": WINDOW_S, "learner_wait": 0.1, "credit_starved": 0.0, "sampling": 4,
            "environment": 1, "scoring": 2, "queue_depth": 3, "sizes": sizes, "ready": sizes,
        }
        | changes
    )  # fmt: skip


class Rig:
    """An autoscaler whose decisions take effect at once."""

    def __init__(
        self, sizes: int = 2, limits: dict[PoolName, tuple[int, int]] | None = None, **times: Any
    ) -> None:
        self.sizes: dict[str, int] = dict.fromkeys(NAMES, sizes)
        times = {"up_after_s": 10, "down_after_s": 30, "cooldown_s": 20, "memory_s": 300} | times
        self.scaler = Autoscaler(limits or pools(), **times)

    def see(self, times: int = 1, **changes: Any) -> list[list[Resize]]:
        return [self._see(changes) for _ in range(times)]

    def _see(self, changes: dict[str, Any]) -> list[Resize]:
        resized = self.scaler.observe(seen(dict(self.sizes), **changes))
        self.sizes |= {change.pool: change.size for change in resized}
        return resized


SHORT = {"learner_wait": 0.5}
AMPLE = {"learner_wait": 0.0, "credit_starved": 0.9}


@pytest.mark.parametrize(
    ("stage", "pool"), [("sampling", "policy"), ("scoring", "teacher"), ("environment", "rollout")]
)
def test_a_waiting_learner_grows_the_pool_where_the_groups_are(stage: str, pool: PoolName) -> None:
    rig = Rig()
    first, second = rig.see(2, **SHORT, **{stage: 30})
    assert not first and [change.pool for change in second] == [pool]
    assert rig.sizes == dict.fromkeys(NAMES, 2) | {pool: 4}


@pytest.mark.parametrize(
    ("size", "wait", "grown"),
    [(4, 0.25, 6), (4, 0.21, 6), (1, 0.3, 2), (4, 0.5, 8), (4, 0.9, 8), (10, 0.3, 15), (2, 1.0, 4)],
)
def test_a_pool_grows_by_what_is_short_and_at_most_doubles(
    size: int, wait: float, grown: int
) -> None:
    rig = Rig(sizes=size, limits=pools(maximum=100))
    rig.see(2, learner_wait=wait)
    assert rig.sizes["policy"] == grown


def test_no_pool_grows_while_members_start_and_the_count_restarts_after() -> None:
    rig = Rig()
    rig.see(2, **SHORT)
    starting = {"policy": 2, "teacher": 2, "rollout": 2}
    assert not any(rig.see(20, **SHORT, ready=starting))
    assert rig.sizes["policy"] == 4
    first, second = rig.see(2, **SHORT)
    assert not first and second


def test_a_growth_that_did_not_help_is_not_repeated() -> None:
    """As with one long rollout, which more engines do not shorten."""
    rig = Rig(sizes=1, limits=pools(maximum=64), memory_s=900)
    rig.see(100, learner_wait=0.5, environment=0, scoring=0)
    assert rig.sizes["policy"] == 2
    # The next stage grows. Once something has helped, the first may grow again.
    rig.see(1, learner_wait=0.5, environment=0, scoring=3)
    assert rig.sizes == {"policy": 2, "teacher": 2, "rollout": 1}
    rig.see(10, learner_wait=0.25)
    assert rig.sizes["policy"] == 3


def test_starved_workers_shrink_the_least_used_pool_by_one() -> None:
    rig = Rig(sizes=3)
    assert not any(rig.see(5, **AMPLE))
    [[change]] = rig.see(1, **AMPLE)
    assert change.pool == "rollout"
    rig.see(5, **AMPLE, environment=9)
    assert rig.sizes == {"policy": 3, "teacher": 3, "rollout": 2}
    rig.see(1, **AMPLE, environment=9)
    assert rig.sizes == {"policy": 3, "teacher": 2, "rollout": 2}


@pytest.mark.parametrize(
    "broken", [{"learner_wait": 0.03}, {"credit_starved": 0.4}], ids=["waits", "has credit"]
)
def test_a_pool_that_is_needed_does_not_shrink(broken: dict[str, float]) -> None:
    rig = Rig(sizes=3)
    rig.see(200, **AMPLE | broken)
    assert rig.sizes == dict.fromkeys(NAMES, 3)


def test_trials_of_a_size_that_was_too_small_become_rarer() -> None:
    """The load needs one member and a half; workers starve whenever the learner does not wait."""
    rig = Rig(sizes=1, limits={"policy": (1, 8)})
    changes, now = [], 0.0
    while now < 20_000:
        enough = rig.sizes["policy"] >= 2
        [resized] = rig.see(1, **(AMPLE if enough else {"learner_wait": 1 / 3}))
        now += WINDOW_S
        changes += [now] * len(resized)
    shrinks = changes[1::2]
    between = [later - earlier for earlier, later in pairwise(shrinks)]
    assert len(between) >= 4
    assert all(1.9 < later / earlier < 2.5 for earlier, later in pairwise(between))


def test_at_the_end_of_a_run_pools_shrink_to_the_groups_under_way() -> None:
    rig = Rig(sizes=8)
    rig.see(1)
    tail = {"exhausted": True, "learner_wait": 0.9}
    [resized] = rig.see(1, **tail, sampling=2, environment=1, scoring=2)
    assert rig.sizes == {"policy": 3, "teacher": 5, "rollout": 5}
    assert {change.pool for change in resized} == set(NAMES)
    assert rig.see(1, **tail, sampling=0, environment=0, scoring=2) == [[]]
    rig.see(20, **tail, sampling=0, environment=0, scoring=0)
    assert rig.sizes == dict.fromkeys(NAMES, 1)


shares = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.01, 0.3, 0.6, 1.0]))
windows = st.fixed_dictionaries(
    {
        "seconds": st.floats(0.1, 20), "learner_wait": shares, "credit_starved": shares,
        "sampling": st.integers(0, 40), "environment": st.integers(0, 40),
        "scoring": st.integers(0, 40), "exhausted": st.sampled_from([False] * 9 + [True]),
    }
)  # fmt: skip


@settings(max_examples=60)
@given(
    limits=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=3, max_size=3),
    # Repeated windows, or no condition would be sustained.
    stream=st.lists(st.tuples(windows, st.integers(1, 12)), max_size=25),
    first=st.integers(0, 12),
    late=st.booleans(),
    times=st.fixed_dictionaries(
        {
            "up_after_s": st.floats(0, 10),
            "down_after_s": st.floats(10, 40),
            "cooldown_s": st.floats(0, 60),
            "memory_s": st.floats(0, 100),
        }
    ),
)
def test_any_stream_stays_within_limits_and_changes_once_a_cooldown(
    limits: list[tuple[int, int]],
    stream: list[tuple[dict[str, Any], int]],
    first: int,
    late: bool,
    times: dict[str, Any],
) -> None:
    made: dict[PoolName, tuple[int, int]] = {
        name: (least, least + more) for name, (least, more) in zip(NAMES, limits, strict=True)
    }
    scaler = Autoscaler(made, **times)
    sizes: dict[PoolName, int] = dict.fromkeys(NAMES, first)
    ready = dict(sizes)
    now, changed = 0.0, -math.inf
    grown: dict[PoolName, float] = dict.fromkeys(NAMES, -math.inf)
    for window, repeats in stream:
        for _ in range(repeats):
            before = dict(sizes)
            resized = scaler.observe(seen(before, **window, ready=ready))
            now += window["seconds"]
            sizes |= {change.pool: change.size for change in resized}
            assert all(least <= sizes[name] <= most for name, (least, most) in made.items())
            moved = {name for name in NAMES if sizes[name] != before[name]}
            assert moved == {change.pool for change in resized}
            if moved:
                assert now - changed >= times["cooldown_s"]
                changed = now
            for name in NAMES:
                if sizes[name] > before[name] and made[name][0] <= before[name] <= made[name][1]:
                    assert sizes[name] <= max(2 * before[name], 1)
                    assert ready[name] == before[name], "grew while members were starting"
                if sizes[name] < before[name] and not window["exhausted"]:
                    assert now - grown[name] >= times["down_after_s"] or before[name] == first
                if sizes[name] > before[name]:
                    grown[name] = now
            ready = {n: min(sizes[n], ready[n] + 1) if late else sizes[n] for n in NAMES}


@dataclass
class Plant:
    """A run as a flow: a pool's throughput is proportional to its members, the learner's is fixed.

    The slowest stage sets the pace, and groups wait before it. The other stages hold groups in
    proportion to their use. Members work `start_s` after they were requested.

    `starved_by_excess`: workers lack credit in proportion to their excess over the learner;
    otherwise they lack it whenever the learner sets the pace.
    """

    rates: dict[str, float]  # groups a second and member
    learner: float  # groups a second
    starved_by_excess: bool = True
    noise: float = 0.0
    start_s: float = 20.0
    credit: int = 32
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 1))
    seed: int = 0

    def __post_init__(self) -> None:
        self.now = 0.0
        self.history: list[dict[str, int]] = []
        self._working = {name: [0.0] * size for name, size in self.sizes.items()}
        self._random = random.Random(self.seed)

    def drive(self, scaler: Autoscaler, seconds: float) -> list[dict[str, int]]:
        """Run for so many seconds; return the sizes after every window."""
        end, start = self.now + seconds, len(self.history)
        while self.now < end:
            self.now += LONG_WINDOW_S
            self._resize(scaler.observe(self._window()))
            self.history.append(dict(self.sizes))
        return self.history[start:]

    def needed(self, within: float = 1.0) -> dict[str, int]:
        """The fewest members that give the learner this share of its capacity."""
        return {name: math.ceil(within * self.learner / self.rates[name] - 1e-9) for name in NAMES}

    def _resize(self, changes: Sequence[Resize]) -> None:
        for change in changes:
            since, size = self._working[change.pool], change.size
            started = [self.now + self.start_s] * (size - len(since))
            self._working[change.pool] = since[:size] + started
            self.sizes[change.pool] = size

    def _window(self) -> Observation:
        ready = {name: sum(at <= self.now for at in self._working[name]) for name in NAMES}
        capacity = {name: self._noisy(self.rates[name] * ready[name]) for name in NAMES}
        slowest = min(NAMES, key=lambda name: capacity[name])
        pace = min(capacity[slowest], self.learner)
        used = {name: pace / max(capacity[name], 1e-9) for name in NAMES}
        groups = {name: round(4 * used[name]) for name in NAMES}
        short = capacity[slowest] < self.learner
        if short:
            groups[slowest] += self.credit - sum(groups.values())
        excess = 1 - used[slowest] if self.starved_by_excess else 1.0
        return seen(
            dict(self.sizes), seconds=LONG_WINDOW_S, learner_wait=1 - pace / self.learner,
            credit_starved=0.0 if short else excess, sampling=groups["policy"],
            scoring=groups["teacher"], environment=groups["rollout"],
            queue_depth=max(0, self.credit - sum(groups.values())), ready=ready,
        )  # fmt: skip

    def _noisy(self, value: float) -> float:
        return value * (1 + self.noise * self._random.uniform(-1, 1))


def changes(history: Sequence[dict[str, int]]) -> int:
    return sum(before != after for before, after in pairwise(history))


def turns(history: Sequence[dict[str, int]], name: str) -> int:
    """Number of reversals in the direction of a pool's changes."""
    moves = [after[name] - before[name] for before, after in pairwise(history)]
    signs = [move > 0 for move in moves if move]
    return sum(earlier != later for earlier, later in pairwise(signs))


# Times of the autoscalers below, in seconds.
OF_A_RUN = {"up_after_s": 30, "down_after_s": 300, "cooldown_s": 60, "memory_s": 1800}
plants = st.builds(
    Plant, rates=st.fixed_dictionaries({name: st.floats(0.15, 3) for name in NAMES}),
    learner=st.floats(0.5, 2), noise=st.sampled_from([0.0, 0.05]),
    start_s=st.sampled_from([0.0, 20.0, 70.0]), seed=st.integers(0, 9),
)  # fmt: skip


@settings(max_examples=12)
@given(plant=plants)
def test_pools_reach_what_the_learner_needs_and_stay(plant: Plant) -> None:
    scaler = Autoscaler(pools(maximum=20), **OF_A_RUN)
    plant.drive(scaler, 3600)
    settled = plant.drive(scaler, 7200)
    least = plant.needed(within=0.8 - plant.noise)
    assert all(sizes[name] >= least[name] for sizes in settled for name in NAMES)
    assert changes(settled) <= (plant.noise > 0)  # noise may carry a wait over its threshold
    assert max(turns(plant.history, name) for name in NAMES) <= 1


@settings(max_examples=12)
@given(plant=plants)
def test_pools_shrink_when_the_load_drops(plant: Plant) -> None:
    scaler = Autoscaler(pools(maximum=20), **OF_A_RUN)
    plant.drive(scaler, 3600)
    high = dict(plant.sizes)
    plant.learner /= 4
    plant.drive(scaler, 14_400)
    settled = plant.drive(scaler, 3600)
    assert all(plant.sizes[name] <= high[name] for name in NAMES)
    # At most half of the slowest pool is idle, or it has a single member.
    tight = min(NAMES, key=lambda name: plant.sizes[name] * plant.rates[name])
    capacity = plant.sizes[tight] * plant.rates[tight]
    idle = 1 - plant.learner / capacity
    assert idle <= 0.55 or all(size == 1 for size in plant.sizes.values()), plant.sizes
    assert changes(settled) == 0


@settings(max_examples=6)
@given(plant=plants)
def test_trials_become_rare_where_workers_always_lack_credit(plant: Plant) -> None:
    plant.starved_by_excess = False
    scaler = Autoscaler(pools(maximum=20), **OF_A_RUN)
    plant.drive(scaler, 7200)
    day = plant.drive(scaler, 86_400)
    # A trial every half hour, doubled each time, fits 6 times into a day, with two changes each.
    assert all(turns(day, name) <= 14 for name in NAMES)
    waiting = [
        any(s[n] * plant.rates[n] < (0.8 - plant.noise) * plant.learner for n in NAMES) for s in day
    ]
    assert sum(waiting) / len(waiting) < 0.03
