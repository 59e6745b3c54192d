"""`python -m examples.opd_vs_rl`: see examples/opd_vs_rl/race.py."""

from __future__ import annotations

import sys

from rich.console import Console

from cluster.command import run_command
from examples.opd_vs_rl.config import OpdVsRlConfig


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return run_command(OpdVsRlConfig, _run, argv)


def _run(config: OpdVsRlConfig, console: Console) -> None:
    from examples.opd_vs_rl.race import measure  # Ray and torch: not for --help

    measure(config, console)


if __name__ == "__main__":
    sys.exit(main())
