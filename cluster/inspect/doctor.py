"""`isotherm doctor`: checks of this machine's requirements for a run, with remedies.

The state of each line is fine, note or problem. A note means that speed or a feature is lost. A
problem means that a run cannot start here, and makes the exit code 1. The command checks only the
machine that it runs on: run it on each kind of machine.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import chz
import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from actors.sglang.cuda_tools import CudaTools, find_cuda_tools
from actors.sglang.installed import python_path, sglang_installed
from cluster.command import run_command
from cluster.handles.node import starts_here
from distill.errors import ConfigError, IsothermError
from distill.gpu import GIB, readable
from distill.libraries import LINEAR_ATTENTION_INSTALL
from distill.sandbox.sandbox import require_sandbox

# Ray's object store takes 30 % of memory, and moves to a disk if /dev/shm is smaller.
_STORE_SHARE = 0.3
# Ray refuses to write objects to a disk that is fuller than this share.
_FULL = 0.95
# Limits of open files: the number that Ray advises (docs.ray.io, "Best practices for deploying
# large clusters"), and the number below which a raylet soon fails.
_FILES_ADVISED, _FILES_NEEDED = 65536, 1024
# Limits of a user's threads: Ray has dozens in each worker, and an idle cluster hundreds.
_THREADS_ADVISED, _THREADS_NEEDED = 16384, 1024
# Adapters that NCCL registers memory with; the directory is missing if there are none.
_INFINIBAND = Path("/sys/class/infiniband")
_PLUGIN_TIMEOUT_S = 180.0
_PLUGIN_CHILD = (
    "import json\n"
    "from actors.sglang.plugin.internals import unrecognised_internals\n"
    "print('\\n' + json.dumps(unrecognised_internals()))\n"
)


class CheckState(Enum):
    FINE = "fine"
    NOTE = "note"
    PROBLEM = "PROBLEM"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the report: the item checked, its state, and a remedy."""

    what: str
    found: str
    state: CheckState = CheckState.FINE
    remedy: str = ""


@chz.chz
class DoctorConfig:
    """Check that this machine has what a run needs. Exit code 1 if a run could not start here."""

    sglang: bool = chz.field(
        default=True, doc="also check the installed SGLang with the plugin; takes 10 s"
    )
    env_python: str | None = chz.field(
        default=None, doc="also check the interpreter of env=Verifiers: its env.python"
    )


def examine(*, sglang: bool, env_python: str | None = None) -> Iterator[CheckResult]:
    """Run all checks, in the order in which a run needs the items."""
    yield CheckResult("isotherm", _version("isotherm") or "not installed")
    yield python(sys.version_info[:3], platform.platform())
    import torch  # takes seconds to import; --help does not need it

    tools = find_cuda_tools(torch.version.cuda)
    yield torch_build(torch.__version__, tools)
    yield from gpus(tools, _gpus(torch), _nccl(torch))
    if tools.driver is not None:
        yield linear_attention(_version("flash-linear-attention"))
    yield ray(_version("ray"))
    yield from ray_cluster()
    yield from sglang_checks(_version("sglang"), tools, _plugin if sglang else None)
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    yield cpp(compiler)
    memory = psutil.virtual_memory()
    yield CheckResult(
        "memory",
        f"{readable(memory.available)} of {readable(memory.total)} free, {os.cpu_count()} cores",
    )
    if Path("/dev/shm").is_dir():
        yield shared_memory(psutil.disk_usage("/dev/shm").free, memory.total)
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield threads(*resource.getrlimit(resource.RLIMIT_NPROC))
    adapters = [each.name for each in _INFINIBAND.iterdir()] if _INFINIBAND.is_dir() else []
    yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], adapters)
    directory = os.environ.get("RAY_TMPDIR", tempfile.gettempdir())
    usage = psutil.disk_usage(directory)
    yield disk(directory, usage.used / (usage.used + usage.free), usage.free)
    yield sandbox()
    if env_python is not None:
        yield verifiers(env_python)


def python(version: Sequence[int], where: str) -> CheckResult:
    shown = f"{'.'.join(map(str, version))} on {where}"
    if tuple(version[:2]) < (3, 11):
        return CheckResult(
            "Python", shown, CheckState.PROBLEM, "isotherm needs Python 3.11 or newer"
        )
    return CheckResult("Python", shown)


def torch_build(version: str, tools: CudaTools) -> CheckResult:
    shown = f"{version}, {'CPU build' if tools.cuda is None else f'CUDA {tools.cuda}'}"
    if problem := tools.driver_problem():
        return CheckResult("torch", shown, CheckState.PROBLEM, problem)
    return CheckResult("torch", shown)


def gpus(tools: CudaTools, found: Sequence[str], nccl: str | None) -> Iterator[CheckResult]:
    """Check the driver, each GPU, and NCCL. `nccl` is None if torch was built without it."""
    if tools.driver is None:
        yield CheckResult("GPU", "none: models run on the CPU")
        return
    yield CheckResult("driver", tools.driver)
    for name in found:
        yield CheckResult("GPU", name)
    if not found and tools.driver_problem() is None:
        remedy = (
            "the driver works, but torch finds no GPU: start a container with --gpus all, and "
            "check CUDA_VISIBLE_DEVICES"
        )
        yield CheckResult("GPU", "not found by torch", CheckState.PROBLEM, remedy)
    if nccl is not None:
        yield CheckResult("NCCL", nccl)
    elif found:
        remedy = "learner.workers=, --tp-size and weights=group need NCCL: install torch from PyPI"
        yield CheckResult("NCCL", "not in this torch", CheckState.NOTE, remedy)


def linear_attention(version: str | None) -> CheckResult:
    """Check the kernels for models such as Qwen3-Next. `version` is None if not installed."""
    if version is not None:
        return CheckResult("linear attention", f"flash-linear-attention {version}")
    remedy = f"for training Qwen3-Next or Qwen3.5: {LINEAR_ATTENTION_INSTALL}"
    return CheckResult("linear attention", "reference code only", CheckState.NOTE, remedy)


def _gpus(torch: Any) -> list[str]:
    if not torch.cuda.is_available():
        return []
    properties = [
        torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
    ]
    return [
        f"{each.name}, {readable(each.total_memory)}, compute capability {each.major}.{each.minor}"
        for each in properties
    ]


def _nccl(torch: Any) -> str | None:
    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def ray(version: str | None) -> CheckResult:
    if version is None:
        remedy = "pip install 'ray[default]'"
        return CheckResult("Ray", "not installed: local=True only", CheckState.NOTE, remedy)
    return CheckResult("Ray", version)


def ray_cluster() -> Iterator[CheckResult]:
    """Check the GPUs of the cluster that a run would join; no check if it would start Ray."""
    if starts_here():
        return
    from cluster.placement.connect import autoscales, cluster_gpus  # Ray: not for --help

    try:
        up, grows = cluster_gpus(), autoscales()
    except ConfigError as error:
        yield CheckResult("Ray cluster", "cannot be joined", CheckState.PROBLEM, str(error))
        return
    found = f"{up:g} GPUs up, {'an' if grows else 'no'} autoscaler"
    if up or not grows:
        yield CheckResult("Ray cluster", found)
        return
    remedy = "device=cuda reserves GPUs and waits for their nodes; device=auto is refused"
    yield CheckResult("Ray cluster", found, CheckState.NOTE, remedy)


def sglang_checks(version: str | None, tools: CudaTools, plugin: Any) -> Iterator[CheckResult]:
    """Check SGLang, the plugin, and SGLang's requirements on CUDA.

    Args:
        plugin: function that checks the installed SGLang; returns its problem, or None.
    """
    if version is None:
        yield CheckResult(
            "SGLang",
            "not installed: engine=embedded only",
            CheckState.NOTE,
            "pip install 'isotherm[sglang]' on a CUDA machine, make install-sglang without one",
        )
        return
    yield CheckResult("SGLang", version)
    entries = importlib.metadata.entry_points(group="sglang.srt.plugins", name="isotherm")
    if not entries:
        remedy = "SGLang would not load the plugin: install isotherm itself (pip install .)"
        yield CheckResult("SGLang plugin", "not registered", CheckState.PROBLEM, remedy)
    elif plugin is not None:
        problem = plugin()
        if problem is None:
            yield CheckResult("SGLang plugin", "supports this version")
        else:
            yield CheckResult("SGLang plugin", "incompatible", CheckState.PROBLEM, problem)
    if tools.driver is None:
        return
    if tools.nvcc is not None:
        yield CheckResult("nvcc", f"CUDA {tools.nvcc[1]} at {tools.nvcc[0]}")
    if tools.libnuma:
        yield CheckResult("libnuma", "libnuma.so.1 loads")
    for problem in tools.sglang_problems():
        yield CheckResult("SGLang on CUDA", "would not start", CheckState.PROBLEM, problem)


def _plugin() -> str | None:
    """Problem of the plugin with the installed SGLang, or None. Runs in a subprocess."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PLUGIN_CHILD],
            env={**os.environ, "PYTHONPATH": python_path()},
            capture_output=True,
            text=True,
            timeout=_PLUGIN_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"importing SGLang took more than {_PLUGIN_TIMEOUT_S:.0f} s"
    try:
        unknown = json.loads(child.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = child.stderr.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        return f"SGLang cannot be imported: {last[0]}"
    if not unknown:
        return None
    return f"{'; '.join(unknown)}: install a version that pyproject.toml names, or a newer isotherm"


def cpp(compiler: str | None) -> CheckResult:
    if compiler is None:
        remedy = (
            "compile=True, and kernels that are built at run time, need a compiler: apt-get "
            "install g++"
        )
        return CheckResult("C++ compiler", "none", CheckState.NOTE, remedy)
    return CheckResult("C++ compiler", compiler)


def shared_memory(free: int, memory: int) -> CheckResult:
    """Check /dev/shm: Ray's object store, and weights pushed to engines on this machine.

    Args:
        free, memory: bytes.
    """
    wanted = int(_STORE_SHARE * memory)
    if free >= wanted:
        return CheckResult("/dev/shm", f"{readable(free)} free")
    remedy = (
        "Ray stores objects on disk instead, and weights=shared_memory needs the model's size in "
        f"/dev/shm: docker run --shm-size={wanted // GIB + 1}g, or an emptyDir of medium Memory"
    )
    return CheckResult("/dev/shm", f"{readable(free)} free", CheckState.NOTE, remedy)


def open_files(soft: int, hard: int) -> CheckResult:
    remedy = f"ulimit -n {_FILES_ADVISED}"
    if not _at_least(hard, _FILES_ADVISED):
        remedy += ", with a larger hard limit (/etc/security/limits.conf, or docker run --ulimit)"
    return _limited("open files", soft, hard, (_FILES_ADVISED, _FILES_NEEDED), remedy)


def threads(soft: int, hard: int) -> CheckResult:
    """Check the limits on this user's processes and threads."""
    remedy = f"Ray's threads count as well: ulimit -u {_THREADS_ADVISED} (container: --pids-limit)"
    return _limited("processes", soft, hard, (_THREADS_ADVISED, _THREADS_NEEDED), remedy)


def _limited(what: str, soft: int, hard: int, bounds: tuple[int, int], remedy: str) -> CheckResult:
    """Check a limit against the number that is advised, and the one that is needed."""
    shown = f"{_limit(soft)}, at most {_limit(hard)}"
    advised, needed = (_at_least(soft, bound) for bound in bounds)
    if advised:
        return CheckResult(what, shown)
    return CheckResult(what, shown, CheckState.NOTE if needed else CheckState.PROBLEM, remedy)


def locked_memory(soft: int, adapters: Sequence[str]) -> CheckResult:
    """Check the memory that NCCL may register with InfiniBand adapters, if there are any.

    Args:
        soft: limit in bytes.
    """
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 20} MiB"
    if not adapters:
        return CheckResult("locked memory", f"{shown}; no InfiniBand here")
    if soft == resource.RLIM_INFINITY:
        return CheckResult("locked memory", f"{shown}, for {', '.join(sorted(adapters))}")
    remedy = (
        "NCCL over InfiniBand fails with a limit: ulimit -l unlimited (docker --ulimit memlock=-1)"
    )
    return CheckResult("locked memory", shown, CheckState.NOTE, remedy)


def _at_least(limit: int, wanted: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= wanted


def _limit(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def disk(directory: str, used: float, free: int) -> CheckResult:
    """Check the disk for Ray's logs and for objects that do not fit in memory.

    Args:
        used: used share of the disk, 0 to 1.
        free: free bytes.
    """
    shown = f"{readable(free)} free at {directory}, {used:.0%} used"
    if used < _FULL:
        return CheckResult("disk", shown)
    remedy = (
        f"Ray does not write objects to a disk that is {_FULL:.0%} full: set RAY_TMPDIR to "
        "another disk"
    )
    return CheckResult("disk", shown, CheckState.PROBLEM, remedy)


def sandbox() -> CheckResult:
    try:
        require_sandbox()
    except ConfigError as error:
        return CheckResult("sandbox", "cannot be created", CheckState.NOTE, str(error))
    return CheckResult("sandbox", "env.tools=python and reward=unit_tests can run")


def verifiers(python: str) -> CheckResult:
    """Check an interpreter for environments of the `verifiers` library."""
    from actors.envs.verifiers_env import verifiers_version  # environments: not for --help

    try:
        return CheckResult("verifiers", f"{verifiers_version(python)} in {python}")
    except ConfigError as error:
        return CheckResult("verifiers", "cannot be used", CheckState.PROBLEM, str(error))


def _version(package: str) -> str | None:
    if package == "sglang" and not sglang_installed():
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


_STYLES = {CheckState.FINE: "green", CheckState.NOTE: "yellow", CheckState.PROBLEM: "bold red"}


def print_checks(config: DoctorConfig, console: Console) -> None:
    """Print every check; raise MachineError with the number of problems, if there are any."""
    table = Table(show_header=False, box=None)
    problems = 0
    for check in examine(sglang=config.sglang, env_python=config.env_python):
        problems += check.state is CheckState.PROBLEM
        state = Text(check.state.value, style=_STYLES[check.state])
        table.add_row(state, Text(check.what), Text(check.found))
        if check.remedy:
            table.add_row("", "", Text(f"-> {check.remedy}"))
    console.print(table)
    if problems:
        raise MachineError(f"{problems} problem{'s' * (problems > 1)}: a run could not start here")


class MachineError(IsothermError):
    """A run could not start on this machine."""


main = partial(run_command, DoctorConfig, print_checks)


if __name__ == "__main__":
    sys.exit(main())
