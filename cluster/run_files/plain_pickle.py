"""Pickles of groups that name plain data alone, so that reading one executes no code of its own.

A group on disk consists of the classes of `distill.types`, numpy arrays, and built-in values. A
pickle that names anything else is refused before it is called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

_NUMPY = ("ndarray", "dtype", "_reconstruct", "scalar", "_frombuffer")
_NAMES = {
    *(("distill.types", name) for name in ("TrajectoryGroup", "Trajectory", "Segment")),
    *(("distill.types", name) for name in ("TopLogprobs", "StopReason")),
    *(("numpy", name) for name in _NUMPY),
    *(("numpy._core.multiarray", name) for name in _NUMPY),
    *(("numpy._core.numeric", name) for name in _NUMPY),
    ("builtins", "dict"),
}


def dumps(value: Any) -> bytes:
    """Pickle a value; mappings of other classes, as users' metrics may be, become dicts."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """Read what `dumps` wrote.

    Raises:
        pickle.UnpicklingError: it names a class or a function that is no plain data.
    """
    return _Unpickler(io.BytesIO(data)).load()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return (dict, (list(obj.items()),)) if isinstance(obj, Mapping) else NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a group")
        return super().find_class(module, name)
