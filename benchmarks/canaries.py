"""Share of a teacher's time that canaries take: steps of rows scored with and without them.

    python -m benchmarks.canaries [prompts_per_step=8] [group_size=4] [rounds=40]

One embedded teacher of 5.8 M parameters scores a step of random rows, one call per group. In every
other step, one of the calls carries the canaries. The printed shares are those of verify.every=1
and of the default. A step also has other work, so the share of a step's time is smaller. The same
is measured for a copy of the teacher in the learner (estimator=full): its pass, and its canary.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import chz
import numpy as np
import torch
from rich.console import Console

from actors.embedded.engine import EmbeddedEngine
from benchmarks.pair import make_pair
from cluster.command import run_command
from cluster.config.pools import VerifySettings
from distill.engine import ScoreRequest
from distill.handshake.canary import CanaryRows
from distill.sampling import UNSCALED
from learner.canaries import CopyQuestion, training_rows, watched
from learner.teachers import LocalTeachers

T = 0.7


@chz.chz
class CanaryBenchConfig:
    """Share of a teacher's time that canaries take."""

    prompts_per_step: int = chz.field(default=8, doc="groups a step")
    group_size: int = chz.field(default=4, doc="rows a group")
    prompt_tokens: int = chz.field(default=64, doc="tokens of a prompt")
    new_tokens: int = chz.field(default=64, doc="tokens of a response")
    rounds: int = chz.field(default=40, doc="steps with canaries, and as many without")


def step_of_rows(config: CanaryBenchConfig, vocab_size: int, seed: int) -> list[list[ScoreRequest]]:
    """Calls of a step: one per group, whose rows share their prompt."""
    rng = np.random.default_rng(seed)

    def some(length: int) -> np.ndarray:
        return rng.integers(2, vocab_size, size=length).astype(np.int32)

    def group() -> list[ScoreRequest]:
        prompt_T = some(config.prompt_tokens)
        return [
            ScoreRequest(
                tokens_T=np.concatenate([prompt_T, some(config.new_tokens)]),
                start=len(prompt_T),
                temperatures=(T, UNSCALED),
            )
            for _ in range(config.group_size)
        ]

    return [group() for _ in range(config.prompts_per_step)]


async def measure(config: CanaryBenchConfig, model: str) -> tuple[float, float]:
    """Median seconds of a step without canaries, and of one with canaries in one of its calls."""
    engine = EmbeddedEngine(model_path=model, threads=1)
    rows = CanaryRows.of(await engine.info(), T)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(2 * config.rounds + 2):
        calls = step_of_rows(config, rows.vocab_size, seed)
        if carries := bool(seed % 2):
            calls[0] = [*calls[0], *rows.requests]
        began = time.perf_counter()
        for call in calls:
            await engine.score(call)
        if seed >= 2:  # the first of each kind warms up
            seconds[carries].append(time.perf_counter() - began)
    await engine.close()
    return median(seconds[False]), median(seconds[True])


def measure_copy(config: CanaryBenchConfig, model: str) -> tuple[float, float]:
    """Median seconds of a teacher copy for a step's distributions, and for a canary."""
    teachers = LocalTeachers({"": model}, dtype=torch.float32, device="cpu")
    [copy] = watched(teachers, token_budget=4096)
    rows = CanaryRows.of(copy.answer(CopyQuestion(temperature=T)).scored.info, T)
    seconds: tuple[list[float], list[float]] = ([], [])
    for seed in range(config.rounds + 1):
        calls = step_of_rows(config, rows.vocab_size, seed)
        groups = [[row for r in call for row in training_rows(r, "")[:1]] for call in calls]
        began = time.perf_counter()
        for rows_B in groups:
            teachers.models[""].read(rows_B, np.empty(0, np.int32), 4096)
        passed = time.perf_counter()
        copy.answer(CopyQuestion(temperature=T))
        if seed:
            seconds[0].append(passed - began)
            seconds[1].append(time.perf_counter() - passed)
    return median(seconds[0]), median(seconds[1])


def print_measured(config: CanaryBenchConfig, console: Console) -> None:
    with TemporaryDirectory() as directory:
        pair = make_pair(Path(directory), num_prompts=1)
        without, with_them = asyncio.run(measure(config, pair.teacher))
        passes, canary = measure_copy(config, pair.teacher)
    every = VerifySettings().canary_every
    added = with_them - without
    console.print(
        f"a step of {config.prompts_per_step * config.group_size} rows of "
        f"{config.prompt_tokens + config.new_tokens} tokens: {without:.3f} s of the teacher; "
        f"canaries add {1e3 * added:.1f} ms, {added / without:.2%} of each step that has them and "
        f"{added / without / every:.2%} with one every {every} steps",
        highlight=False,
    )
    console.print(
        f"a copy in the learner: {passes:.3f} s for the same step's distributions; a canary takes "
        f"{1e3 * canary:.1f} ms, {canary / passes / every:.2%} of that with one every {every} "
        "steps",
        highlight=False,
    )


if __name__ == "__main__":
    raise SystemExit(run_command(CanaryBenchConfig, print_measured, None))
