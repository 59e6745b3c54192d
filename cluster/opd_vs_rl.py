"""`python -m cluster.opd_vs_rl`: see cluster/demos/opd_vs_rl.py."""

from __future__ import annotations

import sys

from rich.console import Console

from cluster.command import run_command
from cluster.config.demos import OpdVsRlConfig


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return run_command(OpdVsRlConfig, _run, argv)


def _run(config: OpdVsRlConfig, console: Console) -> None:
    from cluster.demos.opd_vs_rl import measure  # Ray and torch: not for --help

    measure(config, console)


if __name__ == "__main__":
    sys.exit(main())
