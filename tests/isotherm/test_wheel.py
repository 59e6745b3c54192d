"""The wheel, built from the sdist: complete, and enough to run every part without the sources."""

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from configparser import ConfigParser
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import pytest

from actors.sglang.installed import sglang_installed
from isotherm.shadowing import PACKAGES
from tests.conftest import TinyPair
from tests.e2e.harness import REPOSITORY, metrics, opd_arguments
from tests.waiting import DEADLINE_S

BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def build(hook: str, source: Path, out: Path) -> Path:
    """Call a hook of the build backend as `pip` and `build` do; return the file."""
    out.mkdir()
    subprocess.run(
        [sys.executable, "-c", BUILD, hook, out],
        cwd=source, check=True, capture_output=True, text=True,
    )  # fmt: skip
    (made,) = out.iterdir()
    return made


def sources(*directories: str) -> list[str]:
    """Files of the repository in git, without generated ones."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *directories],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return [name for name in listed.split("\0") if name and (REPOSITORY / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wheel")
    for name in sources():  # a build in the checkout would take what older builds left there
        (root / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, root / "checkout" / name)
    sdist = build("build_sdist", root / "checkout", root / "sdist")
    shutil.unpack_archive(sdist, root / "unpacked", filter="data")
    (unpacked,) = (root / "unpacked").iterdir()
    return build("build_wheel", unpacked, root / "dist")


def test_it_has_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == set(sources("isotherm", *PACKAGES))


def test_its_metadata_name_version_license_and_entry_points(wheel: Path) -> None:
    archive = ZipFile(wheel)
    (root,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    metadata = message_from_string(archive.read(f"{root}/METADATA").decode())
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"{root}/licenses/LICENSE" in archive.namelist()
    points = ConfigParser()
    points.read_string(archive.read(f"{root}/entry_points.txt").decode())
    for group, name in (("console_scripts", "isotherm"), ("sglang.srt.plugins", "isotherm")):
        module, _, function = points[group][name].partition(":")
        assert callable(getattr(importlib.import_module(module), function))


class Installation:
    """Virtual environment with the wheel and this environment's libraries, without the sources."""

    def __init__(self, wheel: Path, root: Path) -> None:
        self._bin, self.directory = root / "venv/bin", root / "elsewhere"
        self.directory.mkdir()
        venv.create(root / "venv")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, "--python", self._bin / "python", "install", "--no-index", "--no-deps", wheel],
            check=True, env=self._environment,
        )  # fmt: skip
        # After pip, which would otherwise find the editable installation there.
        (packages,) = (root / "venv").glob("lib/python*/site-packages")
        (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")

    @property
    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return kept | {"PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}"}

    def run(self, program: str, *arguments: str) -> str:
        """Run a program of the environment in another directory; return its output."""
        done = subprocess.run(
            [str(self._bin / program), *arguments],
            cwd=self.directory, env=self._environment, timeout=DEADLINE_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(wheel, tmp_path_factory.mktemp("installed"))


@pytest.mark.slow
def test_its_modules_and_the_plugin_are_its_own(installed: Installation) -> None:
    program = (
        "import sys\n"
        "from importlib import import_module\n"
        "from importlib.metadata import entry_points\n"
        f"for name in {('isotherm', *PACKAGES)}: print(import_module(name).__file__)\n"
        "(plugin,) = entry_points(group='sglang.srt.plugins', name='isotherm')\n"
        "print(sys.modules[plugin.load().__module__].__file__)"
    )
    files = installed.run("python", "-c", program).splitlines()
    assert len(files) == 2 + len(PACKAGES)
    assert all(Path(file).is_relative_to(installed.directory.parent / "venv") for file in files)


@pytest.mark.slow
def test_help_version_and_doctor(installed: Installation) -> None:
    assert {"train", "demo", "doctor"} <= set(installed.run("isotherm", "--help").split())
    assert installed.run("isotherm", "--version") == f"isotherm {PROJECT['version']}\n"
    checked = installed.run("isotherm", "doctor")
    assert "supports this version" in checked or not sglang_installed(), checked


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_a_run_and_its_commands(installed: Installation, tiny_pair: TinyPair, engine: str) -> None:
    if engine == "sglang" and not sglang_installed():
        pytest.skip("SGLang is not installed")
    out = installed.directory / engine
    (installed.directory / "run.yaml").write_text(f"recipe: opd\nengine: {engine}\n")
    settings = opd_arguments(tiny_pair, out, steps=2)
    settings = [each for each in settings if not each.startswith("engine=")]
    installed.run("isotherm", "train", "config=run.yaml", *settings)
    assert [line["step"] for line in metrics(out)] == [1, 2]
    installed.run("isotherm", "audit", f"out={out}")
    installed.run("isotherm", "report", f"out={out}")
    assert "opd/reverse_kl" in (out / "report.html").read_text()


@pytest.mark.slow
def test_the_demo(installed: Installation) -> None:
    output = installed.run("isotherm", "demo", "out=demo", "engine=embedded")
    assert "student after" in output
    assert (installed.directory / "demo/opd/report.html").is_file()
