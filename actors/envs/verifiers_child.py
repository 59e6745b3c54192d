"""The process that plays episodes of a `verifiers` environment (see `verifiers_env`).

    python -P verifiers_child.py SETTINGS problems      writes its problems to stdout
    python -P verifiers_child.py SETTINGS               plays one for each call (`serve`)

It runs in the interpreter that has `verifiers`, with nothing of isotherm's but `agent_child`.
SETTINGS is JSON: `name`, `args`, `most`. A problem is the data of a task, as `verifiers` sends it
between processes; the task is made from it again, and no episode loads the data set.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports] - of the other interpreter
from verifiers.v1.configs.agent import (  # pyright: ignore[reportMissingImports]
    agent_config_fields,
)

_KEY = "ISOTHERM_EPISODE_KEY"


def loaded(name: str, args: Mapping[str, Any]) -> Any:
    """The environment. Its agents run on this machine and execute no code, unless told otherwise.

    (The defaults of `verifiers` are a shell, and a sandbox that is rented.)
    """
    given = {**args, "taskset": {**args.get("taskset", {}), "id": name}}
    roles = agent_config_fields(vf.resolve_env_config(json.loads(json.dumps(given))))
    for role, config in roles.items():
        told = {**given.get(role, {})}
        if "runtime" not in config.model_fields_set:
            told["runtime"] = {"type": "subprocess"}
        if config.harness is None and vf.default_harness_id(name) == "bash":
            told["harness"] = {"id": "null"}
        given[role] = told
    return vf.load_environment(vf.resolve_env_config(given))


def problems(env: Any, most: int | None) -> list[dict[str, Any]]:
    """The first problems of the environment, or all."""
    if most is None and not env.taskset.bounded:
        raise ValueError("it has problems without end; say how many (env.problems)")
    tasks = itertools.islice(env.taskset, most)
    return [task.data.model_dump(mode="json", exclude_none=True) for task in tasks]


class Player:
    """Plays episodes, one at a time. What the environment serves is up from the first on."""

    def __init__(self, env: Any) -> None:
        self._env, self._runner = env, asyncio.Runner()
        self._serving: Any = None

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The result of an episode, as agents give it."""
        try:
            return self._runner.run(self._played(asked["problem"], asked["environment"]))
        except BaseException as error:  # the environment's code may raise anything
            return {"error": f"{type(error).__name__}: {error}"}

    async def _played(self, problem: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
        if self._serving is None:
            self._serving = self._env.serving()
            await self._serving.__aenter__()
        # For this process alone: uv, which agents start with, has its locks in TMPDIR, and shares
        # them with other episodes.
        tempfile.tempdir = given["TMPDIR"]
        # The environment's judges may have an endpoint by OPENAI_BASE_URL: the episode's is apart.
        os.environ[_KEY] = given["OPENAI_API_KEY"]
        client = vf.EvalClientConfig(base_url=given["OPENAI_BASE_URL"], api_key_var=_KEY)
        kind = type(self._env.taskset).task_type()
        task = kind(kind.data_type().model_validate(problem), self._env.config.taskset.task)
        context = vf.ModelContext(model="policy", client=client)
        return _result(await self._env.run_episode(task, context))


def _result(episode: Any) -> dict[str, Any]:
    """The mean of its agents' rewards and metrics, or the first error."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        told = f"{errors[0].type}: {errors[0].message}" if errors else "the episode is not ok"
        return {"error": told}
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    metrics: dict[str, list[float]] = {}
    for trace in traces:
        for name, value in trace.metrics.items():
            if value is not None:
                metrics.setdefault(name, []).append(value)
    means = {name: sum(values) / len(values) for name, values in metrics.items()}
    reward = sum(trace.reward for trace in traces) / len(traces)
    return {"result": {"reward": reward, "metrics": means}}


def main() -> None:
    """Entry point."""
    settings = json.loads(sys.argv[1])
    answers = os.dup(1)
    if sys.argv[2:] == ["problems"]:
        os.dup2(2, 1)
    try:
        env = loaded(settings["name"], settings["args"])
        if sys.argv[2:] == ["problems"]:
            with os.fdopen(answers, "w") as file:
                json.dump(problems(env, settings["most"]), file)
            return
    except Exception as error:  # whatever the environment's own code raises
        told = " ".join(str(error).split())
        # verifiers says "not found" of an environment that is there, and lacks what it imports.
        reason = f" ({error.__cause__})" if error.__cause__ else ""
        sys.exit(f"{type(error).__name__}: {told}{reason}")
    serve = runpy.run_path(str(Path(__file__).with_name("agent_child.py")))["serve"]
    serve(Player(env).answer)


if __name__ == "__main__":
    main()
