"""The head of a run's own Ray ends when its driver does, whatever has become of Ray."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import psutil

HEAD = """
from cluster.placement import local_head
local_head.END_S = 2
local_head.run_head(1)
"""


def test_a_ray_that_is_stuck_is_killed_with_its_head() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HEAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as head:
        assert head.stdin is not None and head.stdout is not None
        assert "address" in json.loads(head.stdout.readline())
        started = psutil.Process(head.pid).children()
        [raylet] = [each for each in started if each.name() == "raylet"]
        raylet.suspend()
        head.stdin.close()  # the driver has ended
        assert head.wait(60) == -signal.SIGALRM
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive
