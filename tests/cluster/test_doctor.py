"""isotherm doctor: planted problems are found, with a remedy."""

import importlib.metadata
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.sglang.cuda_tools import CudaTools, cuda_home, find_cuda_tools
from cluster.inspect import doctor
from cluster.inspect.doctor import CheckResult, CheckState, linear_attention

GIB = 1 << 30
FINE, NOTE, PROBLEM = CheckState.FINE, CheckState.NOTE, CheckState.PROBLEM
GOOD = CudaTools(
    cuda="13.0", driver="580.95.05", nvcc=("/usr/local/cuda/bin/nvcc", "13.1"), libnuma=True
)


def states(*findings: CheckResult) -> list[CheckState]:
    assert all(bool(f.remedy) == (f.state is not FINE) for f in findings)
    return [finding.state for finding in findings]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, None),
        ({"driver": "570.124.06"}, "580.65"),
        ({"driver": "535.183", "cuda": "12.8"}, None),
        ({"driver": "520.61", "cuda": "12.8"}, "525.60"),
        ({"cuda": None}, "CPU build"),
        ({"cuda": None, "driver": None}, None),
        ({"cuda": "14.0"}, None),  # an unknown version
    ],
)
def test_a_torch_that_cannot_use_the_gpus_is_a_problem(
    change: dict[str, str | None], names: str | None
) -> None:
    found = doctor.torch_build("2.14.1", replace(GOOD, **change))
    assert states(found) == [FINE if names is None else PROBLEM]
    assert (names or "") in found.remedy


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"libnuma": False}, "libnuma1"),
        ({"nvcc": None}, "CUDA 13"),
        ({"nvcc": ("/usr/bin/nvcc", "12.4")}, "/usr/bin/nvcc"),
    ],
)
def test_missing_cuda_tools_of_sglang_are_a_problem(change: dict[str, object], names: str) -> None:
    assert GOOD.sglang_problems() == []
    lacking = replace(GOOD, **change)  # type: ignore[arg-type]
    [problem] = lacking.sglang_problems()
    assert names in problem
    found = list(doctor.sglang_checks("0.5.23", lacking, lambda: None))
    assert states(found[-1]) == [PROBLEM] and found[-1].remedy == problem
    assert replace(lacking, cuda=None).sglang_problems() == []


def test_missing_kernels_for_linear_attention_are_a_note() -> None:
    assert linear_attention("0.5.2").state is FINE
    missing = linear_attention(None)
    assert missing.state is NOTE and "linear-attention" in missing.remedy


def test_a_gpu_that_torch_does_not_see_is_a_problem() -> None:
    assert states(*doctor.gpus(GOOD, [], None)) == [FINE, PROBLEM]
    driver, gpu, nccl = doctor.gpus(GOOD, ["H200"], "2.28.3")
    assert states(driver, gpu, nccl) == [FINE] * 3 and nccl.found == "2.28.3"
    [*_, lacks] = doctor.gpus(GOOD, ["H200"], None)
    assert states(lacks) == [NOTE] and "weights=group" in lacks.remedy
    assert states(*doctor.gpus(replace(GOOD, driver=None), [], None)) == [FINE]


def test_the_cluster_of_ray_address_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert not list(doctor.ray_cluster())
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert states(*doctor.ray_cluster()) == [PROBLEM]
    for up, grows, state in ((0, True, NOTE), (4, True, FINE)):
        monkeypatch.setattr("cluster.placement.connect.cluster_gpus", lambda up=up: up)
        monkeypatch.setattr("cluster.placement.connect.autoscales", lambda grows=grows: grows)
        assert states(*doctor.ray_cluster()) == [state]


INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("check", "given", "state"),
    [
        (doctor.python, ((3, 11, 7), "Linux"), FINE),
        (doctor.python, ((3, 10, 1), "Linux"), PROBLEM),
        (doctor.shared_memory, (64 * GIB, 128 * GIB), FINE),
        (doctor.shared_memory, (64 << 20, 128 * GIB), NOTE),
        (doctor.open_files, (INFINITE, INFINITE), FINE),
        (doctor.open_files, (4096, INFINITE), NOTE),
        (doctor.open_files, (256, 4096), PROBLEM),
        (doctor.threads, (INFINITE, INFINITE), FINE),
        (doctor.threads, (4096, INFINITE), NOTE),
        (doctor.threads, (512, 512), PROBLEM),
        (doctor.locked_memory, (8 << 20, []), FINE),
        (doctor.locked_memory, (INFINITE, ["mlx5_0"]), FINE),
        (doctor.locked_memory, (8 << 20, ["mlx5_0"]), NOTE),
        (doctor.ray, ("2.60.0",), FINE),
        (doctor.ray, (None,), NOTE),
        (doctor.disk, ("/tmp", 0.5, 9 * GIB), FINE),
        (doctor.disk, ("/tmp", 0.96, GIB), PROBLEM),
        (doctor.cpp, (None,), NOTE),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_limits_of_the_machine_are_checked(
    check: Callable[..., CheckResult], given: tuple[Any, ...], state: CheckState
) -> None:
    assert states(check(*given)) == [state]


def test_an_sglang_that_the_plugin_does_not_fit_is_a_problem() -> None:
    cpu = replace(GOOD, cuda=None, driver=None)
    why = "LogitsProcessor.forward takes ('self',)"
    *_, plugin = doctor.sglang_checks("0.6.0", cpu, lambda: why)
    assert plugin.state is PROBLEM and plugin.remedy == why
    [absent] = doctor.sglang_checks(None, cpu, lambda: why)
    assert absent.state is NOTE


def test_nvcc_is_searched_where_sglang_searches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("home", "13.0"), ("path", "12.4")):
        program = tmp_path / name / "bin" / "nvcc"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {version}, V1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path/bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert find_cuda_tools("13.0").nvcc == (str(tmp_path / "path/bin/nvcc"), "12.4")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert find_cuda_tools("13.0").nvcc == (str(tmp_path / "home/bin/nvcc"), "13.0")


def test_a_toolkit_of_python_packages_is_used_if_no_other_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages/nvidia/cu99"
    for name in ("bin", "include", "nvvm", "lib"):
        (packages / name).mkdir(parents=True)
    nvcc = packages / "bin/nvcc"
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 99.0, V1\n")
    nvcc.chmod(0o755)
    (packages / "lib/libcudart.so.99").write_text("the runtime")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_HOME", "/given")
    assert cuda_home() is None, "the toolkit of CUDA_HOME is not used"
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    home = cuda_home()
    assert home is not None and cuda_home() == home
    assert (Path(home) / "lib64/libcudart.so").read_text() == "the runtime"
    assert (Path(home) / "include").resolve() == packages / "include"
    assert find_cuda_tools("99.0").nvcc == (f"{home}/bin/nvcc", "99.0")
    monkeypatch.setenv("PATH", f"{packages / 'bin'}:{os.environ['PATH']}")
    assert cuda_home() is None, "SGLang finds nvcc of PATH without it"


def test_the_exit_code_of_the_command_follows_its_findings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = doctor.main(["sglang=False"])
    lines = capsys.readouterr().out.splitlines()
    assert any(importlib.metadata.version("isotherm") in line for line in lines)
    assert code == any(line.strip().startswith("PROBLEM") for line in lines)
