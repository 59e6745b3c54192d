"""Environments of the `verifiers` library, run by a separate interpreter.

    env=Verifiers env.name=NAME env.python=/path/to/venv/bin/python

`verifiers` and SGLang need different versions of `openai`, so they cannot share an interpreter. An
environment is an agent like any other (`agent`): it calls the policy through the endpoint of its
episode, in a process that is kept for later episodes. Its data set provides the run's problems.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import chz

from actors.envs.agent import (
    AgentDataset,
    AgentLimits,
    AgentProblem,
    AgentSetting,
    feedback_on_agent,
)
from actors.envs.agent_process import AgentProgram
from distill.data.prompts import teacher_named
from distill.envs.base import EnvContext
from distill.errors import ConfigError
from distill.json_values import read_object
from distill.rules import IN_MEMORY, at_least, readable_as, setting
from distill.sandbox.guard import guarded, lifeline

# Oldest supported version.
_OLDEST = (0, 4)
_CHILD = str(Path(__file__).with_name("verifiers_child.py"))
_VERSION = "import importlib.metadata as m; print(m.version('verifiers'))"
_VERSION_TIMEOUT_S = 120.0
# Loading a data set may download it.
_PROBLEMS_TIMEOUT_S = 1800.0


def verifiers_version(python: str) -> str:
    """Version of `verifiers` in an interpreter.

    Raises:
        ConfigError: there is no such interpreter, or its `verifiers` is missing or too old.
    """
    if shutil.which(python) is None:
        raise ConfigError(
            f"env.python={python} is not a program; give an interpreter in which verifiers is "
            "installed, such as venv/bin/python",
        )
    done = subprocess.run(
        [python, "-P", "-c", _VERSION],
        capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, env=_environment(),
    )  # fmt: skip
    version = done.stdout.strip()
    oldest = ".".join(map(str, _OLDEST))
    if done.returncode or tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
        found = f"verifiers {version}" if version else "no verifiers"
        raise ConfigError(
            f"env.python={python} has {found}; {python} -m pip install 'verifiers>={oldest}' uv",
        )
    return version


def _environment() -> dict[str, str]:
    """Environment of this process without PYTHONPATH, which belongs to its interpreter."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersProgram(AgentProgram):
    """Program of an environment; `command` is the environment's name.

    Attributes:
        python: interpreter that has `verifiers`.
        settings: SETTINGS of `verifiers_child`.
    """

    may_give_feedback: ClassVar[bool] = False

    python: str
    settings: str

    def kept_command(self) -> Sequence[str]:
        return [self.python, "-P", _CHILD, self.settings]

    def environment(self) -> dict[str, str]:
        inherited = _environment()
        folder = str(Path(self.python).parent)
        return {**inherited, "PATH": os.pathsep.join([folder, inherited.get("PATH", os.defpath)])}

    def problems(self) -> list[dict[str, Any]]:
        """Load the environment's problems, each the data of a task.

        Raises:
            ConfigError: the environment cannot be loaded, or has no problems.
        """
        done = subprocess.run(
            guarded([*self.kept_command(), "problems"]),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, env=self.environment(),
            timeout=_PROBLEMS_TIMEOUT_S, start_new_session=True, pass_fds=(lifeline(),),
        )  # fmt: skip
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ConfigError(f"env.name={self.command} cannot be loaded: {last}")
        rows = json.loads(done.stdout)
        if not rows:
            raise ConfigError(f"env.name={self.command} has no problems")
        return rows


@chz.chz
class Verifiers(AgentLimits):
    """env=Verifiers: an environment of the `verifiers` library, in a separate interpreter."""

    reads_prompts = False
    judges = False

    name: str = chz.field(
        doc="the environment, a taskset that is installed in env.python (docs/recipes/agents.md)"
    )
    python: str = chz.field(
        doc="Python interpreter in which verifiers, uv and the environment are installed, on "
        "each node that runs a rollout worker",
    )
    args: str = setting(
        readable_as("JSON object", read_object, allows="{}", refuses="[]"),
        default="{}",
        doc='the environment\'s own settings, as JSON: {"taskset": {"num_tasks": 100}}, '
        '{"agent": {"harness": {"id": "bash"}, "runtime": {"type": "docker"}}}',
    )
    problems: int | None = setting(
        at_least(1),
        IN_MEMORY,
        default=None,
        doc="number of problems to use, from the first; required if they are endless",
    )

    def check_here(self) -> None:
        verifiers_version(self.python)

    def __call__(self, path: str | None, setting: EnvContext) -> AgentDataset:
        self.check_here()
        settings = {"name": self.name, "args": read_object(self.args), "most": self.problems}
        program = VerifiersProgram(
            command=self.name,
            directory=os.getcwd(),
            time_s=self.time_s,
            memory_mb=self.memory_mb,
            python=str(Path(shutil.which(self.python) or self.python).absolute()),
            settings=json.dumps(settings, sort_keys=True),
        )
        teacher = teacher_named({}, setting.teachers)
        feedback = feedback_on_agent(setting, teacher, None)
        problems_P = [
            AgentProblem(row=row, line=number, teacher=teacher, feedback=feedback)
            for number, row in enumerate(program.problems(), start=1)
        ]
        return AgentDataset(problems_P, AgentSetting.of(self, program, setting))
