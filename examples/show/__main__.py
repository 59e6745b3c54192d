"""`python -m examples.show`: see examples/show/tasks.py."""

from __future__ import annotations

import sys

from rich.console import Console

from cluster.command import run_command
from examples.show.config import ShowConfig


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return run_command(ShowConfig, _run, argv)


def _run(config: ShowConfig, console: Console) -> None:
    from examples.show.tasks import show  # Ray and torch: not for --help

    show(config, console)


if __name__ == "__main__":
    sys.exit(main())
