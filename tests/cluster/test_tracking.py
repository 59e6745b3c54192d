"""The output of a run: on a terminal, in a pipe, and on a full disk."""

import io
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from cluster.console import make_console
from cluster.demos.display import StageDisplay
from cluster.run_files.tracking import Progression
from tests.full_disk import files_of_at_most
from tests.waiting import DEADLINE_S

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "longest"),
    [("/dev/full", 1 << 20), ("log", 0), ("log", 4096)],
    ids=["full", "may not grow", "may not grow from here"],
)
def test_a_file_that_refuses_output_ends_no_run(file: str, longest: int, tmp_path: Path) -> None:
    program = (
        "import os\nfrom cluster.console import make_console\nconsole = make_console()\n"
        "for i in range(10_000): console.print(f'step {i}')\nos._exit(7)"
    )
    with (tmp_path / file).open("w") as log, files_of_at_most(longest):
        done = subprocess.run([sys.executable, "-c", program], stdout=log, cwd=ROOT, check=False)
    assert done.returncode == 7


# Ends with code 7 once its output is lost; later output of libraries does no harm.
_CHATTER = """
import sys
from cluster.console import lost_output, make_console
console = make_console()
while not lost_output(console):
    console.print("step")
print("printed by a library", flush=True)
sys.exit(7)
"""


@pytest.mark.parametrize("joined", [False, True])
def test_a_closed_pipe_ends_no_run(joined: bool) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHATTER], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if joined else subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.wait(timeout=DEADLINE_S) == 7


def test_a_lost_terminal_ends_no_run() -> None:
    master, terminal = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", _CHATTER], stdout=terminal, stderr=terminal, cwd=ROOT
    )
    os.close(terminal)
    os.read(master, 4)
    os.close(master)
    assert child.wait(timeout=DEADLINE_S) == 7


def test_markup_and_names_of_emoji_are_printed_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "[/INST] [bold] prompts.jsonl:100: [a]"
    table = Table("words")
    table.add_row(words)
    console = make_console()
    console.print(words)
    console.print(table)
    assert capsys.readouterr().out.count(words) == 2


def test_a_log_has_the_time_left_and_fewer_lines_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("cluster.run_files.tracking.time.monotonic", lambda: now)
    printed = io.StringIO()
    progress = Progression(Console(file=printed, width=200), first_step=100, steps=7300)
    for step in range(101, 7301):  # one a second, two hours
        now += 1.0
        progress.step({"step": step, "train/nll": 1.0})
    lines = printed.getvalue().splitlines()
    assert "step 110/7300" in lines[9] and lines[9].endswith("1:59:50 left")
    assert "step 7300/7300" in lines[-1] and lines[-1].endswith("0:00:00 left")
    second_hour = [line for line in lines if int(line.split("step ")[1].split("/")[0]) > 3700]
    assert 50 < len(second_hour) < 70


def test_a_log_gets_a_line_every_ten_seconds_with_all_stages_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    out = io.StringIO()
    stages = StageDisplay(Console(file=out, width=200))
    with stages.shown():
        stages.add("teacher", "learns", 10, "train/loss", "loss")
        stages.add("student", "learns", 20, "train/loss", "loss")
        for second in range(1, 21):
            clock[0] = 100.0 + second
            stages.observe("teacher", [{"step": min(second, 10), "train/loss": 0.5}])
            stages.observe("student", [{"step": second, "train/loss": 0.25}])
    first, second = out.getvalue().splitlines()
    assert "student step 9/20" in first and "0:00:12 left" in first
    assert "student step 19/20" in second and "teacher" not in second
