"""Actors in this process behave as Ray's do, and a run on them needs no Ray."""

import asyncio
import gc
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray
import torch
from rich.console import Console
from safetensors.torch import load_file

from cluster.config.arguments import Arguments
from cluster.handles import calls, errors
from cluster.handles.local_actor import LocalActor
from cluster.handles.node import is_connected, node_id, nodes_alive
from cluster.run_files.metric_table import described
from cluster.train import run_recipe
from distill.errors import ConfigError, EngineError
from tests.bare_machine import bare_environment
from tests.tiny import TinyPair
from tests.waiting import DEADLINE_S


@pytest.fixture(params=["Ray's errors", "stand-ins"])
def either_errors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "stand-ins":
        monkeypatch.setitem(sys.modules, "ray", None)


class Counter:
    """A class without asynchronous methods, whose calls run in sequence."""

    def __init__(self, start: int) -> None:
        if start < 0:
            raise ConfigError("start must not be negative")
        self.value = start

    def add(self, number: int) -> int:
        before = self.value
        time.sleep(0.01)
        self.value = before + number
        return self.value

    def wait_for(self, event: threading.Event) -> str:
        event.wait(DEADLINE_S)
        return threading.current_thread().name

    def fail(self) -> None:
        raise EngineError("the engine said no")


class Meeting:
    """A class with asynchronous methods, whose calls run concurrently."""

    def __init__(self) -> None:
        self.guests, self.closed = 0, False
        self.all_here = asyncio.Event()

    async def come(self, expected: int) -> int:
        self.guests += 1
        if self.guests == expected:
            self.all_here.set()
        await self.all_here.wait()
        return self.guests

    async def close(self) -> None:
        self.closed = True


def test_calls_run_in_order_in_a_thread_of_the_object() -> None:
    counter = LocalActor(Counter, 5)
    references = [counter.add.remote(1) for _ in range(20)]
    ready, rest = calls.wait(references, num_returns=20, timeout=DEADLINE_S)
    assert not rest and [calls.get(reference) for reference in ready] == list(range(6, 26))
    event = threading.Event()
    event.set()
    assert calls.get(counter.wait_for.remote(event)).startswith("Counter")
    assert calls.get(counter.__ray_call__.remote(lambda plain: plain.value)) == 25


async def test_asynchronous_calls_run_concurrently() -> None:
    meeting = LocalActor(Meeting)
    assert await asyncio.gather(*(meeting.come.remote(3) for _ in range(3))) == [3, 3, 3]


@pytest.mark.usefixtures("either_errors")
def test_calls_of_a_concurrency_group_overtake_a_busy_actor() -> None:
    counter, event = LocalActor(Counter, 0), threading.Event()
    busy = counter.wait_for.remote(event)
    calls.get(counter.__ray_ready__.options(concurrency_group="health").remote(), DEADLINE_S)
    aside = counter.add.options(concurrency_group="join")
    assert calls.get(aside.remote(1), DEADLINE_S) == 1
    with pytest.raises(errors.GetTimeoutError):
        calls.get(busy, timeout=0.05)
    assert calls.wait([busy], timeout=0) == ([], [busy])
    event.set()
    assert calls.get(busy, DEADLINE_S)


@pytest.mark.usefixtures("either_errors")
def test_errors_have_the_classes_of_ray() -> None:
    counter = LocalActor(Counter, 0)
    with pytest.raises(EngineError) as raised:
        calls.get(counter.fail.remote())
    assert isinstance(raised.value, errors.RayTaskError) and isinstance(
        raised.value.cause, EngineError
    )
    born_dead = LocalActor(Counter, -1)
    for call in (born_dead.__ray_ready__.remote(), born_dead.add.remote(1)):
        with pytest.raises(ConfigError):
            calls.get(call, DEADLINE_S)


async def test_a_cancelled_wait_does_not_stop_the_call() -> None:
    meeting = LocalActor(Meeting)
    first = meeting.come.remote(2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(first, 0.05)
    assert [await meeting.come.remote(2), await first] == [2, 2]


async def test_the_error_of_a_call_that_nobody_awaits_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gc.collect()  # objects of other tests log before
    caplog.clear()
    meeting = LocalActor(Meeting)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(meeting.come.remote(2), 0.05)
    await asyncio.to_thread(calls.kill, meeting)
    gc.collect()
    assert not [line for line in caplog.records if line.name == "asyncio"]


@pytest.mark.usefixtures("either_errors")
def test_an_ended_actor_is_closed_and_refuses() -> None:
    meeting = LocalActor(Meeting)
    plain = calls.get(meeting.__ray_call__.remote(lambda plain: plain))
    waiting = meeting.come.remote(2)
    calls.kill(meeting)
    assert plain.closed
    for reference in (waiting, meeting.come.remote(1), meeting.__ray_ready__.remote()):
        with pytest.raises(errors.RayActorError) as raised:
            calls.get(reference, DEADLINE_S)
        assert isinstance(raised.value, errors.RayError)
    calls.kill(meeting)


def test_an_ended_actor_holds_no_descriptor() -> None:
    meeting = LocalActor(Meeting)
    loop = calls.get(meeting.__ray_call__.remote(lambda _: asyncio.get_running_loop()), DEADLINE_S)
    thread = calls.get(meeting.__ray_call__.remote(lambda _: threading.current_thread()))
    calls.kill(meeting)
    thread.join(DEADLINE_S)
    assert loop.is_closed()


@pytest.mark.usefixtures("ray_cluster")
def test_the_same_calls_work_on_ray() -> None:
    remote: Any = ray.remote
    counter = remote(Counter).options(num_cpus=0).remote(1)
    assert calls.get(counter.add.remote(1), DEADLINE_S) == 2
    failing = counter.fail.remote()
    assert calls.wait([failing], timeout=DEADLINE_S) == ([failing], [])
    with pytest.raises(EngineError):
        calls.get(failing)
    assert calls.wait([], timeout=0) == ([], [])
    calls.kill(counter)
    with pytest.raises(errors.RayError):
        calls.get(counter.add.remote(1), DEADLINE_S)


def test_a_half_imported_ray_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in one process imports Ray at its first error, while other actors continue."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    assert not is_connected() and not calls.in_store(b"")
    assert (nodes_alive(), node_id()) == (1, "this process")


SCRIPT = """
import json, sys
from cluster.train import main
for arguments in json.load(sys.stdin):
    assert main(arguments) == 0, arguments
"""


@pytest.mark.e2e
def test_runs_in_one_process_need_no_ray(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """Only chz, torch, transformers, peft and their dependencies are installed."""
    sampled = {
        "student": tiny_pair.student, "prompts": tiny_pair.prompts, "prompts_per_step": 2,
        "group_size": 2, "max_new_tokens": 4, "engine": "embedded", "temperature": 0.7,
        "eval_size": 2,
    }  # fmt: skip
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{a} + 1 =", "completion": "{a}"}}\n' for a in range(9)))
    recipes = {
        "opd": sampled | {"teacher": tiny_pair.teacher},
        "rl": sampled | {"reward": "contains"},
        "sft": {"model": tiny_pair.student, "data": rows, "batch_size": 2},
    }
    given = [
        [f"recipe={recipe}", f"out={tmp_path / recipe}", "steps=2", "local=True"]
        + [f"{name}={value}" for name, value in settings.items()]
        for recipe, settings in recipes.items()
    ]
    packages = tmp_path / "packages"
    packages.mkdir()
    ended = subprocess.run(
        [sys.executable, "-S", "-c", SCRIPT], input=json.dumps(given),
        env=bare_environment(packages), capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for recipe in recipes:
        steps = [json.loads(line) for line in (tmp_path / recipe / "metrics.jsonl").open()]
        assert {1, 2} <= {step["step"] for step in steps}
        assert all(described(name) for step in steps for name in step)
        trained = load_file(tmp_path / recipe / "final/model.safetensors")
        before = load_file(Path(tiny_pair.student) / "model.safetensors")
        assert trained.keys() == before.keys()
        moved = any(not torch.equal(trained[name], before[name]) for name in before)
        assert moved or recipe == "rl"  # all rewards may be equal


def test_without_ray_a_run_on_it_is_refused(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    given = [
        "recipe=opd", f"student={tiny_pair.student}", f"teacher={tiny_pair.teacher}",
        f"prompts={tiny_pair.prompts}", f"out={tmp_path / 'run'}", "temperature=1",
    ]  # fmt: skip
    with pytest.raises(ConfigError):
        run_recipe(Arguments.of(given), Console(quiet=True))
