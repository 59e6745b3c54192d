"""Settings of the recipes that train on given data: sft, dpo, reward_model."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import ClassVar, Self

import chz
from chz.mungers import default_munger

from cluster.config.common import CommonConfig, ReferredModelSettings, Stage
from cluster.config.evaluation import RowEvaluationSettings
from cluster.config.rows import RowCheck, RowSettings, by_source, reader_of
from distill.data.row_forms import EXAMPLE_FIELDS, PAIR_FIELDS, check_example, check_pair
from distill.data.row_reader import RowReader
from distill.errors import ConfigError
from distill.rules import above, at_least, get, setting
from distill.settings import ESSENTIAL, MAY_CHANGE, Section, changed, section_field

_STEPS = 100
# Placeholder for the steps of a run with epochs=, until its rows have been read.
_UNREAD = 1 << 31


def _steps(config: SupervisedConfig, steps: int | None) -> int:
    """The given steps, or a placeholder if `epochs` is given. Raises ConfigError for both."""
    if config.epochs is None:
        return _STEPS if steps is None else steps
    if steps is not None:
        raise ConfigError(
            f"steps={steps} and epochs={config.epochs:g} both set the length; leave one out"
        )
    return _UNREAD


@chz.chz
class SupervisedConfig(CommonConfig):
    """Settings that sft, dpo and reward_model share."""

    section: ClassVar[Section] = Section.MODEL
    # Number of rows that stay together; 2: a pair.
    rows_per_unit: ClassVar[int] = 1
    # Fields of the rows, the check of a row, and all metrics of held-out rows.
    row_fields: ClassVar[Collection[str]] = PAIR_FIELDS
    check_row: ClassVar[RowCheck] = staticmethod(check_pair)
    measured: ClassVar[Collection[str]]

    steps: int = setting(
        at_least(1),
        default=None,
        munger=default_munger(_steps),
        x_type=int | None,
        doc=f"optimizer steps; default: {_STEPS}, or those of epochs=",
        metadata=ESSENTIAL | MAY_CHANGE,
    )
    epochs: float | None = setting(
        above(0),
        default=None,
        doc="train on this many times the number of rows (pairs), instead of steps; may be a "
        "fraction",
        metadata=ESSENTIAL | MAY_CHANGE,
    )
    data: RowSettings = section_field(RowSettings)
    eval: RowEvaluationSettings = section_field(RowEvaluationSettings)

    def check_keep_best(self) -> None:
        """Raise ConfigError if evaluations do not measure `checkpoint.keep_best`."""
        known = [f"validation/{name}" for name in self.measured]
        known += by_source(known, self.eval.source or self.data.source)
        self.checkpoint.check_measured("validation/", known, own=False)

    def row_readers(self) -> Mapping[str, tuple[RowReader, RowCheck]]:
        """Reader of rows, and check of a row's fields, for each setting that names rows."""
        checked = reader_of(self.data, self.row_fields), self.check_row
        return {"data.source": checked, "eval.source": checked}

    @chz.validate
    def _work_for_all(self) -> None:
        if self.rehearses:
            raise ConfigError(
                "dry_run=rehearse is for recipes that sample (opd, rl): it kills every kind of "
                "actor once, and this recipe has only a learner; use dry_run=True"
            )
        self.require_work_for_all(self.data.batch_size, f"batch_size={self.data.batch_size}")

    def trained_on(self, units: int) -> Self:
        """The settings with `epochs` converted to steps. `units`: number of rows (pairs)."""
        if self.epochs is None:
            return self
        # Rounding must not add a step: 0.1 * 30 / 3 is a little above 1.
        steps = math.ceil(round(self.epochs * units / self.data.batch_size, 9))
        return changed(self, steps=max(1, steps), epochs=None)


@chz.chz
class SftConfig(SupervisedConfig):
    """recipe=sft: supervised fine-tuning, with the loss only on completions and assistant turns."""

    recipe: ClassVar[str] = "sft"
    summary: ClassVar[str] = "supervised fine-tuning on completions or assistant turns"
    stage: ClassVar[Stage] = "sft"
    row_fields: ClassVar[Collection[str]] = EXAMPLE_FIELDS
    check_row: ClassVar[RowCheck] = staticmethod(check_example)
    measured: ClassVar[Collection[str]] = ("loss", "nll", "entropy")


@chz.chz
class PreferenceSettings:
    """DPO's objective."""

    section: ClassVar[Section] = Section.OBJECTIVE
    within: ClassVar[str] = "objective."

    beta: float = setting(
        above(0, "at 0 the gradient is zero"),
        default=0.1,
        doc="weight of the distance from the reference, per nat; a smaller beta lets the policy "
        "move further from it",
    )
    sft_coef: float = setting(
        at_least(0),
        default=0.0,
        doc="weight of the cross-entropy of the chosen responses, in addition to the preference "
        "loss",
    )


@chz.chz
class DpoConfig(SupervisedConfig):
    """recipe=dpo: direct preference optimisation on chosen and rejected responses."""

    recipe: ClassVar[str] = "dpo"
    summary: ClassVar[str] = "direct preference optimisation on chosen and rejected"
    stage: ClassVar[Stage] = "dpo"
    rows_per_unit: ClassVar[int] = 2
    measured: ClassVar[Collection[str]] = (
        "loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_nll", "entropy",
    )  # fmt: skip

    model: ReferredModelSettings = section_field(ReferredModelSettings)
    objective: PreferenceSettings = section_field(PreferenceSettings)


@chz.chz
class RewardModelConfig(SupervisedConfig):
    """recipe=reward_model: a scalar head that scores the chosen response above the rejected one."""

    recipe: ClassVar[str] = "reward_model"
    summary: ClassVar[str] = "a scalar head that scores chosen above rejected"
    stage: ClassVar[Stage] = "reward_model"
    rows_per_unit: ClassVar[int] = 2
    measured: ClassVar[Collection[str]] = (
        "loss", "accuracy", "margin", "chosen_mean", "chosen_std", "rejected_mean", "rejected_std",
    )  # fmt: skip

    @chz.validate
    def _reward_model_in_range(self) -> None:
        for name in ("lora.rank", "lora.adapter"):
            if (value := get(self, name)) is not None:
                raise ConfigError(
                    f"{name}={value}: recipe=reward_model trains the whole model and its new head, "
                    "which an adapter would leave frozen; leave it out"
                )
