"""What a run prints where nothing can be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.console import make_console

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
