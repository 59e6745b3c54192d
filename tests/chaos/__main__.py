"""`make chaos`: strike runs at random and check that they finish and add up."""

import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType

os.environ.update(
    RAY_AUTH_MODE="disabled", RAY_memory_monitor_refresh_ms="0", RAY_USAGE_STATS_ENABLED="0",
    HF_HUB_OFFLINE="1", OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"),
    TOKENIZERS_PARALLELISM="false",
)  # fmt: skip

from functools import partial

import chz
from rich.console import Console

from cluster.command import run_command
from distill.errors import ConfigError, IsothermError
from tests.chaos.monkey import table
from tests.chaos.parts import PARTS, parts
from tests.chaos.tortured import ChaosError

_ALL = ("embedded", *PARTS)


@chz.chz
class ChaosConfig:
    """Strikes at runs at random; every group must be trained exactly once."""

    out: str | None = chz.field(default=None, doc="directory of the runs; default: a temporary one")
    seed: int | None = chz.field(default=None, doc="of moments and victims; default: a new one")
    strikes: int = chz.field(default=30, doc="strikes at the run with embedded engines")
    parts: str = chz.field(default=",".join(_ALL), doc="which runs, separated by commas")
    deadline_s: float = chz.field(default=5400, doc="of all of it; against hangs only, seconds")

    @chz.validate
    def _known(self) -> None:
        if unknown := set(self.parts.split(",")) - set(_ALL):
            raise ConfigError(f"parts={','.join(sorted(unknown))}: there are {', '.join(_ALL)}")
        if self.strikes < 1:
            raise ConfigError(f"strikes={self.strikes} must be at least 1")


def strike_all(config: ChaosConfig, console: Console) -> None:
    """Run the parts; raise IsothermError (exit code 1) if one of them finds a problem."""
    out = Path(config.out or tempfile.mkdtemp(prefix="chaos-")).resolve()
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"out={out} is not empty; choose another out=")
    seed = random.SystemRandom().randrange(1 << 16) if config.seed is None else config.seed
    console.print(f"seed={seed}, everything is in {out}")
    signal.signal(signal.SIGALRM, _too_late)
    signal.setitimer(signal.ITIMER_REAL, config.deadline_s)
    wrong = [name for name in config.parts.split(",") if not _part(name, config, out, seed)]
    signal.setitimer(signal.ITIMER_REAL, 0)
    if wrong:
        raise IsothermError(f"chaos, seed={seed}: problems in {', '.join(wrong)}")


def _too_late(_signum: int, _frame: FrameType | None) -> None:
    raise TimeoutError("deadline_s is over")


def _part(name: str, config: ChaosConfig, out: Path, seed: int) -> bool:
    """True if the part found no problem, or cannot run here."""
    print(f"\n== {name}", flush=True)
    started = time.monotonic()
    try:
        monkey = parts(config.strikes)[name](out / name, seed)
    except TimeoutError:
        raise
    except (ChaosError, AssertionError) as error:
        traceback.print_exception(error)
        return False
    if isinstance(monkey, str):
        print(f"left out: {monkey}", flush=True)
        return True
    if monkey.strikes:
        print("\n".join(table(monkey.strikes)))
    print(f"{len(monkey.strikes)} strikes, {time.monotonic() - started:.0f} s")
    for problem in monkey.problems:
        print(f"PROBLEM: {problem}")
    print("every group was trained exactly once" if not monkey.problems else "", flush=True)
    return not monkey.problems


main = partial(run_command, ChaosConfig, strike_all)

if __name__ == "__main__":
    sys.exit(main())
