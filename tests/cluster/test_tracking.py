"""What a run prints: on a terminal, in a pipe, and where nothing can be written."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cluster.console import make_console
from cluster.run_files.tracking import Progression, measured_line

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_under_the_output_ends_no_run() -> None:
    program = (
        "import os\nfrom cluster.console import make_console\nconsole = make_console()\n"
        "for i in range(10_000): console.print(f'step {i}')\nos._exit(7)"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, cwd=ROOT, check=False)
    assert done.returncode == 7


def test_a_line_is_never_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    console = make_console()
    console.print("a line that is long " * 9)
    assert capsys.readouterr().out == "a line that is long " * 9 + "\n"


def test_an_evaluation_is_one_line_with_its_intervals() -> None:
    metrics = {
        "eval/eos_share": 0.25, "eval/accuracy": 0.5, "eval/accuracy_low": 0.1235,
        "eval/accuracy_high": 0.87654, "eval/a_low": 2.0, "time/eval": 1234.5,
    }  # fmt: skip
    made = "eos_share 0.25  accuracy 0.5 [0.123, 0.877]  a_low 2  time/eval 1234"
    assert measured_line(metrics) == made


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_what_a_pipe_does(terminal: bool) -> None:
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=terminal, width=200)
    with Progression(console, 0, 2) as progress:
        progress.hidden.add("reward/mean")
        for step in (1, 2):
            progress.step({"step": step, "opd/reverse_kl": 3 - step, "reward/mean": 0.0, "x": 9.0})
    lines = [line for line in printed.getvalue().splitlines() if "step 2/2  reverse KL 1" in line]
    assert len(lines) == 1
    assert "reward" not in printed.getvalue()
