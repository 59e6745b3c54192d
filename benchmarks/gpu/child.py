"""Process that runs some checks, and writes one line of JSON per check to a pipe."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.checks import CHECKS
from benchmarks.gpu.setting import Failed, Setting, Skipped
from distill.models.loading import first_line


def outcome_of(name: str, setting: Setting) -> dict[str, Any]:
    """`status` (pass, fail or skipped), `why`, `numbers` and `seconds` of a check."""
    started = time.perf_counter()
    status, why, numbers = "pass", "", {}
    try:
        numbers = CHECKS[name].run(name, setting)
    except Skipped as reason:
        status, why = "skipped", str(reason)
    except Failed as reason:
        status, why = "fail", str(reason)
    except Exception as error:  # any fault of an unknown machine
        traceback.print_exc()
        status, why = "fail", f"{type(error).__name__}: {first_line(error)}"
    seconds = time.perf_counter() - started
    return {"status": status, "why": why, "numbers": numbers, "seconds": seconds}


def main(pipe: int, names: Sequence[str], setting: Setting) -> None:
    """Run the checks one after the other; write each outcome when its check ends."""
    with os.fdopen(pipe, "w", buffering=1) as outcomes:
        for name in names:
            outcomes.write(json.dumps(outcome_of(name, setting)) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","), Setting(**json.loads(sys.argv[3])))
