"""Results of checks: a file to which every command appends, and a table of the newest ones."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.gpu.checks import CHECKS
from benchmarks.gpu.setting import Size
from distill.gpu import GIB

_FILE = "results.jsonl"


class Results:
    """Newest outcome of every check on one device at one size, in a directory.

    Attributes:
        out: the directory; created if missing.
    """

    def __init__(self, out: Path, device: Literal["cpu", "cuda"], size: Size) -> None:
        self.out = out
        self.device: Literal["cpu", "cuda"] = device
        self.size: Size = size
        self._machine = machine()
        self._newest: dict[str, dict[str, Any]] = {}
        out.mkdir(parents=True, exist_ok=True)
        if (out / _FILE).exists():
            for line in (out / _FILE).read_text().splitlines():
                self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        where = (line["device"], line["size"], line["machine"]["gpus"])
        if where == (self.device, self.size, self._machine["gpus"]):
            self._newest[line["check"]] = line

    def add(self, name: str, outcome: dict[str, Any]) -> None:
        """Append the outcome of a check."""
        line = {
            "check": name, **outcome, "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": self.device, "size": self.size, "machine": self._machine,
        }  # fmt: skip
        with open(self.out / _FILE, "a") as file:
            file.write(json.dumps(line) + "\n")
        self._take(line)

    def status(self, name: str) -> str | None:
        """pass, fail or skipped; None: the check has not run."""
        return self._newest[name]["status"] if name in self._newest else None

    def table(self) -> str:
        """The newest outcomes, as Markdown."""
        gpus = ", ".join(self._machine["gpus"]) or f"{self._machine['cpus']} CPUs"
        made = ", ".join(f"{k} {v}" for k, v in self._machine["versions"].items() if v)
        lines = [f"**{gpus}** ({self.device}, {self.size}; {made})", ""]
        lines += ["| check | | numbers | s | when |", "|---|---|---|---|---|"]
        for name in CHECKS:
            if found := self._newest.get(name):
                numbers = ", ".join(f"{k} {_written(v)}" for k, v in found["numbers"].items())
                detail = "; ".join(filter(None, [found["why"], numbers])).replace("|", "\\|")
                lines.append(
                    f"| `{name}` | {found['status']} | {detail} | {found['seconds']:.0f} "
                    f"| {found['when'][:10]} |"
                )
        return "\n".join(lines)


def _written(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def machine() -> dict[str, Any]:
    """GPUs, CPUs and versions of the machine that numbers were measured on."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    versions = {}
    for name in ("torch", "transformers", "triton", "sglang", "ray"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "gpus": [f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB" for gpu in gpus],
        "cpus": os.cpu_count(),
        "cuda": torch.version.cuda,
        "versions": versions,
    }
