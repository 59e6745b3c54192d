"""The disk space of checkpoints is planned and checked before a run starts."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.config.disk_plan import DiskPlan
from cluster.config.opd import OpdConfig
from distill.errors import ConfigError

NewOpd = Callable[..., OpdConfig]


def plan(config: OpdConfig) -> DiskPlan:
    found = DiskPlan.of(config)
    assert found is not None
    return found


def test_the_plan_counts_the_checkpoints_that_stay(opd: NewOpd) -> None:
    least = plan(opd(keep_last=1))
    assert least.count == 2  # a checkpoint stays until the next is complete
    assert least.checkpoint == 3 * least.final  # weights and AdamW's two moments
    assert plan(opd(keep_last=4)).count == 5
    more = opd(
        keep_last=1, steps=100, checkpoint_every=10, keep_every=20, eval_every=10,
        keep_best="eval/reverse_kl",
    )  # fmt: skip
    assert plan(more).count == 2 + 5 + 1
    replayed = {"keep_last": 1, "keep": 30, "checkpoint_every": 10}
    assert plan(opd(**replayed, steps=100)).count == 3 + 1 + 1  # the oldest step begins before it
    assert plan(opd(**replayed, steps=20)).count == 2 + 1 + 1
    best = {"eval_every": 15, "keep_best": "eval/reverse_kl"}
    assert plan(opd(**replayed, **best, steps=100)).count == 3 + 1 + 2 + 1 + 1
    assert plan(opd(keep_last=1, lora_rank=4)).checkpoint == least.final
    follows = {"keep_last": 1, "teacher": "policy", "teacher_ema": 0.9}
    assert plan(opd(**follows)).checkpoint == 4 * least.final
    assert plan(opd(**follows, lora_rank=4)).checkpoint == least.final  # of the adapter alone


def test_a_disk_that_is_too_small_is_refused(
    opd: NewOpd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = plan(opd(keep_last=1))
    out = tmp_path / "a" / "run"
    monkeypatch.setattr(
        "cluster.config.disk_plan.shutil.disk_usage",
        lambda path: SimpleNamespace(free=needed.bytes - 1 if path == tmp_path else 0),
    )
    with pytest.raises(ConfigError):
        needed.require_room(out)
    kept = out / "checkpoints" / "step-000001"
    kept.mkdir(parents=True)
    monkeypatch.setattr(
        "cluster.config.disk_plan.shutil.disk_usage",
        lambda _: SimpleNamespace(free=needed.bytes - 1),
    )
    (kept / "weights").write_bytes(b"1")
    needed.require_room(out)  # a resumed run replaces its checkpoints
