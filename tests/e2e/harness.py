"""Start runs in this process or as a separate command, and read their output files."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import cluster.run
from cluster.config.recipes import make
from cluster.jsonl_log import read_lines
from cluster.queue.journal import read_journal
from cluster.run_files.metric_table import described
from tests.rows import write_rows
from tests.waiting import DEADLINE_S, until

REPOSITORY = Path(__file__).parents[2]


def opd_settings(pair: Any, **overrides: object) -> dict[str, Any]:
    """Settings of a small OPD run on a tiny pair."""
    return {
        "student": pair.student, "teacher": pair.teacher, "prompts": pair.prompts,
        "temperature": 0.7, "steps": 6, "prompts_per_step": 4, "group_size": 2,
        "max_new_tokens": 8, "lr": 3e-3, "checkpoint_every": 2, "eval_size": 2,
        "engine": "embedded", "estimator": "sampled",
    } | overrides  # fmt: skip


def opd_arguments(pair: Any, out: Path, **overrides: object) -> list[str]:
    """`opd_settings` as arguments of the command."""
    return [f"{name}={value}" for name, value in opd_settings(pair, out=out, **overrides).items()]


def train(
    recipe: str, out: Path, *, console: Any = None, observer: Any = None, **settings: Any
) -> list[dict[str, float]]:
    """Run a recipe in this process; return `metrics(out)`."""
    config = make(recipe, out=str(out), **settings)
    cluster.run.run(config, console or Console(quiet=True), observer)
    return metrics(out)


def distil(pair: Any, out: Path, **overrides: Any) -> list[dict[str, float]]:
    """Run the small OPD run in this process only."""
    return train("opd", out, **opd_settings(pair, **{"local": True, **overrides}))


def taught(model: Path, rows: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Fine-tune a tiny chat model on these conversations in `folder`/sft."""
    out = folder / "sft"
    train(
        "sft", out, model=str(model), data=write_rows(folder / "book.jsonl", *rows), steps=80,
        batch_size=32, lr=4e-3, checkpoint_every=1000, local=True,
    )  # fmt: skip
    return str(out / "final")


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    """Start `python -m module arguments` in its own process group."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments], cwd=REPOSITORY,
        env={**os.environ, "PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for the end with this exit code; return all output."""
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"the run hung; it printed:\n{output}") from None
    assert process.returncode == code, output
    return output


def interrupt(process: subprocess.Popen[str], signum: signal.Signals = signal.SIGINT) -> str:
    """End a run by a signal, like Ctrl-C; return all output."""
    process.send_signal(signum)
    return finish(process, 128 + signum)


def run(module: str, *arguments: str, code: int = 0) -> str:
    return finish(start(module, *arguments), code)


def metrics(out: Path) -> list[dict[str, float]]:
    """Metrics of each optimizer step."""
    return [line for line in lines(out) if "time/step" in line]


def evaluations(out: Path) -> list[dict[str, float]]:
    """Metrics of each evaluation, including the teachers', without those in a step's line."""
    return [line for line in lines(out) if "time/step" not in line]


def measured(validation: Mapping[str, float]) -> set[str]:
    """Names of the metrics of held-out rows, without those of single sources."""
    names = {name.partition("/source=")[0] for name in validation}
    return {name.removeprefix("validation/") for name in names} - {"time/validation"}


def lines(out: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl. Fails for a metric that is not in the table of metrics."""
    found = read_lines(out / "metrics.jsonl", {"step"})
    assert not {name for line in found for name in line if described(name) is None}
    return found


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    """Lines of events.jsonl of one kind."""
    return [
        event for event in read_lines(out / "events.jsonl", {"event"}) if event["event"] == kind
    ]


def process_of(who: str, out: Path) -> int:
    """Process id of the newest actor with this name in messages."""
    return [event["pid"] for event in events(out, "start") if event["who"] == who][-1]


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for a condition of a running process; fail with its output if it ends first."""
    until(lambda: ready() or process.poll() is not None)
    assert process.poll() is None or ready(), f"it ended too early:\n{process.communicate()[0]}"


def trained_groups(out: Path) -> list[int]:
    """Sorted ids of the groups in the final weights, with repetitions."""
    steps: dict[int, list[int]] = {}
    for event in read_journal(out / "ledger.jsonl"):
        # Again, after the learner went back to a checkpoint; and after a push beside a step.
        if event["event"] in ("push", "train"):
            steps = {version: ids for version, ids in steps.items() if version < event["version"]}
            steps[event["version"]] = event["ids"]
    return sorted(group_id for ids in steps.values() for group_id in ids)
