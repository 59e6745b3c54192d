"""Timing: seconds of each stage of a step, and an optional profiler trace of one step.

    stages = Stages(device)
    with traced(path):                  # path None: no trace
        with stages("forward"):
            ...
    stages.take()                       # {"time/forward": 1.2}, all spans since the last `take`

The trace is a file for https://ui.perfetto.dev or chrome://tracing. It has PyTorch's operators and
CUDA kernels, below spans with the stages' labels.
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

# Whether a trace is being recorded. Global, because PyTorch's profiler is one per process.
_tracing = False


class Stages:
    """Wall-clock seconds by label. A span inside another one counts for both labels."""

    def __init__(self, device: str = "cpu") -> None:
        """`device`: the device that the stages compute on."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._cuda = torch.device(device) if torch.device(device).type == "cuda" else None

    @contextmanager
    def __call__(self, label: str) -> Iterator[None]:
        """Add the block's wall time to `seconds[label]`, even if the block raises."""
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
        # Kernels run asynchronously. Without waiting here, they would count for a later span.
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)


@contextmanager
def traced(path: Path | None) -> Iterator[None]:
    """Write a Chrome trace of the block to `path` (JSON), completely or not at all; None: no trace.

    If the block raises, no file is written. There is one trace at a time, of the calling thread and
    of autograd's threads. Memory grows with the number of operators, so trace a step, not a run. A
    trace that cannot be written is reported in the log; the block runs in any case.
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
        # If writing fails, PyTorch leaves temporary files in the same directory.
        with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as directory:
            made = Path(directory, path.name)
            profiler.export_chrome_trace(str(made))
            if not _ended(made):  # the disk is full, which PyTorch only logs
                raise OSError("it was cut short")
            made.replace(path)
    except (OSError, RuntimeError) as error:
        logger.warning("cannot write the trace %s: %s", path, error)


def _ended(made: Path) -> bool:
    """True if the JSON object is closed."""
    with made.open("rb") as file:
        file.seek(max(0, made.stat().st_size - 16))
        return file.read().rstrip().endswith(b"}")
