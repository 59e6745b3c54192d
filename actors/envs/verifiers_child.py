"""Process that plays episodes of a `verifiers` environment (see `verifiers_env`).

    python -P verifiers_child.py SETTINGS problems      writes the problems to stdout
    python -P verifiers_child.py SETTINGS               plays one episode per call (`serve`)

The process runs in the interpreter that has `verifiers`, and uses only `agent_child` of isotherm.
SETTINGS is JSON: `name`, `args`, `most`. A problem is the data of a task in the form in which
`verifiers` sends it between processes. The task is rebuilt from this data, so that no episode loads
the data set.
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
    """Load the environment. By default its agents run on this machine and execute no code.

    (The defaults of `verifiers` are a shell and a rented sandbox.)
    """
    given = {**args, "taskset": {**args.get("taskset", {}), "id": name}}
    roles = agent_config_fields(vf.resolve_env_config(json.loads(json.dumps(given))))
    for role, config in roles.items():
        settings = {**given.get(role, {})}
        if "runtime" not in config.model_fields_set:
            settings["runtime"] = {"type": "subprocess"}
        if config.harness is None and vf.default_harness_id(name) == "bash":
            settings["harness"] = {"id": "null"}
        given[role] = settings
    return vf.load_environment(vf.resolve_env_config(given))


def problems(env: Any, most: int | None) -> list[dict[str, Any]]:
    """First `most` problems of the environment; None: all."""
    if most is None and not env.taskset.bounded:
        raise ValueError("it has an endless number of problems; give env.problems")
    tasks = itertools.islice(env.taskset, most)
    return [task.data.model_dump(mode="json", exclude_none=True) for task in tasks]


class Player:
    """Plays episodes one at a time. The environment's servers run from the first episode on."""

    def __init__(self, env: Any) -> None:
        self._env, self._runner = env, asyncio.Runner()
        self._serving: Any = None

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Play an episode and return its result in the form of `agent_child.Answer`."""
        try:
            return self._runner.run(self._played(asked["problem"], asked["environment"]))
        except BaseException as error:  # the environment's code may raise anything
            return {"error": f"{type(error).__name__}: {error}"}

    async def _played(self, problem: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
        if self._serving is None:
            self._serving = self._env.serving()
            await self._serving.__aenter__()
        # Only in this process, not in the environment variable: uv, which starts agents, keeps
        # locks in TMPDIR that all episodes must share.
        tempfile.tempdir = given["TMPDIR"]
        # Another variable than OPENAI_API_KEY, which the environment's judges may use.
        os.environ[_KEY] = given["OPENAI_API_KEY"]
        client = vf.EvalClientConfig(base_url=given["OPENAI_BASE_URL"], api_key_var=_KEY)
        kind = type(self._env.taskset).task_type()
        task = kind(kind.data_type().model_validate(problem), self._env.config.taskset.task)
        context = vf.ModelContext(model="policy", client=client)
        return _result(await self._env.run_episode(task, context))


def _result(episode: Any) -> dict[str, Any]:
    """Mean of the rewards and metrics of the trainable agents, or the first error."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        problem = f"{errors[0].type}: {errors[0].message}" if errors else "the episode is not ok"
        return {"error": problem}
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
    except Exception as error:  # the environment's code may raise anything
        text = " ".join(str(error).split())
        # verifiers also reports "not found" if a package that the environment imports is missing.
        reason = f" ({error.__cause__})" if error.__cause__ else ""
        sys.exit(f"{type(error).__name__}: {text}{reason}")
    serve = runpy.run_path(str(Path(__file__).with_name("agent_child.py")))["serve"]
    serve(Player(env).answer)


if __name__ == "__main__":
    main()
