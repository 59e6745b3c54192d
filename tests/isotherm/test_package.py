"""Effects of importing the package, and packages of the same names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import isotherm
from tests.conftest import TinyPair
from tests.e2e.harness import REPOSITORY, metrics, opd_arguments

# Runs a script, and sends Ctrl-C when a module is imported.
_INTERRUPTED = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by jobs in the background
class Interrupt:
    def find_spec(name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.argv = sys.argv[1:]
module = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupt)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> str:
    """Console script as pip writes it."""
    path = tmp_path / "bin" / "isotherm"
    path.parent.mkdir()
    path.write_text("import sys\nfrom isotherm.__main__ import main\nsys.exit(main())\n")
    return str(path)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Working directory of the test."""
    path = tmp_path / "here"
    path.mkdir()
    return path


def test_importing_it_imports_neither_torch_nor_ray(here: Path) -> None:
    heavy = {"torch", "ray", "transformers", "chz", "numpy", "rich"}
    code = f"import sys, isotherm; sys.exit(', '.join({heavy} & set(sys.modules)) or None)"
    done = python("-c", code, cwd=here)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("word", "meant"), [("trian", "'train'"), ("sft", "train recipe=sft")])
def test_an_unknown_command_is_refused(here: Path, script: str, word: str, meant: str) -> None:
    done = python(script, word, cwd=here)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {word!r} ") and meant in done.stderr
    assert done.stderr.count("\n") == 1
    assert {"demo", "evaluate", "train"} < set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("cluster.cli", ["train"]),
        ("cluster.train", ["train"]),
        ("chz", ["train"]),
        ("cluster.inspect.report.command", ["report"]),
        ("cluster.demos.demo", ["demo", "out=OUT"]),
        ("torch", ["doctor"]),
    ],
)
def test_an_interrupt_during_imports_prints_one_line(
    here: Path, script: str, module: str, arguments: list[str]
) -> None:
    done = python("-c", _INTERRUPTED, script, module, *arguments, cwd=here)
    assert (done.returncode, done.stderr) == (130, "error: interrupted (SIGINT)\n")


def test_every_name_is_there() -> None:
    for name in isotherm._HOMES:
        assert getattr(isotherm, name) is not None and name in dir(isotherm)
    with pytest.raises(AttributeError):
        _ = isotherm.nothing  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("package", [True, False], ids=["a package", "a module"])
def test_packages_of_the_same_name_have_their_path(here: Path, script: str, package: bool) -> None:
    hiding = here / "cluster" if package else here / "cluster.py"
    if package:
        hiding.mkdir()
        (hiding / "__init__.py").touch()
    else:
        hiding.touch()
    (here / "actors").mkdir()  # no package: Python passes over it
    complaint = f"{hiding} hides isotherm's package 'cluster'"
    for door in ([script], ["-m", "isotherm"], ["-c", "import isotherm"]):
        done = python(*door, "--version", cwd=here)
        assert done.returncode in (1, 2) and complaint in done.stderr, door
        assert str(here) in done.stderr
    done = python(script, "--version", cwd=here)
    assert done.stderr.splitlines() == [done.stderr.strip()], "a line, not a traceback"
    hiding.rename(here / "clusters")
    assert python("-c", "import isotherm", cwd=here).returncode == 0


@pytest.mark.slow
def test_ray_s_workers_find_users_modules(here: Path, script: str, tiny_pair: TinyPair) -> None:
    (here / "my_file.py").write_text("def f(response, answer):\n    return len(response)\n")
    settings = opd_arguments(tiny_pair, here / "out", reward="my_file:f", reward_coef=1, steps=1)
    done = python(script, "train", "recipe=opd", *settings, cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert metrics(here / "out")[-1]["reward/mean"] > 0
