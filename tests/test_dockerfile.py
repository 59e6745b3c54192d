"""Dockerfile steps that need neither a GPU nor a base image, run from the Dockerfile's own lines.

The two base images are not built. Of the steps as root (apt-get, useradd) only the shell syntax is
checked.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from isotherm.shadowing import PACKAGES
from tests.test_deploy import CUDA_PINS, DEPLOY, REPOSITORY, pins

TEXT = (DEPLOY / "Dockerfile").read_text()
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
EXTRAS = "wandb,tensorboard,mlflow,data,mcp,textarena,judge"
# Against hangs only.
DEADLINE_S = 1200


def instructions(text: str) -> list[tuple[str, str]]:
    """(Instruction, arguments) in order; comments left out, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, arguments.strip()) for name, _, arguments in found]


STEPS = instructions(TEXT)


def arguments(instruction: str) -> list[str]:
    return [given for name, given in STEPS if name == instruction]


def ignored(path: str) -> bool:
    """True if .dockerignore excludes the file; the last matching pattern decides."""
    result = False
    rooted = [path, *map(str, Path(path).parents)]
    for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        names = Path(path).parts if pattern.startswith("**/") else rooted
        if any(fnmatch(name, pattern.removeprefix("**/")) for name in names):
            result = not line.startswith("!")
    return result


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of WORKDIR with the files that COPY takes from the build context."""
    directory = tmp_path_factory.mktemp("image")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    sent = [name for name in listed if name and not ignored(name) and (REPOSITORY / name).exists()]
    for copied in arguments("COPY"):
        *sources, target = copied.split()
        for source in sources:
            taken = [name for name in sent if Path(name).is_relative_to(source)]
            assert taken, f"COPY {source}: the build is sent no such file"
            for name in taken:
                below = Path(name).relative_to(source)
                to = directory / (target if target != "./" else source) / below
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPOSITORY / name, to)
    return directory


def run_install(
    image: Path, root: Path, python: Path, environment: Mapping[str, str], *flags: object
) -> None:
    """Run the Dockerfile's pip step in WORKDIR, with these additional flags."""
    (step,) = (each for each in arguments("RUN") if "pip install" in each)
    (root / "bin").mkdir(exist_ok=True)
    words = " ".join(map(str, flags))
    for name, line in (
        ("pip", f'exec {sys.executable} -m pip --python {python} "$@" {words}'),
        ("python", f'exec {python} "$@"'),
    ):
        (root / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (root / "bin" / name).chmod(0o755)
    path = f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-e", "-c", step],
        cwd=image, env={**os.environ, **environment, "PATH": path, "PIP_RETRIES": "1"},
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_step_is_a_shell_command() -> None:
    assert len(arguments("RUN")) >= 4
    for step in arguments("RUN"):
        subprocess.run(["sh", "-n", "-c", step], check=True)


def test_the_image_has_pinned_versions_and_every_package() -> None:
    (python,) = re.findall(r"python:(\d+\.\d+)-", " ".join(arguments("FROM")))
    assert PROJECT["project"]["requires-python"] == f">={python}"
    assert PROJECT["tool"]["pyright"]["pythonVersion"] == python
    (sglang,) = re.findall(r"lmsysorg/sglang:v(\S+) AS cuda", " ".join(arguments("FROM")))
    assert sglang == CUDA_PINS["sglang"], "SGLang's image is not of the version that is pinned"
    assert arguments("USER") == ["ray"]
    copied = {word for line in arguments("COPY") for word in line.split()}
    for package in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]:
        assert package.rstrip("*") in copied, f"{package} is not in the image"


def test_the_build_is_sent_no_more_than_is_copied(image: Path) -> None:
    copied = {str(path.relative_to(image)) for path in image.rglob("*") if path.is_file()}
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    assert {name for name in listed if name and not ignored(name)} <= copied
    for name in (".git/config", ".venv/bin/python", "outputs/demo", "cluster/__pycache__/a.pyc"):
        assert ignored(name), name


def test_packages_of_the_base_image_are_kept(image: Path, tmp_path: Path) -> None:
    """As in SGLang's image: installed packages stay, and missing ones get the pinned versions."""
    file = tmp_path / "pins.txt"
    file.write_text("# comment==1\nRay==0.1\nhuggingface-hub==0.1\nno_such.package==7.0\n")
    printed = subprocess.run(
        [sys.executable, image / "deploy/hold.py", file], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    held = {str(canonicalize_name(n)): v for n, v in (line.split("==") for line in printed)}
    for package in ("ray", "torch", "huggingface-hub", "numpy"):
        assert held[package] == importlib.metadata.version(package)
    assert held["no-such-package"] == "7.0"
    assert len(held) == len(printed), "a package is held at two versions"


def test_the_install_step_and_the_entry_points_run(image: Path, tmp_path: Path) -> None:
    """Run with this environment's libraries in place of the pinned ones."""
    site = tmp_path / "site"
    run_install(
        image, tmp_path, Path(sys.executable), {"VARIANT": "cpu", "EXTRAS": ""},
        "--no-deps", "--no-build-isolation", "--target", site,
    )  # fmt: skip
    assert {path.name for path in site.iterdir() if path.is_dir()} >= {*PACKAGES, "isotherm"}
    (command,) = map(json.loads, arguments("CMD"))
    assert arguments("ENTRYPOINT") == ["[]"]
    environment = os.environ | {"PYTHONPATH": str(site)}
    assert len(set(arguments("WORKDIR"))) == 2, "the sources would hide what is installed"
    (home := tmp_path / "home").mkdir()
    for given in ([sys.executable, *command[1:], "--help"], [site / "bin/isotherm", "--version"]):
        done = subprocess.run(given, cwd=home, env=environment, check=True, capture_output=True)
        assert done.stdout
    plugins = importlib.metadata.distributions(path=[str(site)])
    (installed,) = (each for each in plugins if each.metadata["Name"] == "isotherm")
    (plugin,) = installed.entry_points.select(group="sglang.srt.plugins")
    assert callable(plugin.load())


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "extras"), [("cpu", EXTRAS), ("cuda", "wandb,data,judge")])
def test_pip_finds_versions_that_go_together(
    variant: str, extras: str, image: Path, tmp_path: Path
) -> None:
    """Packages that pip would install into an empty environment, by the registry's metadata."""
    venv.create(tmp_path / "empty")
    report = tmp_path / "report.json"
    run_install(
        image, tmp_path, tmp_path / "empty/bin/python", {"VARIANT": variant, "EXTRAS": extras},
        "--dry-run", "--quiet", "--report", report,
    )  # fmt: skip
    metadata = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    chosen: dict[str, str] = {canonicalize_name(each["name"]): each["version"] for each in metadata}
    pinned: dict[str, Any] = pins("constraints.txt" if variant == "cpu" else "constraints-cuda.txt")
    assert {"isotherm", "ray", "torch", "transformers"} <= chosen.keys()
    if variant == "cuda":
        assert chosen["sglang"] == pinned["sglang"]
    elif chosen["torch"].endswith("+cpu") and sys.version_info[:2] == (3, 11):
        loose = chosen.keys() - pinned.keys() - {"setuptools"}  # which `pip freeze` leaves out
        assert loose == {"isotherm"}, "packages without a pinned version"
