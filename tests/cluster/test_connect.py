"""Joining real clusters, from processes of their own: a process has one Ray and one token mode."""

import json
import os
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
# The device of a run, chosen before it joins.
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
# Lines of a worker, as a file gets them.
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
# What a head of another version would have written, in place of what this one wrote.
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
    """Runs a program with RAY_ADDRESS; returns all that it printed, with Ray's own lines."""
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


def test_lines_of_workers_are_not_coloured_where_nobody_sees_colours() -> None:
    printed = python(_PRINTED, None)
    assert "from a worker" in printed and "\x1b" not in printed
    assert "\x1b" in python(_PRINTED, None, RAY_COLOR_PREFIX="1")


@pytest.mark.parametrize(
    "variable, blocked, said",
    [
        ("HOME", ".ray", "unless RAY_AUTH_MODE=disabled, to ~/.ray"),
        ("RAY_TMPDIR", "", "RAY_TMPDIR names another directory"),
    ],
)
def test_where_ray_cannot_write_the_remedy_is_named(
    tmp_path: Path, variable: str, blocked: str, said: str
) -> None:
    """A file in place of the directory: what even root cannot write into."""
    place = tmp_path / "place"
    if blocked:
        place.mkdir()
    (place / blocked).write_text("")
    facts = join(None, **{variable: str(place), "RAY_AUTH_MODE": "token"})
    assert "Ray cannot start on this machine: " in facts["error"] and str(place) in facts["error"]
    assert said in facts["error"]


@pytest.mark.parametrize("setting", ["out=\udcff", "prompts=a\udce9.jsonl"])
def test_a_setting_that_is_not_utf8_is_refused(
    setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["recipe=opd", setting]) == 2
    assert f"{setting!a} is not UTF-8" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cluster_named_by_the_environment_is_joined() -> None:
    with ray_head(dashboard=False, cpus=3) as head:
        assert join(head.address) == {
            "cpus": 3, "namespace": "somewhere", "autoscales": False, "left": True,
        }  # fmt: skip
        assert python(_CHOOSE, head.address).split() == ["cpu", "cpu", "refused"]


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_an_autoscaler_is_noticed(version: int) -> None:
    with ray_head(dashboard=False, cpus=1, workers=1, autoscaler=version) as head:
        assert join(head.address)["autoscales"] is True
        assert python(_CHOOSE, head.address).split() == ["cpu", "refused", "cuda"]


@pytest.mark.slow
def test_without_an_address_ray_starts_here_with_a_cpu_for_every_actor() -> None:
    facts = join(None)
    assert facts["cpus"] == max(os.cpu_count() or 1, 5) and facts["autoscales"] is False


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
        error = join(f"{HOST}:{port}")["error"]
        assert f"no Ray head answers at RAY_ADDRESS={HOST}:{port}" in error
        taken.listen()  # something is there, and it is no Ray
        assert "no Ray head answers" in join(f"{HOST}:{port}")["error"]


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265", "head"])
def test_an_address_of_another_kind_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # whatever ran before in this process
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with refuses(ConfigError, "RAY_ADDRESS"), connect("x", 1):
        raise AssertionError("joined")


@pytest.mark.parametrize(
    ("address", "more"),
    [(f"{HOST}:1", []), (f"{HOST}:1", ["dry_run=rehearse"]), ("ray://head:1", ["dry_run=True"])],
)
def test_a_cluster_that_does_not_answer_is_found_before_libraries_of_models(
    tiny_pair: TinyPair, tmp_path: Path, address: str, more: list[str]
) -> None:
    arguments = [
        "recipe=opd", f"student={tiny_pair.student}", f"teacher={tiny_pair.teacher}",
        f"prompts={tiny_pair.prompts}", f"out={tmp_path / 'out'}", "temperature=1",
        "max_new_tokens=4", *more,
    ]  # fmt: skip
    assert python(_COMMAND.format(arguments=arguments), address).split() == ["2", "False"]


@pytest.mark.slow
def test_the_token_decides_who_gets_in(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("a" * 64)
    wrong.write_text("b" * 64)
    home = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(right)}
    with ray_head(dashboard=False, cpus=3, environment=token) as head:
        assert join(head.address, **token)["cpus"] == 3
        without = join(head.address, RAY_AUTH_MODE="disabled")["error"]
        other = join(head.address, **(home | {"RAY_AUTH_TOKEN_PATH": str(wrong)}))["error"]
        for error in (without, other):
            assert "refuses this process's token" in error and "RAY_AUTH_MODE=token" in error
        assert "there is no token" in join(head.address, **home)["error"]


@pytest.mark.slow
def test_other_versions_are_named() -> None:
    """On a head of its own, into which nobody gets afterwards."""
    with ray_head(dashboard=False, cpus=1) as head:
        python(_PRETEND, head.address)
        error = join(head.address)["error"]
    assert "Python: 3.10.4" in error and f"ray=={ray.__version__}" in error
