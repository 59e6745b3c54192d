"""`python -m examples.show`: see examples/show/tasks.py."""

from __future__ import annotations

import sys
from functools import partial

from rich.console import Console

from cluster.command import run_command
from examples.show.config import ShowConfig


def _run(config: ShowConfig, console: Console) -> None:
    from examples.show.tasks import show  # Ray and torch: not for --help

    show(config, console)


main = partial(run_command, ShowConfig, _run)

if __name__ == "__main__":
    sys.exit(main())
