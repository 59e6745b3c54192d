"""Strikes at a running job at random moments, and the time until it has recovered.

    strike -> the victims' "restart" events     seconds until they serve again
           -> two more steps                    seconds until the run goes on as before

One seed decides the moments and the victims; their effect depends on the machine.
"""

import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import psutil

from tests.chaos.tortured import ChaosError, TorturedRun

STEPS_AFTER = 2
_LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Kind of strike.

    Attributes:
        victims: regular expression of the names of actors to choose from; "" strikes none of them.
        act: strikes the process of the chosen actor (0 without one).
        deadly: True if an actor must die, False if none may.
        answers: actor that must be back after recovery, if not the victim itself.
    """

    name: str
    victims: str
    act: Callable[[int], None]
    deadly: bool = True
    answers: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Result of a strike. Seconds are from the strike; `served_s` is None if no actor died.

    `others` died with the victim.
    """

    kind: str
    victim: str
    step: int
    served_s: float | None
    steps_s: float
    others: tuple[str, ...]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    """Stop the process until it is ended."""
    os.kill(pid, signal.SIGSTOP)


def slow_down(pid: int, seconds: float) -> None:
    """Stop the process for a while."""
    process = psutil.Process(pid)
    process.suspend()
    try:
        time.sleep(seconds)
    finally:
        process.resume()


def kill_child(pid: int, words: str) -> None:
    """Kill the descendant of a process whose command line or title has these words."""
    for child in psutil.Process(pid).children(recursive=True):
        if words in " ".join(child.cmdline()) + child.name():
            child.kill()
            return
    raise ChaosError(f"process {pid} has no child with {words!r} in its command line")


WORKER, POLICY, TEACHER = r"rollout worker \d+", r"policy engine \d+", r"teacher engine \d+"
# A title ends where the expression does.
LEARNER, FOLLOWER, QUEUE, EVALUATOR = "learner", r"learner worker \d+", "queue", "evaluator"

KILLS = (
    Kind(name="worker killed", victims=WORKER, act=kill),
    Kind(name="policy killed", victims=POLICY, act=kill),
    Kind(name="teacher killed", victims=TEACHER, act=kill),
    Kind(name="learner killed", victims=LEARNER, act=kill),
    Kind(name="queue killed", victims=QUEUE, act=kill),
    Kind(name="evaluator killed", victims=EVALUATOR, act=kill),
)
OF_FOLLOWERS = (
    Kind(name="learner worker killed", victims=FOLLOWER, act=kill, answers=LEARNER),
    Kind(name="learner worker hangs", victims=FOLLOWER, act=stop, answers=LEARNER),
)
WORKER_HANGS = Kind(name="worker hangs", victims=WORKER, act=stop)
HANGS = (
    WORKER_HANGS,
    Kind(name="policy hangs", victims=POLICY, act=stop),
    Kind(name="teacher hangs", victims=TEACHER, act=stop),
    Kind(name="learner hangs", victims=LEARNER, act=stop),
    Kind(name="queue hangs", victims=QUEUE, act=stop),
)
SERVER_KILLS = tuple(
    Kind(
        name=f"SGLang's {name} killed",
        victims=f"{POLICY}|{TEACHER}",
        act=partial(kill_child, words=words),
    )
    for name, words in (
        ("server", "actors.sglang.launch"),
        ("scheduler", "sglang::scheduler"),
        ("detokenizer", "sglang::detokenizer"),
    )
)


def slow_teacher(seconds: float) -> Kind:
    return Kind(
        name="teacher slow", victims=TEACHER, act=partial(slow_down, seconds=seconds), deadly=False
    )


@dataclass
class Monkey:
    """Strikes at a run.

    Args:
        print_line: prints a line for people.
    """

    run: TorturedRun
    seed: int
    print_line: Callable[[str], None] = print
    strikes: list[Strike] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.print_line(f"the monkey's seed is {self.seed}")

    def plan(self, kinds: Sequence[Kind], number: int) -> list[Kind]:
        """Random order of `count` strikes, with all kinds equally often."""
        rounds = [kinds[i % len(kinds)] for i in range(number)]
        self.random.shuffle(rounds)
        return rounds

    def strike(self, kind: Kind) -> Strike:
        """Strike once, and wait until the run has recovered.

        Raises:
            ChaosError: it does not recover, or the run ends.
        """
        time.sleep(self.random.uniform(0, _LONGEST_PAUSE_S))
        victim, pid = self._victim(kind)
        since, step = time.time(), self.run.step
        kind.act(pid)
        if kind.deadly:
            self.run.wait(
                partial(self._all_back, kind.answers or victim, since), f"{kind.name}: {victim}"
            )
        served = self._last_return(since)
        self.run.wait_for_steps(STEPS_AFTER)
        steps_s = time.time() - since
        # Other victims must be back before the next strike, too.
        self.run.wait(lambda: not self._away(since), f"those that died with {victim}")
        others = tuple(sorted(self._dead(since) - {kind.answers or victim, victim}))
        strike = Strike(
            kind=kind.name, victim=victim, step=step, served_s=served if kind.deadly else None,
            steps_s=steps_s, others=others,
        )  # fmt: skip
        if not kind.deadly and self._dead(since):
            self.problems.append(f"{kind.name}: {sorted(self._dead(since))} died")
        self.strikes.append(strike)
        self.print_line(_line(strike))
        return strike

    def kill_the_job(self) -> None:
        """Send SIGKILL to the driver; the same command continues from the newest checkpoint."""
        time.sleep(self.random.uniform(0, _LONGEST_PAUSE_S))
        since, step = time.time(), self.run.step
        self.run.signal(signal.SIGKILL)
        self.run.join()
        left_over = self.run.left_over(but_agents=True)
        self.problems += [f"a killed job leaves {left}" for left in left_over]
        self.run.start()
        self.run.wait(lambda: self.run.step > 0 and self._started(since), "the job to go on")
        served = time.time() - since
        self.run.wait_for_steps(STEPS_AFTER)
        self.strikes.append(
            Strike(
                kind="whole job killed", victim="driver", step=step, served_s=served,
                steps_s=time.time() - since, others=(),
            )
        )  # fmt: skip
        self.print_line(_line(self.strikes[-1]))

    def _started(self, since: float) -> bool:
        return any(e["event"] == "start" and e["who"] == LEARNER for e in self._events(since))

    def finish(self, prompts_per_step: int, more_steps: int = 5) -> list[str]:
        """End the job with SIGINT, let the next one finish by itself; return all problems."""
        self.run.signal(signal.SIGINT)
        if (code := self.run.join()) != 128 + signal.SIGINT:
            self.problems.append(f"SIGINT ended the job with {code}")
        steps = self.run.step + more_steps
        self.run.start(steps=steps)
        if code := self.run.join():
            self.problems.append(f"the last job ended with {code}, see {self.run.log}")
        self.problems += self.run.problems(steps, prompts_per_step)
        return self.problems

    def _victim(self, kind: Kind) -> tuple[str, int]:
        """(name, process) of a random actor of the kind; waits until there is one."""
        if not kind.victims:
            return "", 0

        def able() -> dict[str, int]:
            return {w: p for w, p in self.run.pids().items() if re.fullmatch(kind.victims, w)}

        self.run.wait(lambda: bool(able()), f"a victim to be there: {kind.name}")
        chosen = self.random.choice(sorted(able()))
        return chosen, able()[chosen]

    def _all_back(self, who: str, since: float) -> bool:
        events = self._events(since)
        returned = {event["who"] for event in events if event["event"] == "restart"}
        return (who in returned or (not who and bool(returned))) and not self._away(since)

    def _away(self, since: float) -> set[str]:
        """Actors that died since then and do not serve again; a worker is back with its learner."""
        away: set[str] = set()
        for event in self._events(since):
            if event["event"] == "death":
                away.add(LEARNER if re.fullmatch(FOLLOWER, event["who"]) else event["who"])
            elif event["event"] == "restart":
                away.discard(event["who"])
        return away

    def _dead(self, since: float) -> set[str]:
        return {event["who"] for event in self._events(since) if event["event"] == "death"}

    def _last_return(self, since: float) -> float | None:
        returns = [e["t"] for e in self._events(since) if e["event"] == "restart"]
        return max(returns) - since if returns else None

    def _events(self, since: float) -> list[dict]:
        return [event for event in self.run.events if event["t"] >= since]


def _line(strike: Strike) -> str:
    served = "" if strike.served_s is None else f" serves after {strike.served_s:.1f} s;"
    others = f"; {', '.join(strike.others)} died, too" if strike.others else ""
    return (
        f"step {strike.step}: {strike.kind} ({strike.victim or 'nobody'}):{served} "
        f"{STEPS_AFTER} steps after {strike.steps_s:.1f} s{others}"
    )


def table(strikes: Sequence[Strike]) -> list[str]:
    """Recovery by kind, as lines of a Markdown table."""
    lines = [
        "| strike | times | serves again, s: median / max | 2 more steps, s: median / max |",
        "|---|---|---|---|",
    ]
    for kind in dict.fromkeys(strike.kind for strike in strikes):
        of_kind = [strike for strike in strikes if strike.kind == kind]
        served = [strike.served_s for strike in of_kind if strike.served_s is not None]
        steps = [strike.steps_s for strike in of_kind]
        lines.append(f"| {kind} | {len(of_kind)} | {_range(served)} | {_range(steps)} |")
    return lines


def _range(seconds: Sequence[float]) -> str:
    if not seconds:
        return "nobody died"
    return f"{statistics.median(seconds):.1f} / {max(seconds):.1f}"
