"""TRL's DistillationTrainer as a process in its own virtualenv (peer_trl.py)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from distill.errors import ConfigError

HERE = Path(__file__).parent


PEER_PYTHON = Path(".venv-peer/bin/python")


def run_peer(
    student: str,
    teacher: str,
    prompts: Path,
    out: Path,
    *,
    steps: int,
    prompts_per_step: int,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    lr: float,
    seed: int = 0,
    warmup_steps: int = 1,
    save: Path | None = None,
    save_every: int = 0,
) -> dict[str, Any]:
    """Report that peer_trl.py writes to `out` after `warmup_steps` and `steps` measured steps.

    Args:
        save: directory for the trained student.
        save_every: interval in steps of saving it under `step-N` as well; 0: only at the end.

    Raises:
        ConfigError: its virtualenv is missing.
    """
    command = peer_command(
        student, teacher, prompts, out, steps=steps, prompts_per_step=prompts_per_step,
        group_size=group_size, max_new_tokens=max_new_tokens, temperature=temperature, lr=lr,
        seed=seed, warmup_steps=warmup_steps,
    )  # fmt: skip
    if save:
        command += ["--save", str(save), "--save-every", str(save_every)]
    subprocess.run(
        command, check=True, timeout=3600, stdout=subprocess.DEVNULL, env=peer_environment()
    )
    return json.loads(out.read_text())


def peer_command(
    student: str,
    teacher: str,
    prompts: Path,
    out: Path,
    *,
    steps: int,
    prompts_per_step: int,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    lr: float,
    seed: int = 0,
    warmup_steps: int = 1,
) -> list[str]:
    """Command line of peer_trl.py.

    Raises:
        ConfigError: its virtualenv is missing.
    """
    if not PEER_PYTHON.exists():
        raise ConfigError(
            ".venv-peer is missing: `make .venv-peer/.installed` makes it; "
            "`python -m benchmarks peer=False` does without"
        )
    return [
        # -P: otherwise `import queue` would load benchmarks/queue.py, which is beside the script.
        str(PEER_PYTHON), "-P", str(HERE / "peer_trl.py"), "--student", student, "--teacher",
        teacher, "--prompts", str(prompts), "--steps", str(steps), "--warmup-steps",
        str(warmup_steps), "--prompts-per-step", str(prompts_per_step), "--group-size",
        str(group_size), "--temperature", str(temperature), "--max-new-tokens",
        str(max_new_tokens), "--lr", str(lr), "--seed", str(seed), "--out", str(out),
    ]  # fmt: skip


def peer_environment() -> dict[str, str]:
    """Environment in which TRL, a single process, may use every core."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
