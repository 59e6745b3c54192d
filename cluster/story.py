"""`python -m cluster.story out=DIR`: the report, on whose timeline the run's events stand."""

from __future__ import annotations

import sys

from cluster.inspect.report.command import main as report


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    print("cluster.story writes the report: html= names the page, out/report.html without it")
    return report(argv)


if __name__ == "__main__":
    sys.exit(main())
