"""isotherm as a library: a policy to sample, train and save step by step, and whole recipes.

    policy = isotherm.Policy("DIR", lr=1e-4)
    [completion] = policy.sample("2 + 2 =", temperature=0.7, max_new_tokens=8)
    policy.forward_backward([completion.row(advantages=1.0)], loss="ppo")
    policy.optim_step()
    policy.push()

    for metrics in isotherm.run(recipe="opd", student="DIR", ...):
        ...

Importing `isotherm` imports neither torch nor ray: names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from isotherm.shadowing import check_packages

if TYPE_CHECKING:
    from cluster.base.outcomes import RunFailed as RunFailed
    from distill.errors import CalibrationError as CalibrationError
    from distill.errors import CheckpointError as CheckpointError
    from distill.errors import ConfigError as ConfigError
    from distill.errors import DataError as DataError
    from distill.errors import EngineError as EngineError
    from distill.errors import IsothermError as IsothermError
    from distill.errors import NonFiniteError as NonFiniteError
    from distill.objective.batching import Batch as Batch
    from distill.objective.batching import TrainingRow as TrainingRow
    from distill.objective.settings import ObjectiveConfig as ObjectiveConfig
    from isotherm.policy import Policy as Policy
    from isotherm.runs import run as run
    from isotherm.sampler import Completion as Completion
    from isotherm.sampler import Sampler as Sampler
    from learner.policy_loss import PreferenceLoss as PreferenceLoss

_HOMES = {
    "Batch": "distill.objective.batching",
    "CalibrationError": "distill.errors",
    "CheckpointError": "distill.errors",
    "Completion": "isotherm.sampler",
    "ConfigError": "distill.errors",
    "DataError": "distill.errors",
    "EngineError": "distill.errors",
    "IsothermError": "distill.errors",
    "NonFiniteError": "distill.errors",
    "ObjectiveConfig": "distill.objective.settings",
    "Policy": "isotherm.policy",
    "PreferenceLoss": "learner.policy_loss",
    "RunFailed": "cluster.base.outcomes",
    "Sampler": "isotherm.sampler",
    "TrainingRow": "distill.objective.batching",
    "run": "isotherm.runs",
}

check_packages()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'isotherm' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(_HOMES)
