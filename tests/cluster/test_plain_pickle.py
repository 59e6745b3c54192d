"""Kept groups come back as they were; a pickle of anything else is refused and not run."""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from cluster.run_files import plain_pickle
from tests.samples import group, segment, top_logprobs, trajectory


def assert_equal(ours: Any, theirs: Any) -> None:
    if is_dataclass(ours):
        assert type(ours) is type(theirs)
        for each in fields(ours):
            assert_equal(getattr(ours, each.name), getattr(theirs, each.name))
    elif isinstance(ours, np.ndarray):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    elif isinstance(ours, tuple | list):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_equal(mine, other)
    elif isinstance(ours, Mapping):
        assert dict(ours) == dict(theirs)
    else:
        assert ours == theirs


MAPPINGS = [
    {"a": 1.0}, OrderedDict(a=1.0), Counter(a=2), defaultdict(float, a=1.0),
    MappingProxyType({"a": 1.0}), {"a": np.float32(0.5), "b": np.int64(3)},
]  # fmt: skip


@pytest.mark.parametrize("metrics", MAPPINGS, ids=lambda m: type(m).__name__)
def test_groups_come_back(metrics: Mapping[str, float]) -> None:
    made = trajectory(segment(3, 4, teacher_top=top_logprobs(4, 3)), metrics=metrics)
    state = {"groups": [group(1, 2), made], "set_aside": {3: "late"}, "start_max": None}
    read = plain_pickle.loads(plain_pickle.dumps(state))
    assert read.keys() == state.keys()
    assert_equal(read["groups"], state["groups"])


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_is_refused_and_not_run(tmp_path: Path) -> None:
    for protocol in range(2, 6):
        with pytest.raises(pickle.UnpicklingError):
            plain_pickle.loads(pickle.dumps({"groups": [Evil(tmp_path / "ran")]}, protocol))
    with pytest.raises(pickle.UnpicklingError):
        plain_pickle.loads(b"c__builtin__\neval\n(S'1'\ntR.")
    assert not (tmp_path / "ran").exists()
