"""`make gpu`: the checks of `benchmarks/gpu/checks.py`, each in a process, within half an hour.

Appends one line per check to OUT/results.jsonl, prints a Markdown table, and exits with 1 if a
check failed. Without a GPU it prints what it would run; `device=cpu size=tiny` runs the same checks
small. `only=` takes names of checks and of parts. Each part ends within ten minutes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import chz
import torch
from rich.console import Console

from benchmarks.gpu.checks import CHECKS, PARTS
from benchmarks.gpu.processes import run_in_process
from benchmarks.gpu.results import Results
from benchmarks.gpu.setting import Setting, Size
from cluster.command import run_command
from distill.errors import ConfigError, IsothermError
from distill.lookup import known_names


class ChecksFailed(IsothermError):
    """Some checks failed: this machine, or isotherm on it, has a fault."""

    exit_code = 1


@chz.chz
class GpuConfig:
    """Checks of a machine with a GPU."""

    out: str = chz.field(default="outputs/gpu", doc="directory of results.jsonl and the logs")
    device: Literal["auto", "cpu", "cuda"] = chz.field(default="auto", doc="cpu: run them there")
    size: Literal["auto", "tiny", "full"] = chz.field(
        default="auto", doc="of the models; auto: full on a GPU, tiny on a CPU"
    )
    only: str = chz.field(default="", doc="names of checks and parts, with commas between them")
    budget_s: float = chz.field(
        default=1800.0, doc="seconds for all checks together; no check is begun after them"
    )
    resume: bool = chz.field(
        default=False, doc="leave out what has passed on this device by OUT/results.jsonl"
    )
    scratch: str | None = chz.field(
        default=None, doc="directory of the checks' models, which is kept; default: temporary"
    )

    @property
    def names(self) -> list[str]:
        """Names of the requested checks, in the order in which they run.

        Raises:
            ConfigError: a name of no check and no part.
        """
        asked = {name.strip() for name in self.only.split(",")} if self.only else set(PARTS)
        for name in asked:
            if name not in CHECKS and name not in PARTS:
                known = known_names(name, [*PARTS, *CHECKS])
                raise ConfigError(f"only={self.only}: {known}")
        return [name for name, check in CHECKS.items() if {name, check.part} & asked]


def run_checks(config: GpuConfig, console: Console) -> None:
    """Run the checks and report their results.

    Raises:
        ConfigError: device=cuda without a GPU, or an unknown name.
        ChecksFailed: names the checks that failed.
    """
    names, cuda = config.names, torch.cuda.is_available()
    if config.device == "cuda" and not cuda:
        raise ConfigError("device=cuda and torch sees no GPU here; `isotherm doctor` says why")
    if config.device == "auto" and not cuda:
        for name in names:
            console.print(f"{name}: {CHECKS[name].question}", highlight=False, markup=False)
        console.print("no CUDA GPU here: nothing is checked (device=cpu size=tiny runs all small)")
        return
    device: Literal["cpu", "cuda"] = "cuda" if config.device == "auto" else config.device
    default: Size = "full" if device == "cuda" else "tiny"
    results = Results(Path(config.out), device, default if config.size == "auto" else config.size)
    if config.resume:
        names = [name for name in names if results.status(name) != "pass"]
    _run(config, names, results, console)
    console.print(results.table(), highlight=False, markup=False, soft_wrap=True)
    if failed := [name for name in names if results.status(name) == "fail"]:
        raise ChecksFailed(f"failed: {', '.join(failed)}; the logs are in {config.out}")


def _run(config: GpuConfig, names: list[str], results: Results, console: Console) -> None:
    end = time.monotonic() + config.budget_s

    def record(name: str, outcome: dict[str, Any]) -> None:
        results.add(name, outcome)
        line = f"{name}: {outcome['status']} after {outcome['seconds']:.0f} s {outcome['why']}"
        console.print(line, highlight=False, markup=False)

    with _scratch(config) as scratch:
        setting = Setting(device=results.device, size=results.size, scratch=scratch)
        for process in _processes(names, results.size):
            run_in_process(process, setting, results.out, end, record)


@contextmanager
def _scratch(config: GpuConfig) -> Iterator[str]:
    """Directory of the checks' models."""
    if config.scratch is not None:
        Path(config.scratch).mkdir(parents=True, exist_ok=True)
        yield config.scratch
        return
    with tempfile.TemporaryDirectory(prefix="isotherm-gpu-") as scratch:
        yield scratch


def _processes(names: list[str], size: Size) -> Iterator[list[str]]:
    """Names of the checks of each process. Tiny checks share one: they leave little behind."""

    def process(name: str) -> str:
        return CHECKS[name].part if size == "tiny" or CHECKS[name].shares else name

    for _, together in groupby(names, process):
        yield list(together)


if __name__ == "__main__":
    sys.exit(run_command(GpuConfig, run_checks, None))
