"""One check in a process of its own: its last line is the outcome, as JSON."""

from __future__ import annotations

import json
import sys
import time
import traceback
from typing import Any

from distill.models.loading import first_line
from tests.gpu.checks import CHECKS
from tests.gpu.setting import Failed, Setting, Skipped


def outcome_of(name: str, setting: Setting) -> dict[str, Any]:
    """`status` (pass or fail), `why`, `numbers` and `seconds`."""
    started = time.perf_counter()
    status, why, numbers = "pass", "", {}
    try:
        numbers = CHECKS[name].run(setting)
    except Skipped as reason:
        status, why = "skipped", str(reason)
    except Failed as reason:
        status, why = "fail", str(reason)
    except Exception as error:  # whatever else goes wrong on a machine that nobody has seen
        traceback.print_exc()
        status, why = "fail", f"{type(error).__name__}: {first_line(error)}"
    seconds = time.perf_counter() - started
    return {"status": status, "why": why, "numbers": numbers, "seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(outcome_of(sys.argv[1], Setting(**json.loads(sys.argv[2])))), flush=True)
