"""Errors of actors' calls: Ray's classes, or stand-ins of the same names if Ray is not installed.

    except errors.RayError as error:

A class is looked up when an error is handled, not at import. So a run with `local=True` does not
load Ray before its first error, and works on a machine without Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.exceptions import (
        GetTimeoutError,
        ObjectLostError,
        RayActorError,
        RayError,
        RayTaskError,
    )

__all__ = ["GetTimeoutError", "ObjectLostError", "RayActorError", "RayError", "RayTaskError"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(name)
    try:
        from ray import exceptions
    except ModuleNotFoundError as missing:
        if missing.name != "ray":
            raise
        from cluster.handles import local_errors as exceptions
    return getattr(exceptions, name)
