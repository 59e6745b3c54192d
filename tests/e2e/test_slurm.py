"""The batch script for SLURM with one node: this machine, and a local stand-in for `srun`."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TinyPair
from tests.e2e.harness import REPOSITORY, metrics, opd_arguments, trained_groups
from tests.e2e.ray_head import HOST
from tests.waiting import DEADLINE_S

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment of a batch script on one node."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": f"#!/bin/sh\necho {HOST}\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    venv = tmp_path / "venv/bin"
    venv.mkdir(parents=True)
    (venv / "activate").write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
    # What is killed leaves its temporary files; sockets among them have paths of at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as directory:
        yield {
            **os.environ, "TMPDIR": directory,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY),
            "ISOTHERM_VENV": str(venv.parent), "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NODELIST": "node0", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_ON_NODE": "8",
        }  # fmt: skip


def test_a_run_ended_by_slurm_has_a_checkpoint_and_resumes(
    tiny_pair: TinyPair, tmp_path: Path, environment: dict[str, str]
) -> None:
    out = tmp_path / "run"
    for steps, code in ((500, 143), (0, 0)):
        trained = len(metrics(out))
        settings = opd_arguments(
            tiny_pair, out, steps=steps or trained + 2, checkpoint_every=400,
            loss="tests.e2e.rewards:slow_loss",
        )  # fmt: skip
        script = subprocess.Popen(
            ["bash", REPOSITORY / "deploy/slurm.sbatch", "recipe=opd", *settings],
            cwd=tmp_path, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + DEADLINE_S
            while script.poll() is None and not (steps and len(metrics(out)) >= 3):
                assert time.monotonic() < deadline
                time.sleep(0.2)
            if steps:
                script.send_signal(signal.SIGTERM)
            assert script.wait(DEADLINE_S) == code
        finally:  # as SLURM does with all that a job has started
            os.killpg(script.pid, signal.SIGTERM)
            time.sleep(5)
            os.killpg(script.pid, signal.SIGKILL)
        if steps:
            assert (out / f"checkpoints/step-{len(metrics(out)):06d}").is_dir()
    assert trained_groups(out) == list(range(4 * len(metrics(out))))
