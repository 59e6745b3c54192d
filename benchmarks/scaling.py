"""One learner worker against two: seconds of a step, memory per worker, saving and gathering.

Every worker is a process with one thread. Both learners exist at the same time and do the same work
alternately; the idle one waits on a socket. Two workers need two idle cores to be faster in wall
time. The table therefore also has the CPU time of the busiest worker, which includes neither
waiting nor other load on the machine. Memory is that of each process, from the kernel.

There are two kinds of steps: samples that share prompts, whose prompts run once per micro-batch,
and samples with a prompt each.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Column, Table
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from benchmarks.learner import new_checkpoint, uneven_rows
from benchmarks.memory import kilobytes
from distill.objective.batching import TrainingRow
from distill.objective.settings import ObjectiveConfig
from distill.weights.model_weights import COPY_BYTES, names_of, plan_buckets
from learner.checkpoint import CheckpointStore
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss
from learner.process_group import Membership, WorkerGroup
from learner.sharding import local
from learner.worker import LearnerWorker
from tests.learner.piped_followers import Seat, meet, serve

# Hidden size and layers: 27 M parameters.
SIZE = (512, 8)
SIZES = (1, 2)
KINDS = ("shared prompts", "a prompt each")
STEPS, SAVES = 4, 3  # of a kind's steps the first warms the kernels and counts in no median
DEADLINE_S = 300.0
LOSSES = (PolicyObjectiveLoss(objective=ObjectiveConfig()),)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """MB of one worker, above those of Python and its imports before the learner exists.

    Attributes:
        share: weights that it holds, by their sizes.
        loading: peak until the learner is ready, including a mapped checkpoint file.
        held: resident set when it is ready, including late imports and memory that malloc keeps.
        first: peak of a step on two short rows, which adds gradients and moments.
        gathering: peak of gathering all weights, a portion at a time.
        saving: peak of writing checkpoints; may include memory that malloc keeps.
        stepping: peak of full steps, with their activations.
    """

    share: float
    loading: float
    held: float
    first: float
    gathering: float
    saving: float
    stepping: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Medians of one kind of steps. `speed_up`: seconds of one worker over those of this learner.

    `cpu`: CPU time of the busiest worker, instead of wall time.
    """

    kind: str
    seconds: float
    tokens_per_s: float
    speed_up: float
    cpu_seconds: float
    cpu_speed_up: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """A learner of this number of workers: medians of wall time, and each worker's memory."""

    workers: int
    steps: Sequence[StepRow]
    save_s: float
    gather_s: float
    memory: Sequence[WorkerMemory]


def measure_scaling(scratch: Path, temperature: float, repeats: int = STEPS) -> dict[str, Any]:
    """`bytes` of the weights, and `learners`: `ScalingRow`s as dictionaries, one worker first.

    Raises:
        AssertionError: a worker did not answer, or two workers have a different loss than one.
    """
    model, total_steps = new_checkpoint(scratch, *SIZE), 1 + repeats * len(KINDS)
    config = LearnerConfig.of(model=model, total_steps=total_steps, threads=1, device="cpu")
    with ExitStack() as stack:
        teams = [stack.enter_context(_Team(config, size, scratch)) for size in SIZES]

        def in_turns(what: str, arguments: Sequence[Any]) -> list[list[Any]]:
            """Each team's results by argument; records each worker's peak meanwhile."""
            answers = [[team.do(what, argument) for team in teams] for argument in arguments]
            for team in teams:
                team.note(what)
            return answers

        in_turns("first", [temperature])
        gathers, saves = in_turns("gathering", [None] * SAVES), in_turns("saving", range(SAVES))
        kinds = [(kind, temperature, seed) for kind in KINDS for seed in range(repeats)]
        steps = in_turns("stepping", kinds)
        memory = [[WorkerMemory(**made) for made in team.memory] for team in teams]
    for one, two in steps:
        assert abs(two["loss"] - one["loss"]) < 1e-3, f"losses {one['loss']} and {two['loss']}"
    rows = [
        ScalingRow(
            workers=size,
            steps=[
                _medians(kind, [step for step in steps if step[0]["kind"] == kind][1:], i)
                for kind in KINDS
            ],
            save_s=median(save[i]["seconds"] for save in saves),
            gather_s=median(gather[i]["seconds"] for gather in gathers),
            memory=memory[i],
        )
        for i, size in enumerate(SIZES)
    ]
    return {"bytes": memory[0][0].share * 1e6, "learners": [asdict(row) for row in rows]}


def _medians(kind: str, steps: Sequence[Sequence[dict[str, Any]]], i: int) -> StepRow:
    return StepRow(
        kind=kind,
        seconds=median(step[i]["seconds"] for step in steps),
        tokens_per_s=median(step[i]["tokens"] / step[i]["seconds"] for step in steps),
        speed_up=median(step[0]["seconds"] / step[i]["seconds"] for step in steps),
        cpu_seconds=median(step[i]["cpu"] for step in steps),
        cpu_speed_up=median(step[0]["cpu"] / step[i]["cpu"] for step in steps),
    )


def _rows_of(kind: str, temperature: float, seed: int) -> list[TrainingRow]:
    rows_D = uneven_rows(temperature, seed)
    if kind == "shared prompts":
        return rows_D
    return [  # another first token, another prompt
        replace(row, tokens_T=np.concatenate([np.array([2 + i], np.int32), row.tokens_T[1:]]))
        for i, row in enumerate(rows_D)
    ]


class _Team:
    """Processes of one learner, controlled from outside."""

    def __init__(self, config: LearnerConfig, size: int, scratch: Path) -> None:
        self.memory: list[dict[str, float]] = [{} for _ in range(size)]
        context = multiprocessing.get_context("spawn")
        self._store, seats = meet(size, context, DEADLINE_S)
        self._lines: list[Connection] = []
        self._processes: list[Any] = []
        for rank, seat in enumerate(seats):
            ours, theirs = context.Pipe()
            target, more = (follower, ()) if rank else (_lead, (str(scratch),))
            process = context.Process(target=target, args=(config, seat, theirs, *more))
            process.daemon = True
            process.start()
            self._lines.append(ours)
            self._processes.append(process)

    def __enter__(self) -> _Team:
        for line in self._lines:
            self._answer(line)  # its imports are done, and there is no learner yet
        self._before = [0.0] * len(self._lines)
        self._before = self._megabytes("VmRSS")
        for line in self._lines:
            line.send("start")
        for made, line in zip(self.memory, self._lines, strict=True):
            made["share"] = self._answer(line) / 1e6
        for made, held in zip(self.memory, self._megabytes("VmRSS"), strict=True):
            made["held"] = held
        self.note("loading")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def do(self, what: str, argument: Any) -> dict[str, Any]:
        """Result of the method of `_Leader`, its `seconds`, and `cpu` of the busiest worker."""
        before, started = self._cpu_seconds(), time.perf_counter()
        self._lines[0].send((what, argument))
        answer = self._answer(self._lines[0])
        seconds = time.perf_counter() - started
        spent = [now - then for now, then in zip(self._cpu_seconds(), before, strict=True)]
        return {**answer, "seconds": seconds, "cpu": max(spent)}

    def _cpu_seconds(self) -> list[float]:
        times = [psutil.Process(process.pid).cpu_times() for process in self._processes]
        return [each.user + each.system for each in times]

    def note(self, phase: str) -> None:
        """Record each worker's peak since the last call as that of this phase."""
        for made, peak in zip(self.memory, self._megabytes("VmHWM"), strict=True):
            made[phase] = peak
        for process in self._processes:
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak starts again here

    def _megabytes(self, name: str) -> list[float]:
        found = [kilobytes(f"/proc/{process.pid}/status", name) for process in self._processes]
        return [kb * 1024 / 1e6 - own for kb, own in zip(found, self._before, strict=True)]

    def _answer(self, line: Connection) -> Any:
        assert line.poll(DEADLINE_S), "a worker did not answer; its error is on stderr"
        return line.recv()


def follower(config: LearnerConfig, seat: Seat, line: Connection | None = None) -> None:
    """Process of a follower, ended by a kill. With a `line` it reports its memory."""
    if line is not None:
        line.send("ready")
        line.recv()
    group = WorkerGroup(seat.membership, config.device)
    worker = LearnerWorker(config, LOSSES, group)
    if line is not None:
        line.send(_held_bytes(worker))
    serve(worker, seat)


def _lead(config: LearnerConfig, seat: Seat, line: Connection, scratch: str) -> None:
    line.send("ready")
    line.recv()
    leader = _Leader(config, seat.membership, Path(scratch))
    line.send(leader.held_bytes())
    while True:
        what, argument = line.recv()
        line.send(getattr(leader, what)(argument))


def _held_bytes(worker: LearnerWorker) -> int:
    """Bytes of the weights; a tied weight counts once."""
    return sum(local(parameter).nbytes for parameter in worker.model.parameters())


class _Leader:
    """Phases that the benchmark measures, by their names in `WorkerMemory`."""

    def __init__(self, config: LearnerConfig, membership: Membership, scratch: Path) -> None:
        self._learner = Learner(
            config, str(scratch), losses=LOSSES, group=WorkerGroup(membership, config.device)
        )
        self._store = CheckpointStore(scratch / f"checkpoints-{membership.size}", keep=1)
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))

    def held_bytes(self) -> int:
        return _held_bytes(self._learner.worker)

    def first(self, temperature: float) -> dict[str, Any]:
        """A step on so few tokens that it leaves gradients and moments only."""
        return self._step(uneven_rows(temperature, 0)[:2])

    def stepping(self, given: tuple[str, float, int]) -> dict[str, Any]:
        """A step of a kind, at a temperature, with a seed."""
        return {"kind": given[0], **self._step(_rows_of(*given))}

    def _step(self, rows_D: list[TrainingRow]) -> dict[str, Any]:
        metrics = self._learner.step(Part(rows_D=rows_D, loss=LOSSES[0]))
        return {"tokens": sum(row.num_trained for row in rows_D), "loss": metrics["train/loss"]}

    def saving(self, step: int) -> dict[str, Any]:
        """Save a checkpoint, until all of it is on disk."""
        write = partial(self._learner.save, tokenizer=self._tokenizer)
        self._store.save(step=step, write=write, delivery={})
        return {}

    def gathering(self, _: None) -> dict[str, Any]:
        """Gather all weights; each portion is dropped before the next."""
        weights = self._learner.weights()
        for bucket in plan_buckets(weights.layouts, COPY_BYTES):
            weights.gather(names_of(bucket))
        return {}


def scaling_tables(report: dict[str, Any]) -> list[Table]:
    """Console tables of `measure_scaling`."""
    gigabytes = report["bytes"] / 1e9
    speed = _table(
        f"learner workers, {gigabytes * 250:.0f} M parameters, fp32, a thread each, CPU",
        f"the workers share this machine's {os.cpu_count()} cores, and gloo's loopback; CPU s: the "
        "busier worker",
        "workers", "samples with", "s/step", "tokens/s", "speed-up", "CPU s", "speed-up",
    )  # fmt: skip
    whole = _table(
        f"all weights, {gigabytes * 1e3:.0f} MB",
        "saved with AdamW's moments and synced; a learner alone has them whole already",
        "workers", "s save", "s gather", "GB/s gather",
    )  # fmt: skip
    memory = _table(
        "MB of each worker above its imports: weights held, and peaks",
        "the leader loads the whole model once, at the start",
        "worker", *(field.name for field in fields(WorkerMemory)),
    )  # fmt: skip
    for row in report["learners"]:
        alone, names = row["workers"] == 1, ("leader of 2", "follower")
        for step in row["steps"]:
            speed.add_row(
                str(row["workers"]), step["kind"], f"{step['seconds']:.2f}",
                f"{step['tokens_per_s']:.0f}", f"{step['speed_up']:.2f}",
                f"{step['cpu_seconds']:.2f}", f"{step['cpu_speed_up']:.2f}",
            )  # fmt: skip
        gathered = (f"{row['gather_s']:.3f}", f"{gigabytes / row['gather_s']:.2f}")
        whole.add_row(str(row["workers"]), f"{row['save_s']:.2f}", *(() if alone else gathered))
        for name, made in zip(("alone",) if alone else names, row["memory"], strict=True):
            memory.add_row(name, *(f"{megabytes:.0f}" for megabytes in made.values()))
    return [speed, whole, memory]


def _table(title: str, caption: str, *headers: str) -> Table:
    return Table(
        *(Column(header, justify="right") for header in headers), title=title, caption=caption
    )


if __name__ == "__main__":
    made = measure_scaling(Path(sys.argv[1]), float(sys.argv[2]))
    print(json.dumps(made))
    for table in scaling_tables(made):
        Console().print(table)
