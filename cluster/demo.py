"""`python -m cluster.demo`: see cluster/demos/demo.py."""

from __future__ import annotations

import sys
from functools import partial

from rich.console import Console

from cluster.command import run_command
from cluster.config.demos import DemoConfig
from cluster.run_files.out_directory import claimed_directory


def _run(config: DemoConfig, console: Console) -> None:
    print_line = partial(console.print, highlight=False)
    with claimed_directory(
        config.out, "demo", print_line
    ) as out:  # checked before the slow imports
        from cluster.demos.demo import demo  # Ray and torch, which --help does not need

        demo(config, out, console)


main = partial(run_command, DemoConfig, _run)

if __name__ == "__main__":
    sys.exit(main())
