"""Settings of the learner. They contain no temperature: it is a field of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import chz
from chz.mungers import default_munger

from distill.errors import ConfigError
from distill.rules import above, at_least, below, needs, not_with, setting
from distill.settings import ADAPTER, ESSENTIAL, MAY_CHANGE, Section, by_names, section_field
from distill.stops import StopTokens

if TYPE_CHECKING:  # settings must not import torch
    from learner.checkpoint import Checkpoint

Precision = Literal["float32", "bfloat16"]
Schedule = Literal["constant", "linear", "cosine"]

# Padded tokens per micro-batch by device. On a CPU, small batches fit the caches: 4096 was 25 %
# faster than 16384 for a model of 1 M parameters. GPUs are faster with large kernels.
TOKEN_BUDGET = {"cpu": 4096, "cuda": 16384}
# A step of AdamW changes every trained number by about lr. An adapter's change is a product of two
# small numbers, which bfloat16 engines round away until it exceeds half of their spacing.
FULL_LR, LORA_LR = 1e-5, 1e-4
# lora.targets: every Linear except the vocabulary projection.
ALL_LINEAR = "all-linear"


@chz.chz
class LoraSettings:
    """Settings of a LoRA adapter: a new one, or an existing one with its own rank, alpha, targets.

    An adapter is trained if lora.rank or lora.adapter is set.
    """

    section: ClassVar[Section] = Section.OPTIMIZER
    within: ClassVar[str] = "lora."

    rank: int | None = setting(
        at_least(1),
        not_with("lora.adapter", why="an adapter has its own rank"),
        default=None,
        doc="train a low-rank adapter of this rank (for example 16), and freeze the model",
        metadata=ESSENTIAL,
    )
    alpha: float | None = setting(
        above(0),
        not_with("lora.adapter", why="an adapter has its own alpha"),
        needs("lora.rank"),
        default=None,
        doc="scale of the adapter: its output is multiplied by lora.alpha / rank; default: 2 * "
        "lora.rank",
    )
    targets: str | None = setting(
        not_with("lora.adapter", why="an adapter has its own targets"),
        needs("lora.rank"),
        default=None,
        doc="linear layers that get an adapter, for example 'q_proj,v_proj'; default: all but the "
        "vocabulary projection",
    )
    adapter: str | None = setting(
        not_with(
            "rollout_only",
            why="no learner pushes the adapter to the engines; give a student with the adapter "
            "merged, the final/ of a run with lora.rank",
        ),
        default=None,
        doc="peft adapter (safetensors) to start from, instead of lora.rank",
        metadata=ADAPTER,
    )

    @chz.validate
    def _targets_are_named(self) -> None:
        if self.targets is not None and not all(map(str.strip, self.targets.split(","))):
            raise ConfigError(
                f"lora.targets={self.targets!r} holds an empty name; write q_proj,v_proj or "
                f"{ALL_LINEAR}"
            )

    @property
    def trains_adapter(self) -> bool:
        return self.rank is not None or self.adapter is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowRule:
    """Update rule of an EMA or lagged teacher (`learner.teachers`). Exactly one field is set.

    Attributes:
        every: lagged teacher: copy the weights at each version that is divisible by this.
        ema: EMA teacher: the decay, that is, the fraction of the teacher that each step keeps.
    """

    every: int = 0
    ema: float | None = None

    def __post_init__(self) -> None:
        assert (self.every > 0) != (self.ema is not None)

    def version(self, version: int) -> int:
        """Version of the newest weights in the teacher when the learner is at `version`."""
        return version - version % self.every if self.every else version

    def moves_at(self, version: int) -> bool:
        return self.version(version) == version


@chz.chz
class LearnerSettings:
    """Settings of the learner: AdamW, and how it computes."""

    section: ClassVar[Section] = Section.OPTIMIZER
    within: ClassVar[str] = "learner."

    lr: float = chz.field(
        default=None,
        x_type=float | Literal["auto"] | None,
        doc=f"peak learning rate; auto: by the model's width, what is trained, and the recipe; "
        f"default: {FULL_LR:g}, and {LORA_LR:g} for an adapter",
        metadata=ESSENTIAL,
    )
    lr_schedule: Schedule = chz.field(
        default="constant", doc="learning rate after the warm-up; linear and cosine end at 0"
    )
    warmup_steps: int = setting(
        at_least(0), default=0, doc="optimizer updates of the linear warm-up of the learning rate"
    )
    weight_decay: float = setting(
        at_least(0), default=0.0, doc="AdamW's decoupled weight decay (matrices only)"
    )
    adam_beta1: float = setting(
        at_least(0), below(1), default=0.9, doc="decay of AdamW's first moments"
    )
    adam_beta2: float = setting(
        at_least(0), below(1), default=0.95, doc="decay of AdamW's second moments"
    )
    max_grad_norm: float = setting(
        above(0), default=1.0, doc="largest norm of the gradient; larger ones are scaled down to it"
    )

    token_budget: int | None = setting(
        at_least(1),
        default=None,
        doc="padded tokens per micro-batch, over which gradients accumulate; "
        f"default: {TOKEN_BUDGET['cpu']} on CPU, {TOKEN_BUDGET['cuda']} on GPU, or less where that "
        "would not fit into memory",
        metadata=MAY_CHANGE,
    )
    packing: bool = chz.field(
        default=False,
        doc="pack rows of all lengths into one sequence of up to token_budget tokens, instead of "
        "padding them; no row attends to another (docs/learner.md)",
        metadata=MAY_CHANGE,
    )
    gradient_checkpointing: bool | None = chz.field(
        default=None,
        doc="recompute activations in the backward pass: less memory, more time; default: only if "
        "they would not fit into memory",
        metadata=MAY_CHANGE,
    )
    compile: bool = chz.field(
        default=False,
        doc="compile the learner's layers (torch.compile): slower at the start, then faster "
        "(docs/learner.md); on a CPU this needs a C++ compiler",
        metadata=MAY_CHANGE,
    )
    liger: bool = chz.field(
        default=False,
        doc="use Liger's kernels for norms, rotary embedding and SwiGLU in the learner (cuda; pip "
        "install liger-kernel)",
        metadata=MAY_CHANGE,
    )
    router_aux_coef: float = setting(
        at_least(0),
        default=0.0,
        doc="weight of the load-balancing loss of a mixture-of-experts model's routers, for "
        "example 0.001 (metric train/router_aux); 0: none",
        metadata=MAY_CHANGE,
    )
    offload_optimizer: bool = chz.field(
        default=False,
        doc="keep AdamW's moments in main memory, and on the GPU only during the optimizer's "
        "update (cuda)",
        metadata=MAY_CHANGE,
    )

    @chz.validate
    def _lr_is_a_number(self) -> None:
        if isinstance(self.lr, str):
            raise ConfigError(
                f"lr={self.lr} needs a recipe, which has the model; give a number "
                "(cluster.config.learning_rate.suggested_lr)",
                field="learner.lr",
            )
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise ConfigError(f"lr={self.lr} must be above 0, and finite", field="learner.lr")


def _with_rate(config: Any, settings: LearnerSettings) -> LearnerSettings:
    """Settings of the section `learner`, with the default learning rate if none is given.

    The default depends on whether an adapter or the whole model is trained.

    Args:
        config: the object with the sections `learner` and `lora`.
    """
    if settings.lr is not None:
        return settings
    return chz.replace(settings, lr=LORA_LR if config.lora.trains_adapter else FULL_LR)


def learner_section(kind: type[LearnerSettings]) -> Any:
    """The section `learner` of a class that also has a section `lora`."""
    return section_field(kind, munger=default_munger(_with_rate))


@chz.chz
class LearnerConfig:
    """Configuration of a learner: its settings, with a model and a device."""

    lora: LoraSettings = section_field(LoraSettings)
    learner: LearnerSettings = learner_section(LearnerSettings)
    seed: int = setting(at_least(0), default=0, doc="seed of torch and of new weights")
    model: str = chz.field(doc="Hugging Face checkpoint directory (or hub name) to start from")
    origin: str | None = chz.field(
        default=None,
        doc="checkpoint whose other tensors (MTP layers) are added to every saved model; None: "
        "model",
    )
    total_steps: int = setting(
        at_least(1), doc="optimizer steps of the whole run; the schedule ends here"
    )
    device: str = chz.field(default="auto", doc="auto, cpu or cuda")
    threads: int = setting(at_least(1), default=1, doc="torch threads on a CPU")
    dtype: Precision = chz.field(
        default="float32",
        doc="precision of the computation; weights, gradients and moments stay float32",
    )

    replays_routing: bool = chz.field(
        default=False,
        doc="rows hold the experts through which each token is routed (mixture-of-experts models)",
    )
    stops: StopTokens | None = chz.field(
        default=None,
        doc="tokens that end responses, saved with the model; None: those of the model",
    )
    longest_rows: int = chz.field(
        default=0,
        doc="tokens of the longest row, or of two rows of one unit: they run in one pass, even "
        "beyond token_budget; 0: unknown",
    )
    gpu_taken: int = chz.field(
        default=0,
        doc="bytes of the worker's share of its GPU that belong to another process, such as a "
        "sleeping engine",
    )
    gpu_part: float = chz.field(
        default=1.0,
        doc="the worker's share of its GPU. It does not depend on what other processes use now, "
        "because they may not have started; with 1 and gpu_taken=0: all free memory",
    )
    gpu_turns: Sequence[str] = chz.field(
        default=(),
        doc="by rank: lock file of the worker's GPU, if it takes turns there with engines; "
        "workers with the same file take their turn together",
    )
    shadow: ShadowRule | None = chz.field(
        default=None,
        doc="update rule of a lagged or EMA teacher, a second set of weights; None: no such "
        "teacher",
    )
    reward_padding: int | None = chz.field(
        default=None,
        doc="padding token of a reward model in training; None: a language model is trained",
    )

    @classmethod
    def of(cls, **settings: Any) -> LearnerConfig:
        """Make a configuration from values by name, those of sections too: `lora.rank=8`."""
        return by_names(cls, **settings)

    def resumed(self, checkpoint: Checkpoint) -> LearnerConfig:
        """The configuration to resume from a checkpoint. With an adapter, the base is unchanged."""
        if not self.lora.trains_adapter:
            # `origin` is a run's first model: checkpoints are deleted as newer ones are written.
            return chz.replace(self, model=checkpoint.model_dir, origin=self.origin or self.model)
        return chz.replace(self, lora=LoraSettings(adapter=checkpoint.adapter_dir))
