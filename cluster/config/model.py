"""Settings of the model that is trained: checkpoint, chat template and stop tokens."""

from __future__ import annotations

from typing import ClassVar

import chz

from cluster.config.early_checks import model_field
from distill.chat.template_choice import ChatTemplateSettings
from distill.settings import ESSENTIAL
from distill.stops import StopSettings


@chz.chz
class ModelSettings(ChatTemplateSettings, StopSettings):
    """The model that is trained: checkpoint, chat template and stop tokens."""

    main: ClassVar[str] = "path"

    path: str = model_field(
        doc="checkpoint of the model, in opd and rl the student: a Hugging Face directory (or hub "
        "name), or a run's directory (for its final/), RUN:STEP or RUN:best",
        metadata=ESSENTIAL,
    )


@chz.chz
class ReferredModelSettings(ModelSettings):
    """The model that is trained, and its reference."""

    reference: str | None = model_field(
        default=None,
        doc="checkpoint of the reference model. opd, rl: reference_kl_coef keeps the policy near "
        "it; default with lora.rank: the model without its adapter, in the learner. dpo: default: "
        "the model itself",
    )
