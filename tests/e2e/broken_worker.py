"""A loss that is `policy_gradient`; with its module, calls of learner workers fail when told to."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from learner.worker import LearnerWorker
from tests.e2e.objectives import policy_gradient

BREAKS = "tests.e2e.broken_worker:breaks"
BROKEN = "ISOTHERM_TEST_BROKEN"  # a directory: a call with the name of a file there fails, once
breaks = policy_gradient
_execute = LearnerWorker.execute


def _execute_or_fail(self: LearnerWorker, method: str, argument: Any) -> Any:
    with suppress(FileNotFoundError):
        Path(os.environ[BROKEN], method).unlink()
        raise OSError(f"{method} has a broken disk")
    return _execute(self, method, argument)


if BROKEN in os.environ:
    LearnerWorker.execute = _execute_or_fail
