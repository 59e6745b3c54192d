"""CUDA tools that SGLang needs besides Python packages: a driver, nvcc and libnuma.

SGLang compiles kernels on first use, with an nvcc that it looks for in CUDA_HOME, CUDA_PATH, PATH
and /usr/local/cuda (sglang/kernels/jit/utils/compile/toolchain.py). If the major version of nvcc
differs from that of torch's CUDA, the kernels do not load. SGLang's prebuilt kernels link libnuma.

If no such nvcc fits, a server uses the nvcc of NVIDIA's Python packages, which are installed with
SGLang. SGLang links kernels with `lib64`, `libcudart.so` and `libcuda.so`, which these packages
lack: `cuda_home` creates a directory of links to the packages that has all three.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Oldest Linux driver for each major version of CUDA, from the release notes of NVIDIA's toolkit
# (docs.nvidia.com/cuda/cuda-toolkit-release-notes: minor version compatibility).
_OLDEST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaTools:
    """CUDA tools on this machine.

    Attributes:
        cuda: CUDA version that torch was built for; None: a CPU build.
        driver: version of NVIDIA's driver; None: nvidia-smi reports none.
        nvcc: path and version of the compiler that a server uses; None: not found.
        libnuma: True if the library can be loaded.
    """

    cuda: str | None
    driver: str | None
    nvcc: tuple[str, str] | None
    libnuma: bool

    def driver_problem(self) -> str | None:
        """Reason why torch cannot use the driver's GPUs, with the remedy; None if it can."""
        if self.driver is None:
            return None
        if self.cuda is None:
            return (
                "torch is a CPU build beside a GPU: reinstall it from PyPI or "
                "https://pytorch.org, without the CPU index"
            )
        oldest = _OLDEST_DRIVER.get(_major(self.cuda))
        if oldest is not None and _numbers(self.driver) < _numbers(oldest):
            return (
                f"driver {self.driver} is older than {oldest}, which this torch's CUDA {self.cuda} "
                "needs: update the driver, or install a torch for an older CUDA"
            )
        return None

    def sglang_problems(self) -> list[str]:
        """Reasons why SGLang would not start on CUDA on this machine, with remedies."""
        if self.cuda is None:
            return []
        problems = []
        if not self.libnuma:
            problems.append("libnuma.so.1 is missing: apt-get install libnuma1")
        if self.nvcc is None:
            problems.append(
                "no nvcc in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda: SGLang compiles kernels "
                f"as it runs; install the CUDA {_major(self.cuda)} toolkit, or use an image that "
                "has it (nvidia/cuda:*-devel, lmsysorg/sglang)"
            )
        elif _major(self.nvcc[1]) != _major(self.cuda):
            problems.append(
                f"nvcc at {self.nvcc[0]} is from CUDA {self.nvcc[1]}, but torch was built for "
                f"CUDA {self.cuda}: set CUDA_HOME to a toolkit of CUDA {_major(self.cuda)}"
            )
        return problems


def find_cuda_tools(cuda: str | None) -> CudaTools:
    """Detect the CUDA tools of this machine. `cuda` is `torch.version.cuda`."""
    home = cuda_home()
    nvcc = _nvcc() if home is None else _nvcc(f"{home}/bin/nvcc")
    return CudaTools(cuda=cuda, driver=_driver(), nvcc=nvcc, libnuma=_loads("libnuma.so.1"))


def cuda_home() -> str | None:
    """CUDA_HOME for a server on a machine without an nvcc that fits NVIDIA's Python packages.

    An nvcc fits if it has the same major version. None if the server needs no CUDA_HOME, if there
    are no such packages, or if the directory of links cannot be written.
    """
    packages = _packaged_toolkit()
    if packages is None or os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return None
    found = _nvcc()
    if found is not None and f"cu{_major(found[1])}" == packages.name:
        return None
    digest = hashlib.sha256(str(packages).encode()).hexdigest()[:8]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "isotherm" / f"cuda-{digest}"  # stable: compiled kernels are cached by this path
    try:
        _link_toolkit(home, packages)
    except OSError:  # not writable: `sglang_problems` reports the missing compiler
        return None
    return str(home)


def _packaged_toolkit() -> Path | None:
    """Root of the newest CUDA toolkit among NVIDIA's Python packages that has an nvcc."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec and spec.submodule_search_locations) or ()]
    found = [nvcc.parents[1] for root in roots for nvcc in root.glob("cu[0-9]*/bin/nvcc")]
    return max(found, key=lambda root: _numbers(root.name), default=None)


def _link_toolkit(home: Path, packages: Path) -> None:
    """Create a toolkit at `home` from links to `packages`. Safe to run in several processes."""
    stubs = home / "lib64" / "stubs"
    stubs.mkdir(parents=True, exist_ok=True)
    (home / "bin").mkdir(exist_ok=True)  # not a link: nvcc looks for the rest next to its bin
    links = {home / "bin" / tool.name: tool for tool in (packages / "bin").iterdir()}
    links |= {home / name: packages / name for name in ("include", "nvvm")}
    links[home / "lib"] = home / "lib64"
    for library in (packages / "lib").iterdir():
        links[home / "lib64" / library.name] = library
        if library.name.startswith("libcudart.so."):
            links[home / "lib64" / "libcudart.so"] = library
    if (driver := _path_of_library("libcuda.so.1")) is not None:
        links[stubs / "libcuda.so"] = driver
    for link, target in links.items():
        with suppress(FileExistsError):
            link.symlink_to(target)


def _driver() -> str | None:
    listed = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return listed.splitlines()[0].strip() if listed else None


def _nvcc(*paths: str) -> tuple[str, str] | None:
    """Path and version of the first nvcc that runs; `paths` defaults to those SGLang looks in."""
    for path in paths or _nvcc_paths():
        if version := re.search(r"release (\d+\.\d+)", _output(path, "--version")):
            return path, version[1]
    return None


def _nvcc_paths() -> Iterator[str]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            yield str(Path(root) / "bin" / "nvcc")
    if found := shutil.which("nvcc"):
        yield found
    yield "/usr/local/cuda/bin/nvcc"


def _output(*command: str) -> str:
    """Standard output of a program, or an empty string if it does not exist or fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _path_of_library(name: str) -> Path | None:
    """Path at which the loader finds a shared library; None if it cannot be loaded."""
    if not _loads(name):
        return None
    stem = name.split(".so")[0] + ".so"
    mapped = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    return next((Path(path) for path in mapped if Path(path).name.startswith(stem)), None)


def _major(version: str) -> int:
    return _numbers(version)[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
