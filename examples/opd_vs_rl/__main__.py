"""`python -m examples.opd_vs_rl`: see examples/opd_vs_rl/race.py."""

from __future__ import annotations

import sys
from functools import partial

from rich.console import Console

from cluster.command import run_command
from examples.opd_vs_rl.config import OpdVsRlConfig


def _run(config: OpdVsRlConfig, console: Console) -> None:
    from examples.opd_vs_rl.race import measure  # Ray and torch: not for --help

    measure(config, console)


main = partial(run_command, OpdVsRlConfig, _run)

if __name__ == "__main__":
    sys.exit(main())
