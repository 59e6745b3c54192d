"""Shells of actor classes, which are sent without the hosted class."""

import inspect
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import ray
from ray.cloudpickle.cloudpickle import dumps

from actors.embedded.engine import EmbeddedEngine
from actors.embedded.reward_model import EmbeddedRewardModel
from actors.sglang.external import ExternalSglangEngine
from actors.sglang.hosted import HostedSglangEngine
from cluster.handles import calls
from cluster.handles.local_actor import LocalActor
from cluster.hosts.actors import deferred
from distill.engine import ScoreRequest
from distill.errors import DataError
from tests.conftest import TinyPair

# The class arrives without its module, which is imported to make an instance.
UNPICKLE = """
import pickle, sys
from cluster.hosts.actors import EarlySetting

hosted = pickle.loads(sys.stdin.buffer.read())
loaded = {"torch", "transformers", "actors"} & set(sys.modules)
assert not loaded, loaded
sys.modules["torch"] = None
begun = []
try:
    hosted(model_path=EarlySetting(lambda: begun.append("actors.embedded" in sys.modules)))
except ImportError:
    assert "actors.embedded" in sys.modules and begun == [False]
else:
    raise AssertionError("an engine without torch")
"""
HOSTED = [EmbeddedEngine, EmbeddedRewardModel, ExternalSglangEngine, HostedSglangEngine]


def test_the_class_arrives_without_torch_and_imports_it_to_make_an_engine() -> None:
    remote: Any = ray.remote(deferred(EmbeddedEngine))
    sent = dumps(remote.__ray_metadata__.modified_class)
    subprocess.run([sys.executable, "-c", UNPICKLE], input=sent, check=True, timeout=300)


@pytest.mark.parametrize("plain", HOSTED, ids=lambda plain: plain.__name__)
def test_a_shell_has_the_methods_of_the_hosted_class(plain: type) -> None:
    def asynchronous(kind: type) -> dict[str, bool]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {
            name: inspect.iscoroutinefunction(method)
            for name, method in methods
            if not name.startswith("_")
        }

    shell = deferred(plain)
    assert asynchronous(shell) == asynchronous(plain) != {}
    assert shell.__name__ == plain.__name__ and plain.__qualname__ in str(shell.__doc__)
    assert pickle.loads(dumps(shell)).__module__ == plain.__module__


@pytest.mark.usefixtures("ray_cluster")
def test_an_engine_in_a_shell_answers_and_raises_as_the_engine(tiny_pair: TinyPair) -> None:
    tokens_T = np.array([5, 6, 7, 8], np.int32)
    request = ScoreRequest(tokens_T=tokens_T, start=1, temperatures=(0.7,))
    unknown = ScoreRequest(tokens_T=tokens_T + 10**6, start=1, temperatures=(0.7,))
    settings = {"model_path": tiny_pair.student, "device": "cpu", "threads": 1}
    handles = [
        ray.remote(deferred(EmbeddedEngine)).options(num_cpus=0).remote(**settings),
        LocalActor(EmbeddedEngine, **settings),
    ]
    for handle in handles:
        with pytest.raises(DataError):
            calls.get(handle.score.remote([unknown]))
    [served], [alone] = (calls.get(handle.score.remote([request])) for handle in handles)
    np.testing.assert_array_equal(served.logprobs_by_temperature, alone.logprobs_by_temperature)
    ray.kill(handles[0])
    handles[1].end()


def test_a_local_class_is_hosted_without_a_shell() -> None:
    class Local:
        pass

    assert deferred(Local) is Local
