"""Settings of the recipes that train on data that is there already: sft and dpo."""

from __future__ import annotations

from typing import ClassVar

import chz

from cluster.config.common import CommonConfig
from distill.chat.template_choice import ChatTemplateSettings
from distill.data.columns import CompletionColumns, PreferenceColumns
from distill.data.sources import parse_sources
from distill.errors import ConfigError
from distill.settings import ESSENTIAL, Section
from distill.stops import StopSettings
from learner.config import DropoutSettings


@chz.chz
class SupervisedConfig(ChatTemplateSettings, StopSettings, CommonConfig):
    """Settings that sft and dpo share."""

    section: ClassVar[Section] = Section.MODEL

    model: str = chz.field(
        doc="checkpoint to start from: a Hugging Face directory (or hub name)", metadata=ESSENTIAL
    )
    batch_size: int = chz.field(
        default=32, doc="rows (pairs, for dpo) per optimizer step", metadata=ESSENTIAL
    )
    max_length: int | None = chz.field(
        default=None, doc="longest row, tokens; default: the model's context"
    )

    @chz.validate
    def _batch_in_range(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size} must be at least 1")
        self.require_work_for_all(self.batch_size, f"batch_size={self.batch_size}")


@chz.chz
class SftConfig(CompletionColumns, SupervisedConfig, DropoutSettings):
    """recipe=sft: supervised fine-tuning, loss on what the model is to say itself only."""

    section: ClassVar[Section] = Section.MODEL

    data: str = chz.field(
        doc="sources of rows, as prompts= of recipe=opd takes them (docs/data.md), with weights if "
        "several; each row has `prompt` and `completion` (EOS is appended), "
        "`messages` (chat; every assistant turn is trained), or `tokens` and `loss_mask` (token "
        "ids, as cluster.rollouts_to_sft writes them)",
        metadata=ESSENTIAL,
    )

    @chz.validate
    def _data_in_range(self) -> None:
        parse_sources("data", self.data)

    def with_dropout(self) -> bool:
        return self.dropout


@chz.chz
class PreferenceSettings:
    """DPO's objective."""

    section: ClassVar[Section] = Section.OBJECTIVE

    beta: float = chz.field(
        default=0.1, doc="how much a nat away from the reference weighs; small strays further"
    )
    sft_coef: float = chz.field(
        default=0.0, doc="weight of the chosen responses' cross-entropy beside the preference"
    )


@chz.chz
class DpoConfig(PreferenceColumns, SupervisedConfig, PreferenceSettings):
    """recipe=dpo: direct preference optimisation on chosen and rejected responses."""

    section: ClassVar[Section] = Section.MODEL

    data: str = chz.field(
        doc="sources of rows, as prompts= of recipe=opd takes them (docs/data.md), with weights if "
        "several; each row has `chosen` and `rejected`, and `prompt` (string) or "
        "`messages` (chat) before them, or whole conversations in both",
        metadata=ESSENTIAL,
    )
    reference: str | None = chz.field(
        default=None, doc="checkpoint that DPO stays near to; default: model"
    )

    @chz.validate
    def _dpo_in_range(self) -> None:
        parse_sources("data", self.data)
        if not 0 <= self.sft_coef < float("inf"):
            raise ConfigError(f"sft_coef={self.sft_coef} must be 0 or above, and finite")
        if not 0 < self.beta < float("inf"):
            raise ConfigError(
                f"beta={self.beta} must be above 0, and finite: at 0 the gradient is zero"
            )
