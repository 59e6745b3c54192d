"""Joining real clusters, each from a separate process: a process has one Ray and one token mode."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import ray

from cluster import train
from cluster.placement.connect import connect
from distill.errors import ConfigError
from tests.conftest import TinyPair
from tests.e2e.harness import REPOSITORY
from tests.e2e.ray_head import HOST, ray_head
from tests.refusals import refuses
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.e2e

_JOIN = """
import json, ray
from cluster.placement.connect import autoscales, connect
from distill.errors import ConfigError
try:
    with connect("somewhere", 5):
        facts = {
            "cpus": ray.cluster_resources()["CPU"],
            "namespace": ray.get_runtime_context().namespace,
            "autoscales": autoscales(),
        }
except ConfigError as error:
    facts = {"error": str(error)}
print(json.dumps(facts | {"left": not ray.is_initialized()}))
"""
# The device of a run that has not joined yet.
_CHOOSE = """
from cluster.config.recipes import make
from cluster.placement.device_choice import with_device
from distill.errors import ConfigError
def chosen(asked):
    config = make("sft", model="M", data="D.jsonl", out="O", lr=1e-3, steps=1, device=asked)
    try:
        return with_device(config)[0].cluster.device
    except ConfigError:
        return "refused"
print(*map(chosen, ("cpu", "auto", "cuda")))
"""
# A command with a cluster that does not answer.
_COMMAND = """
import sys
from cluster.train import main
code = main({arguments!r})
print(code, "torch" in sys.modules or "transformers" in sys.modules)
"""
# Output of a worker in a file.
_PRINTED = """
import io, sys, time, ray
from cluster.placement.connect import connect
sys.stdout = file = io.StringIO()
with connect("somewhere", 1):
    ray.get(ray.remote(lambda: print("from a worker")).remote())
    while "from a worker" not in file.getvalue():
        time.sleep(0.1)
sys.__stdout__.write(file.getvalue())
"""
# A command that gets SIGTERM while Ray's own handler is set, or afterwards.
_TERMINATED = """
import os, signal, sys, threading, time
from cluster.command import run_and_report
from cluster.placement.connect import connect

def terminate_with_rays_handler():
    while not getattr(signal.getsignal(signal.SIGTERM), "__module__", "").startswith("ray."):
        time.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)

def run(console):
    if sys.argv[1:] == ["during"]:
        threading.Thread(target=terminate_with_rays_handler, daemon=True).start()
    with connect("somewhere", 1):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

sys.exit(run_and_report(run))
"""
# Replaces the metadata of the head by those of another version.
_PRETEND = """
import json, ray
from ray._common.usage.usage_lib import get_cluster_metadata
from ray.experimental.internal_kv import internal_kv_get_gcs_client
ray.init()
client = internal_kv_get_gcs_client()
metadata = get_cluster_metadata(client) | {"python_version": "3.10.4"}
client.internal_kv_put(b"CLUSTER_METADATA", json.dumps(metadata).encode(), True, b"cluster")
"""


def python(program: str, address: str | None, **environment: str) -> str:
    """Run a program with RAY_ADDRESS; return its output, with lines of Ray."""
    outside = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**outside, **({} if address is None else {"RAY_ADDRESS": address}), **environment},
        cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def join(address: str | None, **environment: str) -> dict:
    printed = python(_JOIN, address, **environment).splitlines()
    facts = json.loads(next(line for line in printed if line.startswith("{")))
    assert facts["left"], "Ray was left connected"
    return facts


def test_lines_of_workers_in_a_file_are_not_coloured() -> None:
    printed = python(_PRINTED, None)
    assert "from a worker" in printed and "\x1b" not in printed
    assert "\x1b" in python(_PRINTED, None, RAY_COLOR_PREFIX="1")


@pytest.mark.parametrize(
    "variable, blocked, names",
    [("HOME", ".ray", "RAY_AUTH_MODE"), ("RAY_TMPDIR", "", "RAY_TMPDIR")],
)
def test_a_directory_that_ray_cannot_write_is_named_with_its_variable(
    tmp_path: Path, variable: str, blocked: str, names: str
) -> None:
    """A file is in place of the directory, so that even root cannot write there."""
    place = tmp_path / "place"
    if blocked:
        place.mkdir()
    (place / blocked).write_text("")
    facts = join(None, **{variable: str(place), "RAY_AUTH_MODE": "token"})
    assert str(place) in facts["error"] and names in facts["error"]


@pytest.mark.parametrize("setting", ["out=\udcff", "prompts=a\udce9.jsonl"])
def test_a_setting_that_is_not_utf8_is_refused(
    setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["recipe=opd", setting]) == 2
    assert f"{setting!a}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cluster_named_by_the_environment_is_joined() -> None:
    with ray_head(dashboard=False, cpus=3) as head:
        assert join(head.address) == {
            "cpus": 3, "namespace": "somewhere", "autoscales": False, "left": True,
        }  # fmt: skip
        assert python(_CHOOSE, head.address).split() == ["cpu", "cpu", "refused"]


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_an_autoscaler_is_detected(version: int) -> None:
    with ray_head(dashboard=False, cpus=1, workers=1, autoscaler=version) as head:
        assert join(head.address)["autoscales"] is True
        assert python(_CHOOSE, head.address).split() == ["cpu", "refused", "cuda"]


@pytest.mark.slow
def test_without_an_address_ray_starts_here_with_enough_cpus() -> None:
    facts = join(None)
    assert facts["cpus"] == max(os.cpu_count() or 1, 5) and facts["autoscales"] is False


@pytest.mark.slow
@pytest.mark.parametrize("when", ["during", "after"])
def test_a_signal_while_joining_ends_the_command_with_its_exit_code(when: str) -> None:
    outside = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = subprocess.run(
        [sys.executable, "-c", _TERMINATED, when],
        env=outside, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert signal.SIGTERM.name in ended.stderr.splitlines()[-1]


@pytest.mark.slow
def test_an_initialised_ray_is_used_and_left_alone(ray_cluster: None) -> None:
    before = ray.get_runtime_context().get_job_id()
    with connect("elsewhere", 1):
        assert ray.get_runtime_context().get_job_id() == before
    assert ray.is_initialized()


@pytest.mark.slow
def test_an_address_where_nothing_answers_is_refused() -> None:
    with closing(socket.socket()) as taken:
        taken.bind((HOST, 0))  # and does not listen
        port = taken.getsockname()[1]
        assert f"RAY_ADDRESS={HOST}:{port}" in join(f"{HOST}:{port}")["error"]
        taken.listen()  # another server than Ray
        assert f"RAY_ADDRESS={HOST}:{port}" in join(f"{HOST}:{port}")["error"]


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265", "head"])
def test_an_address_of_another_kind_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # tests before may have joined one
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with refuses(ConfigError, "RAY_ADDRESS"), connect("x", 1):
        raise AssertionError("joined")


@pytest.mark.parametrize(
    ("address", "more"),
    [(f"{HOST}:1", []), (f"{HOST}:1", ["dry_run=rehearse"]), ("ray://head:1", ["dry_run=True"])],
)
def test_a_cluster_that_does_not_answer_is_found_before_torch_is_imported(
    tiny_pair: TinyPair, tmp_path: Path, address: str, more: list[str]
) -> None:
    arguments = [
        "recipe=opd", f"student={tiny_pair.student}", f"teacher={tiny_pair.teacher}",
        f"prompts={tiny_pair.prompts}", f"out={tmp_path / 'out'}", "temperature=1",
        "max_new_tokens=4", *more,
    ]  # fmt: skip
    assert python(_COMMAND.format(arguments=arguments), address).split() == ["2", "False"]


@pytest.mark.slow
def test_only_the_right_token_joins(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("a" * 64)
    wrong.write_text("b" * 64)
    home = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(right)}
    with ray_head(dashboard=False, cpus=3, environment=token) as head:
        assert join(head.address, **token)["cpus"] == 3
        without = join(head.address, RAY_AUTH_MODE="disabled")["error"]
        other = join(head.address, **(home | {"RAY_AUTH_TOKEN_PATH": str(wrong)}))["error"]
        for error in (without, other, join(head.address, **home)["error"]):
            assert "token" in error


@pytest.mark.slow
def test_a_cluster_of_another_version_is_named() -> None:
    with ray_head(dashboard=False, cpus=1) as head:
        python(_PRETEND, head.address)
        error = join(head.address)["error"]
    assert "Python: 3.10.4" in error and f"ray=={ray.__version__}" in error
