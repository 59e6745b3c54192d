"""Parts of the long form: runs with one set-up each, struck, finished and audited."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from actors.sglang.installed import sglang_installed
from tests.chaos.hanging import hanging
from tests.chaos.monkey import (
    EVALUATOR,
    HANGS,
    KILLS,
    OF_FOLLOWERS,
    SERVER_KILLS,
    WORKER_HANGS,
    Kind,
    Monkey,
    slow_teacher,
)
from tests.chaos.proxy import served_teacher
from tests.chaos.tortured import TorturedRun
from tests.e2e.ray_head import ray_head
from tests.tiny import make_tiny_pair

PROMPTS_PER_STEP = 4
_HANG_AFTER_S = 10.0
# More than any part takes, so that the monkey ends the run.
_ENDLESS = 1_000_000
_DISK_MIB = 48
_DISK_FULL_S = 12.0
_CORRUPTED_ANSWERS = 12
_CORRUPTED_SHARE = 0.15


def settings(root: Path) -> dict[str, object]:
    """Settings of a small opd run on a tiny pair, which is made under `root`."""
    root.mkdir(parents=True, exist_ok=True)
    pair = make_tiny_pair(root)
    return {
        "recipe": "opd", "student": pair.student, "teacher": pair.teacher, "prompts": pair.prompts,
        "temperature": 0.7, "steps": _ENDLESS, "prompts_per_step": PROMPTS_PER_STEP,
        "group_size": 2, "max_new_tokens": 8, "lr": 1e-4, "checkpoint_every": 5, "eval_size": 2,
        "engine": "embedded", "max_staleness": 2,
        "groups_in_flight": 3 * PROMPTS_PER_STEP, "no_progress_s": 600,
    }  # fmt: skip


@contextmanager
def struck(
    out: Path,
    arguments: Mapping[str, object],
    seed: int,
    *,
    hang_after_s: float = _HANG_AFTER_S,
    environment: Mapping[str, str] | None = None,
    deadline_s: float = 600,
) -> Iterator[Monkey]:
    """Job after its first steps, and its monkey; all of its processes end with the block."""
    numbers = {"max_restarts": 1000, "hang_after_s": hang_after_s, "stall_after_s": 30}
    run = TorturedRun(
        out, arguments, numbers=numbers, environment=environment, deadline_s=deadline_s
    )
    try:
        run.start()
        run.wait(lambda: run.step >= 2, "the first steps")
        yield Monkey(run, seed)
    finally:
        run.close()


def embedded(out: Path, seed: int, strikes: int) -> Monkey:
    """Kill and freeze every actor of a run with two workers of each kind, and the job."""
    arguments = settings(out / "pair") | {"learner_workers": 2, "rollout_workers": 2}
    kinds = (*KILLS, *OF_FOLLOWERS, *HANGS, slow_teacher(_HANG_AFTER_S / 2))
    with struck(out / "embedded", arguments, seed) as monkey:
        for number, kind in enumerate(monkey.plan(kinds, strikes), start=1):
            monkey.strike(kind)
            if number == strikes // 2:
                monkey.kill_the_job()
        monkey.finish(PROMPTS_PER_STEP)
    return monkey


def overdue(out: Path, seed: int, strikes: int = 8) -> Monkey:
    """Kill and freeze actors and the job, each when a group has just restarted."""
    arguments = settings(out / "pair") | hanging(out / "tickets")
    arguments |= {"rollout_workers": 2, "policy_engines": 2, "dtype": "bfloat16"}
    kinds = [*(kind for kind in KILLS if kind.victims != EVALUATOR), WORKER_HANGS]
    with struck(out / "overdue", arguments, seed) as monkey:
        for number, kind in enumerate(monkey.plan(kinds, strikes), start=1):
            monkey.run.wait_for_a_restart()
            monkey.strike(kind)
            if number == strikes // 2:
                monkey.run.wait_for_a_restart()
                monkey.kill_the_job()
        monkey.finish(PROMPTS_PER_STEP)
        monkey.print_line(f"{monkey.run.restarts} restarts of overdue groups")
    return monkey


def sglang(out: Path, seed: int, strikes: int = 6) -> Monkey | str:
    """Kill processes of SGLang servers, which Ray does not know."""
    if not sglang_installed():
        return "SGLang is not installed"
    arguments = settings(out / "pair") | {"engine": "sglang"}
    with struck(out / "sglang", arguments, seed, hang_after_s=30.0) as monkey:
        for kind in monkey.plan(SERVER_KILLS, strikes):
            monkey.strike(kind)
        monkey.finish(PROMPTS_PER_STEP)
    return monkey


def corrupted(out: Path, seed: int) -> Monkey | str:
    """Corrupt a share of a teacher's answers on their way."""
    if not sglang_installed():
        return "SGLang is not installed"
    arguments = settings(out / "pair")
    with served_teacher(str(arguments["teacher"]), seed) as (proxy, key):
        arguments |= {"teacher": proxy.url}
        environment = {"ISOTHERM_TEACHER_API_KEY": key}
        with struck(out / "corrupted", arguments, seed, environment=environment) as monkey:
            proxy.share = _CORRUPTED_SHARE
            monkey.run.wait(
                lambda: proxy.spoilt.total() >= _CORRUPTED_ANSWERS,
                f"{_CORRUPTED_ANSWERS} corrupted answers",
            )
            proxy.share = 0.0
            monkey.print_line(f"answers spoilt: {dict(proxy.spoilt)}, passed on: {proxy.passed}")
            monkey.finish(PROMPTS_PER_STEP)
    return monkey


def raylet(out: Path, seed: int, strikes: int = 3) -> Monkey:
    """Kill whole nodes with all their actors; the autoscaler replaces them."""
    own = {"rollout_workers": 2, "rollout_cpus": 1, "device": "cpu"}
    arguments = settings(out / "pair") | own
    with ray_head(dashboard=False, cpus=3, workers=4) as head:
        environment = {"RAY_ADDRESS": head.address, "RAY_AUTH_MODE": "disabled"}
        kind = Kind(name="node killed", victims="", act=lambda _: head.kill_a_worker_node())
        with struck(out / "raylet", arguments, seed, environment=environment) as monkey:
            for _ in range(strikes):
                monkey.strike(kind)
            monkey.finish(PROMPTS_PER_STEP)
    return monkey


def full_disk(out: Path, seed: int) -> Monkey | str:
    """Fill the disk of `out` for a while."""
    disk = out / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs", str(disk)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        return f"a small disk cannot be mounted here: {made.stderr.strip()}"
    try:
        kind = Kind(
            name="disk full", victims="", act=lambda _: _fill(disk / "ballast", _DISK_FULL_S),
            deadly=False,
        )  # fmt: skip
        with struck(disk / "run", settings(out / "pair"), seed) as monkey:
            for _ in range(2):
                monkey.strike(kind)
            if not any(event["event"] == "unsaved" for event in monkey.run.events):
                monkey.problems.append("the disk was full, and every checkpoint was saved")
            return _finished(monkey, out)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)


def _finished(monkey: Monkey, out: Path) -> Monkey:
    """Problems of the finished run, and its log, which outlives the disk."""
    try:
        monkey.finish(PROMPTS_PER_STEP)
    finally:
        (out / "full-disk.log").write_bytes(monkey.run.log.read_bytes())
    return monkey


def _fill(ballast: Path, seconds: float) -> None:
    block = os.urandom(1 << 12)
    try:
        with ballast.open("wb", buffering=0) as file:
            try:
                while file.write(block):
                    pass
            except OSError:
                pass  # no space left: that is the point
        time.sleep(seconds)
    finally:
        ballast.unlink()


PARTS: dict[str, Callable[[Path, int], Monkey | str]] = {
    "overdue": overdue, "sglang": sglang, "corrupted": corrupted, "raylet": raylet,
    "disk": full_disk,
}  # fmt: skip


def parts(strikes: int) -> dict[str, Callable[[Path, int], Monkey | str]]:
    """Parts by name, in order. A part returns the reason if it cannot run here."""
    return {"embedded": partial(embedded, strikes=strikes), **PARTS}
