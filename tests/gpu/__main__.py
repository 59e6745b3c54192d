"""`make gpu`: the checks of `tests/gpu/checks.py`, each in a process of its own, in ten minutes.

Writes OUT/gpu.json, prints a table, ends with 1 if a check failed. Without a GPU it prints what it
would do; `device=cpu size=tiny` runs the same checks small.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import chz
import torch
from rich.console import Console
from rich.table import Table

from cluster.command import run_command
from distill.errors import ConfigError, IsothermError
from distill.lookup import known_names
from tests.gpu.checks import CHECKS
from tests.gpu.setting import Setting, Size

REPOSITORY = Path(__file__).parents[2]
_COLOURS = {"pass": "green", "fail": "bold red", "skipped": "yellow"}
# Time that is left to a check must be worth starting it.
_LEAST_S = 20.0


class ChecksFailed(IsothermError):
    """This machine, or isotherm on it, is not in order."""

    exit_code = 1


@chz.chz
class GpuConfig:
    """Checks of a machine with a GPU."""

    out: str = chz.field(default="outputs/gpu", doc="directory of gpu.json and each check's log")
    device: Literal["auto", "cpu", "cuda"] = chz.field(default="auto", doc="cpu: run them there")
    size: Literal["auto", "tiny", "full"] = chz.field(
        default="auto", doc="of the models; auto: full on a GPU, tiny on a CPU"
    )
    only: str = chz.field(default="", doc="names of checks, with commas between them; all")
    budget_s: float = chz.field(
        default=600.0, doc="seconds for all checks together; each one's deadline grows with it"
    )

    @property
    def names(self) -> list[str]:
        """Raises ConfigError for a name that is no check's."""
        asked = [name.strip() for name in self.only.split(",")] if self.only else list(CHECKS)
        for name in asked:
            if name not in CHECKS:
                raise ConfigError(f"only={self.only}: {known_names(name, CHECKS)}")
        return asked


def run_checks(config: GpuConfig, console: Console) -> None:
    """Runs them and writes the report.

    Raises:
        ChecksFailed: their names.
    """
    cuda = torch.cuda.is_available()
    if config.device == "cuda" and not cuda:
        raise ConfigError("device=cuda and torch sees no GPU here; `isotherm doctor` says why")
    device = ("cuda" if cuda else "cpu") if config.device == "auto" else config.device
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine(), "device": device, "checks": {}}
    if config.device == "auto" and not cuda:
        why = "no CUDA GPU here (device=cpu size=tiny runs it on this machine)"
        report["checks"] = {
            name: {"status": "skipped", "why": why, "numbers": {}, "seconds": 0.0}
            for name in config.names
        }
    else:
        default: Size = "full" if device == "cuda" else "tiny"
        size = report["size"] = default if config.size == "auto" else config.size
        _run_all(config, device, size, report["checks"], console, out)
    (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    console.print(table(report))
    found = [check["status"] for check in report["checks"].values()]
    console.print(
        f"{found.count('pass')} passed, {found.count('fail')} failed, {found.count('skipped')} "
        f"skipped; {out / 'gpu.json'}"
    )
    if failed := [name for name, check in report["checks"].items() if check["status"] == "fail"]:
        raise ChecksFailed(f"failed: {', '.join(failed)}")


def _run_all(
    config: GpuConfig, device: Any, size: Size, found: dict[str, Any], console: Console, out: Path
) -> None:
    end = time.monotonic() + config.budget_s
    with tempfile.TemporaryDirectory(prefix="isotherm-gpu-") as scratch:
        setting = Setting(device=device, size=size, scratch=scratch)
        for name in config.names:
            left = end - time.monotonic()
            if left < _LEAST_S:
                why = f"the {config.budget_s:.0f} s of budget_s= are over"
                found[name] = {"status": "skipped", "why": why, "numbers": {}, "seconds": 0.0}
                continue
            console.print(f"{name}: {CHECKS[name].what}", highlight=False)
            deadline_s = min(left, CHECKS[name].deadline_s * config.budget_s / 600)
            found[name] = _in_child(name, setting, deadline_s, out / f"{name}.log")


def _in_child(name: str, setting: Setting, deadline_s: float, log: Path) -> dict[str, Any]:
    """The check's outcome; a child that crashes, or is out of time, has failed."""
    command = [sys.executable, "-m", "tests.gpu.child", name, json.dumps(asdict(setting))]
    started = time.monotonic()
    with open(log, "wb+") as file:
        child = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            child.wait(deadline_s)
            why = f"it ended with code {child.returncode}; see {log}"
        except subprocess.TimeoutExpired:
            why = f"not done after {deadline_s:.0f} s; see {log}"
        finally:
            _end(child)
        file.seek(0)
        lines = file.read().decode(errors="replace").splitlines()
    try:
        outcome = json.loads(lines[-1])
        return outcome if child.returncode == 0 and "status" in outcome else _failed(why, started)
    except (ValueError, IndexError, TypeError):
        return _failed(why, started)


def _failed(why: str, started: float) -> dict[str, Any]:
    seconds = time.monotonic() - started
    return {"status": "fail", "why": why, "numbers": {}, "seconds": seconds}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends it, and all that it started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    versions = {}
    for name in ("torch", "transformers", "sglang", "ray"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpus": [f"{gpu.name}, {gpu.total_memory / (1 << 30):.0f} GiB" for gpu in gpus],
        "cpus": os.cpu_count(),
        "cuda": torch.version.cuda,
        "versions": versions,
    }


def table(report: dict[str, Any]) -> Table:
    """The report for people."""
    where = ", ".join(report["machine"]["gpus"]) or "no GPU"
    made = Table("check", "", "what, and what was found", "s", title=f"{where}; {report['device']}")
    for name, check in report["checks"].items():
        numbers = ", ".join(f"{k} {v:.4g}" for k, v in check["numbers"].items())
        lines = [CHECKS[name].what, numbers, check["why"]]
        colour = _COLOURS[check["status"]]
        made.add_row(
            name, f"[{colour}]{check['status']}[/]", "\n".join(filter(None, lines)),
            f"{check['seconds']:.0f}",
        )  # fmt: skip
    return made


if __name__ == "__main__":
    sys.exit(run_command(GpuConfig, run_checks, None))
