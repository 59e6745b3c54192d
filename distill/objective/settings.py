"""Settings of the objective: advantages, policy losses and divergences.

`ObjectiveConfig` has all settings; `OpdObjective` and `RlObjective` are the objectives of the
recipes. They refuse, with the reason, a combination without a gradient or with a gradient that does
not depend on the teacher. docs/objectives.md explains how to choose.
"""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import chz

from distill.errors import ConfigError
from distill.rules import above, at_least, at_most, below, needs, never, not_with, one_of, setting
from distill.settings import FUNCTION, Section, with_default

LossName = Literal["importance_sampling", "ppo", "cispo", "dro", "gspo"]
Baseline = Literal["mean", "leave_one_out", "global"]
Correction = Literal["none", "truncate", "mask"]
Normalisation = Literal["token", "sequence"]
EstimatorName = Literal["auto", "sampled", "full", "top_k"]
DivergenceName = Literal["reverse_kl", "forward_kl", "jsd"]
TopKFrom = Literal["student", "teacher", "union"]
ConstantGroups = Literal["train", "drop", "replace"]
# Value of a setting that the run chooses before training starts.
AUTO = "auto"

# Default of `clip`: the distances that a ratio may go below and above 1. PPO: Schulman et al. 2017;
# CISPO (MiniMax-M1, 2025) bounds its weight from above only; GSPO (Zheng et al. 2025) uses the
# per-token ratio of a whole sequence, which varies far less.
CLIP = {"ppo": (0.2, 0.2), "cispo": (1.0, 4.0), "gspo": (3e-4, 4e-4)}
# Default cap of the learner/server weight.
CORRECTION_CAP = 2.0

# Estimators of other systems, and the reason why each does not estimate this gradient.
_REFUSED_ESTIMATORS = [
    never(name, f"is refused: {why}. estimator=sampled is the policy gradient of the reverse KL")
    for name, why in (
        (
            "k1",
            "differentiated as a loss, log p - log q has the gradient E[grad log p] = 0 and never "
            "sees the teacher",
        ),
        (
            "k3",
            "differentiated as a loss, q/p - 1 + log p/q has the gradient of the forward KL, not "
            "of the reverse KL; use divergence=forward_kl if that is what you want",
        ),
        ("k2", "differentiated as a loss it is the sampled estimator, on policy only"),
    )
]
# Rules shared by several settings.
_REWARDS = needs("objective.reward_coef", remedy="give a reward_coef, or leave it out")
_TOP_K = needs("objective.estimator", "top_k")
_FLAT_JSD = (
    "at 0 and 1 the generalised JSD and its gradient are zero; divergence=forward_kl or "
    "reverse_kl is its limit"
)


@chz.chz
class ObjectiveConfig:
    """The objective: terms of the teacher, rewards, baselines, loss over ratios, regularisation."""

    section: ClassVar[Section] = Section.OBJECTIVE
    within: ClassVar[str] = "objective."

    loss: str = setting(
        one_of(*get_args(LossName), or_own=True),
        default="importance_sampling",
        doc="loss over the ratio of the learner's to the sampler's probabilities: "
        "importance_sampling, ppo, cispo, dro, gspo; or module:function of the tensors "
        "(logprobs_N, old_N, advantages_N) that returns each token's loss",
        metadata=FUNCTION,
    )
    clip: float | tuple[float, float] | None = setting(
        needs("objective.loss", *CLIP),
        default=None,
        doc="largest distance of a ratio from 1: one number, or two for below and above "
        "(0.2,0.28); default: ppo 0.2, cispo 1,4, gspo 3e-4,4e-4",
    )
    correction: Correction = setting(
        one_of(*get_args(Correction)),
        default="none",
        doc="correction for the mismatch of server and learner. none: ratios are relative to the "
        "server's log-probs; truncate, mask: ratios are relative to the learner's own log-probs at "
        "the start of the step, and the ratio learner/server becomes a weight, which truncate cuts "
        "at correction_cap and mask sets to 0 beyond it",
    )
    correction_cap: float | None = setting(
        at_least(1),
        needs("objective.correction", "truncate", "mask"),
        default=None,
        doc="largest learner/server weight; mask also drops weights below its inverse; default: 2",
    )
    normalisation: Normalisation = setting(
        one_of(*get_args(Normalisation)),
        default="token",
        doc="unit that has equal weight in the loss: every trained token of the step, or every "
        "sequence",
    )
    num_substeps: int = setting(
        at_least(1),
        at_most("data.batch_size", "each update needs at least one group"),
        default=1,
        doc="optimizer updates per step, each on a part of the step's groups",
    )
    entropy_coef: float = setting(
        at_least(0), default=0.0, doc="weight of an entropy bonus (entropy of p_T)"
    )
    reward_coef: float = setting(
        at_least(0), default=0.0, doc="weight of the task reward's advantage"
    )
    baseline: str = setting(
        one_of(*get_args(Baseline), or_own=True),
        _REWARDS,
        default="mean",
        doc="baseline of a reward. mean: the mean of its group; leave_one_out: the mean of the "
        "group's other members; global: the mean of the whole step (REINFORCE++); or "
        "module:function of the step's groups (distill.objective.group_rewards.GroupRewards) that "
        "returns an array of advantages for each group",
        metadata=FUNCTION,
    )
    scale_by_std: bool = setting(
        _REWARDS,
        needs("objective.baseline", *get_args(Baseline)),
        default=False,
        doc="divide reward advantages by the standard deviation of the group (of the step with "
        "baseline=global)",
    )
    mask_truncated: bool = setting(
        _REWARDS,
        default=False,
        doc="ignore the rewards of samples that ended by length: their advantage is 0, and no "
        "baseline includes them; the terms of teacher and reference stay",
    )
    overlong_buffer: int = setting(
        at_least(0),
        at_most("sampling.max_new_tokens", "it is the end of a response"),
        _REWARDS,
        default=0,
        doc="number of tokens before max_new_tokens over which a response's reward falls linearly, "
        "by 1 in all (DAPO); 0: off",
    )
    reference_kl_coef: float = setting(
        at_least(0), default=0.0, doc="weight of the centred KL penalty towards the reference model"
    )
    kl_discount_factor: float = setting(
        at_least(0),
        at_most(1),
        default=0.0,
        doc="discount of the later tokens' sampled KL terms in a token's advantage, for the "
        "teacher (estimator=sampled) and the reference; 0: only the token's own term",
    )

    constant_groups: ConstantGroups = setting(
        one_of(*get_args(ConstantGroups)),
        _REWARDS,
        not_with(
            "objective.baseline",
            "global",
            why="a group of equal rewards is better or worse than other groups, which is a signal",
        ),
        default="train",
        doc="treatment of groups whose members all have the same reward. replace: groups of "
        "further prompts replace them (dynamic sampling), at most 3 times prompts_per_step "
        "in a step; drop: they are left out, so the batch is smaller; train: they stay in "
        "the batch",
    )

    kl_coef: float = setting(at_least(0), default=1.0, doc="weight of the teacher's term")
    kl_clip: float | None = setting(
        above(0, "leave it out for no clip"),
        needs("objective.divergence", "reverse_kl"),
        needs("objective.kl_coef"),
        default=None,
        doc="bound on the absolute value of a token's log p - log q, in nats (reverse_kl); limits "
        "the signal, and biases it; default: no bound",
    )
    estimator: str = setting(
        *_REFUSED_ESTIMATORS,
        one_of(*get_args(EstimatorName)),
        default="sampled",
        doc="part of the teacher's distribution that is used. sampled: the log-prob of the sampled "
        "token; full: the whole distribution, with a copy of the teacher in the learner; top_k: "
        "some likely tokens, and an estimate of the rest (reverse_kl: by the sampled token; other "
        "divergences: the rest as one outcome); auto (opd): full if it fits, else top_k, else "
        "sampled",
    )
    divergence: str = setting(
        one_of(*get_args(DivergenceName), or_own=True),
        not_with(
            "objective.estimator",
            "sampled",
            why="it cannot be computed from the log-prob of one sampled token",
            remedy="use estimator=full or top_k",
        ),
        default="reverse_kl",
        doc="divergence of student and teacher. reverse_kl: KL(p_T || q_T); forward_kl: KL(q_T || "
        "p_T); jsd: a Jensen-Shannon divergence; or module:function of the tensors (log_p_NV, "
        "log_q_NV) that returns each row's divergence",
        metadata=FUNCTION,
    )
    jsd_beta: float | None = setting(
        above(0, _FLAT_JSD),
        below(1, _FLAT_JSD),
        needs("objective.divergence", "jsd"),
        default=None,
        doc="jsd: share of the teacher in the mixture, in (0, 1); default: 0.5",
    )
    teacher_top_k: int | None = setting(
        at_least(1),
        _TOP_K,
        default=None,
        doc="top_k: number of tokens that are compared; with top_k_from=union, number of tokens of "
        "each model; default: 32",
    )
    top_k_from: TopKFrom | None = setting(
        one_of(*get_args(TopKFrom)),
        _TOP_K,
        default=None,
        doc="top_k: model whose most likely tokens are compared. student: the sampling policy; "
        "teacher: the teacher; union: tokens of the student, and as many others of the teacher. "
        "Default: student for reverse_kl, an expectation under the student; teacher for "
        "forward_kl; union for jsd",
    )

    hint_bonus_coef: float = setting(
        at_least(0),
        needs(
            "teacher.model",
            "policy",
            remedy="it is a bonus of the policy's own log-probs under a hint",
        ),
        default=0.0,
        doc="teacher=policy: weight of a bonus in the advantages of right answers: a token's "
        "log-prob under the hint minus its log-prob in the rollout",
    )
    correct_reward_threshold: float | None = setting(
        at_most(1e9, "no reward is larger"),
        default=None,
        doc="smallest reward of a right response, for hint_bonus_coef and {outcome} of "
        "teacher.feedback; default: 1",
    )

    @chz.validate
    def _clip_in_range(self) -> None:
        if not all(0 <= bound < float("inf") for bound in self.clip_bounds):
            raise ConfigError(
                f"clip={self.clip} must be 0 or above, and finite", field="objective.clip"
            )

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Distances that a ratio may go below and above 1."""
        if self.clip is None:
            return CLIP.get(self.loss, (0.0, 0.0))
        return self.clip if isinstance(self.clip, tuple) else (self.clip, self.clip)

    @chz.validate
    def _terms_are_sampled(self) -> None:
        if self.kl_discount_factor:
            self._check_discount()

    def _check_discount(self) -> None:
        """Raise ConfigError for a discount if no term is sampled, or only a part of one."""
        given = f"kl_discount_factor={self.kl_discount_factor}"
        if self.kl_coef and self.samples_tail:
            raise ConfigError(
                f"{given} needs estimator=sampled: with top_k only a part of the teacher's "
                "term is sampled, and the rest has no future terms",
                field="objective.kl_discount_factor",
            )
        if self.reference_kl_coef:
            return
        if not self.kl_coef:
            raise ConfigError(
                f"{given} changes nothing without a teacher and with reference_kl_coef=0; give a "
                "reference_kl_coef, or leave it out",
                field="objective.kl_discount_factor",
            )
        if self.estimator not in ("sampled", AUTO) or self.divergence != "reverse_kl":
            raise ConfigError(
                f"{given} needs estimator=sampled, or a reference_kl_coef: a divergence of whole "
                "distributions has no future terms",
                field="objective.kl_discount_factor",
            )

    @property
    def compares_groups(self) -> bool:
        """True if an advantage depends on the rewards of other groups of the step."""
        return self.baseline == "global" or is_own(self.baseline)

    @property
    def correct_threshold(self) -> float:
        """Lowest reward of a correct response."""
        given = self.correct_reward_threshold
        return DEFAULT_CORRECT_REWARD if given is None else given

    @property
    def support(self) -> TopKFrom:
        """Model whose likeliest tokens support the teacher's distribution, with top_k."""
        return self.top_k_from or _SUPPORT.get(self.divergence, "union")

    @property
    def samples_tail(self) -> bool:
        """True if the tokens outside the top k contribute only through sampled ones.

        A reverse KL is an expectation under the student, so a sampled token is an unbiased estimate
        of it. In other divergences the tokens outside the top k are one outcome, a bucket.
        """
        return self.estimator == "top_k" and self.divergence == "reverse_kl"

    @property
    def has_advantages(self) -> bool:
        """True if a term is based on sampled tokens or rewards, so that advantages differ from 0.

        A divergence of whole distributions has no advantages. `auto` counts as sampled until it is
        resolved. Rewards of single tokens (bonuses) are not considered, because the environment's
        problems define them, not the objective.
        """
        samples_teacher = self.estimator in ("sampled", AUTO) or self.samples_tail
        return bool(
            self.reward_coef
            or self.reference_kl_coef
            or self.hint_bonus_coef
            or (self.kl_coef and samples_teacher)
        )

    @property
    def asked_of_policy(self) -> int:
        """Number of the policy's likeliest tokens to request while sampling; 0: none."""
        return self._top_k if self.support != "teacher" else 0

    @property
    def asked_of_teacher(self) -> int:
        """Number of the teacher's likeliest tokens to request besides the policy's; 0: none."""
        return self._top_k if self.support != "student" else 0

    @property
    def _top_k(self) -> int:
        return (self.teacher_top_k or DEFAULT_TOP_K) if self.estimator == "top_k" else 0

    def check_comparison(self, prompts: int, group_size: int) -> None:
        """Raise ConfigError for rewards that are compared only with themselves.

        Args:
            prompts: number of groups per step.
            group_size: number of samples per group.
        """
        if self.baseline == "global" and prompts * group_size < 2:
            raise ConfigError(
                "baseline=global with prompts_per_step=1 and group_size=1: a reward minus the mean "
                "of a step of one sample is zero, and so is the gradient; raise one of them",
                field="objective.baseline",
            )
        if self.reward_coef and group_size < 2 and not self.compares_groups:
            raise ConfigError(
                f"group_size={group_size} with reward_coef={self.reward_coef}: a reward minus the "
                "mean of its group of one is zero, and so is the gradient; use at least 2, or "
                "baseline=global",
                field="sampling.group_size",
            )


DEFAULT_TOP_K = 32
# Model under which the divergence is an expectation; the JSD uses both. Custom divergences: union.
_SUPPORT: dict[str, TopKFrom] = {
    "reverse_kl": "student", "forward_kl": "teacher", "jsd": "union",
}  # fmt: skip
DEFAULT_JSD_BETA = 0.5
DEFAULT_CORRECT_REWARD = 1.0


@chz.chz
class OpdObjective(ObjectiveConfig):
    """The objective of on-policy distillation: the terms of the teacher, and optional rewards."""

    hidden: ClassVar[frozenset[str]] = frozenset({"constant_groups"})

    estimator: str = with_default(ObjectiveConfig, "estimator", AUTO)

    @chz.validate
    def _depends_on_teacher(self) -> None:
        if self.kl_coef == 0 and self.hint_bonus_coef == 0:
            raise ConfigError(
                "kl_coef=0 leaves the teacher out of the objective, so nothing is distilled; "
                "give a kl_coef above 0 (recipe=rl trains on rewards alone)",
                field="objective.kl_coef",
            )
        if self.kl_coef == 0 and self.estimator not in ("sampled", AUTO):
            raise ConfigError(
                f"estimator={self.estimator} changes nothing with kl_coef=0; leave it out",
                field="objective.estimator",
            )
        if self.kl_coef == 0 and self.divergence != "reverse_kl":
            raise ConfigError(
                f"divergence={self.divergence} changes nothing with kl_coef=0; leave it out",
                field="objective.divergence",
            )

    def check_weighing(self, bonuses: bool) -> None:
        """Raise ConfigError for a loss or a correction that weights advantages if all are 0.

        `dro`, and a custom loss, may have terms without an advantage.

        Args:
            bonuses: True if single tokens may have rewards.
        """
        if self.has_advantages or bonuses or self.loss == "dro" or is_own(self.loss):
            return
        for name, off in (("loss", "importance_sampling"), ("correction", "none")):
            if (value := getattr(self, name)) != off:
                raise ConfigError(
                    f"{name}={value} changes nothing with estimator={self.estimator} "
                    f"divergence={self.divergence} and no reward, bonus or reference: it weights "
                    f"the advantages of sampled tokens, which are all 0. Leave {name} out, or give "
                    "estimator=sampled",
                    field=f"objective.{name}",
                )


@chz.chz
class RlObjective(ObjectiveConfig):
    """The objective of reinforcement learning: rewards and no teacher."""

    hidden: ClassVar[frozenset[str]] = frozenset({
        "kl_coef", "kl_clip", "estimator", "divergence", "jsd_beta", "teacher_top_k", "top_k_from",
        "hint_bonus_coef", "correct_reward_threshold",
    })  # fmt: skip

    kl_coef: float = with_default(ObjectiveConfig, "kl_coef", 0.0)
    reward_coef: float = with_default(ObjectiveConfig, "reward_coef", 1.0)


def is_own(name: str) -> bool:
    """True for `package.module:function`, a custom function."""
    return ":" in name
