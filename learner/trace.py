"""Timing: seconds by stage of every step; and a profiler trace of one step, where asked.

    stages = Stages(device)
    with traced(path):                  # path None: no trace
        with stages("forward"):
            ...
    stages.take()                       # {"time/forward": 1.2}, of all spans since the last one

The trace is a file for https://ui.perfetto.dev or chrome://tracing: PyTorch's operators and, on
CUDA, its kernels, below spans of the same labels.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile, record_function

logger = logging.getLogger(__name__)

# Whether a trace is on. It is of the whole process, as PyTorch's profiler is.
_tracing = False


class Stages:
    """Wall seconds by label. A span inside another counts for both."""

    def __init__(self, device: str = "cpu") -> None:
        """`device` is the one that the stages compute on."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._cuda = torch.device(device) if torch.device(device).type == "cuda" else None

    @contextmanager
    def __call__(self, label: str) -> Iterator[None]:
        """Adds the block's wall time to `seconds[label]`, whether or not the block raises."""
        started = time.perf_counter()
        try:
            if _tracing:
                with record_function(label):
                    yield
                    self._wait()
            else:
                yield
                self._wait()
        finally:
            self.seconds[label] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """`time/<label>` metrics of the spans since the last call."""
        taken = {f"time/{label}": seconds for label, seconds in self.seconds.items()}
        self.seconds.clear()
        return taken

    def _wait(self) -> None:
        # Kernels are queued; unless waited for here, a later span would be charged for them.
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)


@contextmanager
def traced(path: Path | None) -> Iterator[None]:
    """Writes a Chrome trace of the block to `path` (JSON), whole or not at all; None: no trace.

    A block that raises leaves no file. One trace at a time, of the thread that asked for it (and
    of autograd's). It takes memory for each operator called: one step's, not a run's. A trace that
    cannot be written is reported in the log; the block runs all the same.
    """
    global _tracing
    if path is None:
        yield
        return
    assert not _tracing, "a trace is on already"
    _tracing = True
    try:
        with profile(activities=_activities()) as profiler:
            yield
    finally:
        _tracing = False
    _write(profiler, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracing:
    """Settings of the profiler trace: the step, if any, and the file."""

    step: int | None
    path: Path

    def around(self, step: int) -> AbstractContextManager[None]:
        """Context for each step; traces the chosen one."""
        return traced(self.path if step == self.step else None)


NO_TRACE = Tracing(step=None, path=Path())


def _activities() -> list[ProfilerActivity]:
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *cuda]


def _write(profiler: profile, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # PyTorch leaves files of its own beside one that it cannot write.
        with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as directory:
            made = Path(directory, path.name)
            profiler.export_chrome_trace(str(made))
            if not _ended(made):  # on a full disk, which PyTorch reports to its log alone
                raise OSError("it was cut short")
            made.replace(path)
    except (OSError, RuntimeError) as error:
        logger.warning("cannot write the trace %s: %s", path, error)


def _ended(made: Path) -> bool:
    """True if the JSON object is closed."""
    with made.open("rb") as file:
        file.seek(max(0, made.stat().st_size - 16))
        return file.read().rstrip().endswith(b"}")
