"""isotherm doctor: what is planted is found, with its remedy; what is here is told as it is."""

import importlib.metadata
import os
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from actors.sglang.cuda_tools import CudaTools, cuda_home, find_cuda_tools
from cluster.inspect import doctor
from cluster.inspect.doctor import CheckResult, CheckState, linear_attention

GIB = 1 << 30
GOOD = CudaTools(
    cuda="13.0", driver="580.95.05", nvcc=("/usr/local/cuda/bin/nvcc", "13.1"), libnuma=True
)


def states(*findings: CheckResult) -> list[CheckState]:
    assert all(bool(f.remedy) == (f.state is not CheckState.FINE) for f in findings)
    return [finding.state for finding in findings]


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({}, None),
        ({"driver": "570.124.06"}, "driver 570.124.06 is older than 580.65, which this torch's"),
        ({"driver": "535.183", "cuda": "12.8"}, None),
        ({"driver": "520.61", "cuda": "12.8"}, "older than 525.60"),
        ({"cuda": None}, "torch is a CPU build beside a GPU"),
        ({"cuda": None, "driver": None}, None),
        ({"cuda": "14.0"}, None),  # of which nothing is known
    ],
)
def test_a_torch_that_cannot_use_the_gpus_is_a_problem(
    change: dict[str, str | None], remedy: str | None
) -> None:
    found = doctor.torch_build("2.14.1", replace(GOOD, **change))
    assert states(found) == [CheckState.FINE if remedy is None else CheckState.PROBLEM]
    assert (remedy or "") in found.remedy


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"libnuma": False}, "apt-get install libnuma1"),
        ({"nvcc": None}, "install the CUDA 13 toolkit"),
        ({"nvcc": ("/usr/bin/nvcc", "12.4")}, "nvcc at /usr/bin/nvcc is of CUDA 12.4, and torch"),
    ],
)
def test_what_sglang_lacks_on_cuda_is_a_problem(change: dict[str, object], remedy: str) -> None:
    assert GOOD.sglang_problems() == []
    lacking = replace(GOOD, **change)  # type: ignore[arg-type]
    [problem] = lacking.sglang_problems()
    assert remedy in problem
    found = list(doctor.sglang_checks("0.5.23", lacking, lambda: None))
    assert states(found[-1]) == [CheckState.PROBLEM] and found[-1].remedy == problem
    assert replace(lacking, cuda=None).sglang_problems() == []


def test_kernels_for_linear_attention_are_no_more_than_a_note() -> None:
    assert linear_attention("0.5.2").state is CheckState.FINE
    missing = linear_attention(None)
    assert missing.state is CheckState.NOTE and "linear-attention" in missing.remedy


def test_a_gpu_that_torch_does_not_see_is_a_problem() -> None:
    assert states(*doctor.gpus(GOOD, [], None)) == [CheckState.FINE, CheckState.PROBLEM]
    driver, gpu, nccl = doctor.gpus(GOOD, ["H200"], "2.28.3")
    assert states(driver, gpu, nccl) == [CheckState.FINE] * 3 and nccl.found == "2.28.3"
    [*_, lacks] = doctor.gpus(GOOD, ["H200"], None)
    assert states(lacks) == [CheckState.NOTE] and "weights=group" in lacks.remedy
    assert states(*doctor.gpus(replace(GOOD, driver=None), [], None)) == [CheckState.FINE]


def test_the_cluster_that_a_run_would_join_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert not list(doctor.ray_cluster())
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert states(*doctor.ray_cluster()) == [CheckState.PROBLEM]
    for up, grows, state in ((0, True, CheckState.NOTE), (4, True, CheckState.FINE)):
        monkeypatch.setattr("cluster.placement.connect.cluster_gpus", lambda up=up: up)
        monkeypatch.setattr("cluster.placement.connect.autoscales", lambda grows=grows: grows)
        assert states(*doctor.ray_cluster()) == [state]


def test_the_machine_s_limits() -> None:
    infinite = resource.RLIM_INFINITY
    assert states(
        doctor.python((3, 11, 7), "Linux"),
        doctor.python((3, 10, 1), "Linux"),
        doctor.shared_memory(64 * GIB, 128 * GIB),
        doctor.shared_memory(64 << 20, 128 * GIB),
        doctor.open_files(infinite, infinite),
        doctor.open_files(4096, infinite),
        doctor.open_files(256, 4096),
        doctor.threads(infinite, infinite),
        doctor.threads(4096, infinite),
        doctor.threads(512, 512),
        doctor.locked_memory(8 << 20, []),
        doctor.locked_memory(infinite, ["mlx5_0"]),
        doctor.locked_memory(8 << 20, ["mlx5_0"]),
        doctor.ray("2.60.0"),
        doctor.ray(None),
        doctor.disk("/tmp", 0.5, 9 * GIB),
        doctor.disk("/tmp", 0.96, GIB),
        doctor.cpp(None),
    ) == [
        *(CheckState.FINE, CheckState.PROBLEM),
        *(CheckState.FINE, CheckState.NOTE),
        *(CheckState.FINE, CheckState.NOTE, CheckState.PROBLEM),
        *(CheckState.FINE, CheckState.NOTE, CheckState.PROBLEM),
        *(CheckState.FINE, CheckState.FINE, CheckState.NOTE),
        *(CheckState.FINE, CheckState.NOTE),
        *(CheckState.FINE, CheckState.PROBLEM),
        CheckState.NOTE,
    ]
    assert "--shm-size=39g" in doctor.shared_memory(64 << 20, 128 * GIB).remedy
    assert "hard limit" in doctor.open_files(256, 4096).remedy


def test_a_plugin_that_does_not_fit_is_a_problem() -> None:
    cpu = replace(GOOD, cuda=None, driver=None)
    said = "LogitsProcessor.forward takes ('self',)"
    found = list(doctor.sglang_checks("0.6.0", cpu, lambda: said))
    assert [finding.what for finding in found] == ["SGLang", "SGLang plugin"]
    assert found[-1].state is CheckState.PROBLEM and found[-1].remedy == said
    [absent] = doctor.sglang_checks(None, cpu, lambda: said)
    assert absent.state is CheckState.NOTE


def test_nvcc_is_looked_for_where_sglang_does(
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


def test_a_toolkit_of_python_packages_serves_where_no_other_fits(
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
    assert cuda_home() is None, "whoever names a toolkit gets it"
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    home = cuda_home()
    assert home is not None and cuda_home() == home
    assert (Path(home) / "lib64/libcudart.so").read_text() == "the runtime"
    assert (Path(home) / "include").resolve() == packages / "include"
    assert find_cuda_tools("99.0").nvcc == (f"{home}/bin/nvcc", "99.0")
    monkeypatch.setenv("PATH", f"{packages / 'bin'}:{os.environ['PATH']}")
    assert cuda_home() is None, "SGLang finds that one by itself"


def test_the_command_tells_of_this_machine_and_its_code_is_the_truth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = doctor.main(["sglang=False"])
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert any(
        re.search(r"fine +isotherm +" + importlib.metadata.version("isotherm"), x) for x in lines
    )
    problems = sum(line.strip().startswith("PROBLEM") for line in lines)
    assert code == (1 if problems else 0)
    assert ("a run could not start here" in said.err) == bool(problems)
