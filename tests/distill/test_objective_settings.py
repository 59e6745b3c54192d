"""What an objective refuses, in the words it does so; and what it lets pass."""

from __future__ import annotations

import re
from typing import Any

import pytest

from distill.errors import ConfigError
from distill.objective.settings import (
    CLIP,
    DEFAULT_TOP_K,
    ObjectiveConfig,
    PolicyObjective,
    require_advantages,
    require_comparison,
    require_reward,
    require_teacher,
)

NAN, INFINITY = float("nan"), float("inf")

REFUSED_OF_POLICIES: list[tuple[dict[str, Any], str]] = [
    ({"loss": "pp0"}, "loss=pp0 is unknown; did you mean 'ppo'?"),
    ({"loss": "grpo"}, "loss=grpo is unknown; did you mean 'gspo'?"),
    ({"loss": "reinforce"}, "loss=reinforce is unknown; known: cispo, dro, gspo, importance_sam"),
    ({"reward_coef": -1.0}, "reward_coef=-1.0 must be 0 or above, and finite"),
    ({"bonus_coef": INFINITY}, "bonus_coef=inf must be 0 or above, and finite"),
    ({"entropy_coef": -0.1}, "entropy_coef=-0.1 must be 0 or above"),
    ({"reference_kl_coef": NAN}, "reference_kl_coef=nan must be 0 or above"),
    ({"loss": "ppo", "clip_low": -0.1}, "clip_low=-0.1 must be 0 or above"),
    ({"loss": "ppo", "clip_high": NAN}, "clip_high=nan must be 0 or above"),
    ({"loss": "dro", "dro_beta": -1.0}, "dro_beta=-1.0 must be 0 or above"),
    ({"loss": "dro", "dro_beta": 0.0}, "dro_beta=0 takes away what keeps dro near the policy"),
    ({"kl_discount_factor": 1.5}, "kl_discount_factor=1.5 must be in [0, 1]"),
    ({"kl_discount_factor": NAN}, "kl_discount_factor=nan must be in [0, 1]"),
    ({"num_substeps": 0}, "num_substeps=0 must be at least 1"),
    ({"correction": "mask", "correction_cap": 0.5}, "correction_cap=0.5 must be 1 or above, and"),
    ({"correction": "mask", "correction_cap": NAN}, "correction_cap=nan must be 1 or above, and"),
    ({"correction_cap": 2.0}, "correction_cap=2.0 changes nothing with correction=none"),
    ({"correction": "maskk"}, "correction=maskk is unknown; did you mean 'mask'"),
    ({"normalisation": "tokens"}, "normalisation=tokens is unknown; did you mean 'token'"),
    ({"baseline": "median"}, "baseline=median is unknown; did you mean 'mean'"),
    ({"clip_low": 0.2}, "clip_low=0.2 changes nothing with loss=importance_sampling: it belongs to "
     "ppo, cispo, gspo; leave it out"),
    ({"loss": "dro", "clip_high": 0.2}, "clip_high=0.2 changes nothing with loss=dro"),
    ({"loss": "gspo", "dual_clip": 3.0}, "dual_clip=3.0 changes nothing with loss=gspo: it belongs "
     "to ppo"),
    ({"loss": "ppo", "dro_beta": 0.1}, "dro_beta=0.1 changes nothing with loss=ppo"),
    ({"loss": "ppo", "dual_clip": 1.0}, "dual_clip=1.0 must be above 1, and finite"),
    ({"loss": "ppo", "dual_clip": INFINITY}, "dual_clip=inf must be above 1, and finite"),
    ({"baseline": "leave_one_out"}, "baseline=leave_one_out is for task rewards, and reward_coef=0 "
     "trains on none; leave it out, or give a reward_coef"),
    ({"scale_by_std": True}, "scale_by_std=True is for task rewards"),
    ({"remove_constant_reward_groups": True}, "remove_constant_reward_groups=True is for task"),
    ({"advantage": "a:b"}, "advantage=a:b is for task rewards, and reward_coef=0 trains on none"),
    ({"mask_truncated": True}, "mask_truncated=True is for task rewards"),
    ({"overlong_buffer": 8}, "overlong_buffer=8 is for task rewards"),
    ({"reward_coef": 1.0, "overlong_buffer": -1}, "overlong_buffer=-1 must not be negative"),
    ({"reward_coef": 1.0, "overlong_penalty": 1.0}, "overlong_penalty=1.0 changes nothing with"),
    ({"reward_coef": 1.0, "overlong_buffer": 1, "overlong_penalty": 0.0}, "overlong_penalty=0.0 "
     "must be above 0, and finite"),
    ({"reward_coef": 1.0, "advantage": "mine"}, "advantage=mine is not `package.module:function`"),
    ({"reward_coef": 1.0, "advantage": "a:b", "scale_by_std": True}, "scale_by_std=True changes "
     "nothing with advantage=a:b, which is in its place"),
    ({"reward_coef": 1.0, "baseline": "global", "remove_constant_reward_groups": True},
     "remove_constant_reward_groups=True with baseline=global would throw away a signal"),
    ({"loss": "a:b", "clip_low": 0.1}, "clip_low=0.1 changes nothing with loss=a:b"),
]  # fmt: skip

REFUSED_OF_TEACHERS: list[tuple[dict[str, Any], str]] = [
    ({"kl_coef": -1.0}, "kl_coef=-1.0 must be 0 or above, and finite"),
    *(({"kl_clip": clip}, f"kl_clip={clip} must be above 0, and finite; leave it out to clip "
       "nothing") for clip in (0.0, -1.0, NAN, INFINITY)),
    ({"kl_clip": 5.0, "kl_coef": 0.0}, "kl_clip=5.0 changes nothing with kl_coef=0"),
    ({"kl_clip": 5.0, "estimator": "full", "divergence": "jsd"}, "kl_clip=5.0 is of log p - log q, "
     "of which divergence=jsd is no mean"),
    ({"estimator": "k1"}, "estimator=k1 is refused: differentiated as a loss, log p - log q has "
     "the gradient E[grad log p] = 0 and never sees the teacher. estimator=sampled is"),
    ({"estimator": "k2"}, "estimator=k2 is refused: differentiated as a loss it is the sampled "
     "estimator, on policy only"),
    ({"estimator": "k3"}, "estimator=k3 is refused: differentiated as a loss, q/p - 1 + log p/q "
     "has the gradient of the forward KL, not of the reverse; say divergence=forward_kl"),
    ({"estimator": "topk"}, "estimator=topk is unknown; did you mean 'top_k'?"),
    ({"estimator": "exact"}, "estimator=exact is unknown; known: auto, full, sampled, top_k"),
    ({"divergence": "forward_kl"}, "divergence=forward_kl needs estimator=full or top_k: the "
     "log-prob of one sampled token does not tell it"),
    ({"divergence": "jsd"}, "divergence=jsd needs estimator=full or top_k"),
    ({"estimator": "full", "kl_discount_factor": 0.5}, "kl_discount_factor=0.5 needs "
     "estimator=sampled, or a reference_kl_coef: a divergence of whole distributions has no"),
    ({"estimator": "top_k", "kl_discount_factor": 0.5, "reference_kl_coef": 0.1},
     "kl_discount_factor=0.5 needs estimator=sampled: with tail=sampled only a part of the"),
    ({"kl_coef": 0.0, "kl_discount_factor": 0.5}, "kl_discount_factor=0.5 changes nothing without "
     "a teacher and with reference_kl_coef=0"),
    ({"estimator": "top_k", "tail": "sampled", "divergence": "jsd"}, "tail=sampled is for "
     "divergence=reverse_kl; use tail=bucket"),
    ({"tail": "sampled"}, "tail=sampled changes nothing without estimator=top_k"),
    ({"estimator": "full", "tail": "sampled"}, "tail=sampled changes nothing without"),
    ({"jsd_beta": 0.5}, "jsd_beta=0.5 changes nothing without divergence=jsd"),
    ({"teacher_top_k": 8}, "teacher_top_k=8 changes nothing without estimator=top_k"),
    ({"top_k_from": "union"}, "top_k_from=union changes nothing without estimator=top_k"),
    ({"estimator": "top_k", "top_k_from": "studnet"}, "top_k_from=studnet is unknown; did you"),
    ({"estimator": "top_k", "teacher_top_k": 0}, "teacher_top_k=0 must be at least 1"),
    *(({"estimator": "full", "divergence": "jsd", "jsd_beta": end}, f"jsd_beta={end} must lie "
       "between 0 and 1: at either end the generalised JSD and its gradient are zero; "
       "divergence=forward_kl or reverse_kl is its limit") for end in (0.0, 1.0)),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), REFUSED_OF_POLICIES)
def test_refused_whoever_rewards(settings: dict[str, Any], message: str) -> None:
    for config in (PolicyObjective, ObjectiveConfig):
        with pytest.raises(ConfigError, match=re.escape(message)):
            config(**settings)


@pytest.mark.parametrize(("settings", "message"), REFUSED_OF_TEACHERS)
def test_refused_of_a_teacher(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ObjectiveConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *({"loss": loss, "clip_low": 0.1, "clip_high": 0.3} for loss in CLIP),
        {"loss": "ppo", "dual_clip": 2.0, "clip_low": 0.0},
        {"loss": "dro", "dro_beta": 0.1},
        {"reward_coef": 1.0, "baseline": "leave_one_out", "scale_by_std": True},
        {"estimator": "full", "divergence": "jsd", "jsd_beta": 0.1},
        {"estimator": "top_k", "teacher_top_k": 1, "divergence": "forward_kl"},
        {"estimator": "top_k", "tail": "sampled"},
        {"kl_discount_factor": 1.0},
        {"kl_clip": 5.0},
        {"kl_clip": 5.0, "estimator": "top_k", "tail": "bucket"},
        {"loss": "package.module:function", "correction": "mask"},
        {"reward_coef": 1.0, "baseline": "global", "scale_by_std": True, "mask_truncated": True},
        {"reward_coef": 1.0, "advantage": "package.module:function", "overlong_buffer": 8},
        {"kl_discount_factor": 1.0, "estimator": "full", "reference_kl_coef": 0.1},
        {"correction": "mask", "correction_cap": 1.0},
    ],
)
def test_what_makes_sense_passes(settings: dict[str, Any]) -> None:
    made = ObjectiveConfig(**settings)
    assert {name: getattr(made, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("settings", "of_policy", "of_teacher"),
    [
        ({"estimator": "sampled"}, 0, 0),
        ({"estimator": "full"}, 0, 0),
        ({"estimator": "top_k"}, DEFAULT_TOP_K, 0),
        ({"estimator": "top_k", "teacher_top_k": 5}, 5, 0),
        ({"estimator": "top_k", "divergence": "forward_kl"}, 0, DEFAULT_TOP_K),
        ({"estimator": "top_k", "divergence": "jsd"}, DEFAULT_TOP_K, DEFAULT_TOP_K),
        ({"estimator": "top_k", "teacher_top_k": 5, "top_k_from": "teacher"}, 0, 5),
        ({"estimator": "top_k", "teacher_top_k": 5, "top_k_from": "union"}, 5, 5),
    ],
)
def test_whose_likeliest_tokens_are_asked_for(
    settings: dict[str, Any], of_policy: int, of_teacher: int
) -> None:
    made = ObjectiveConfig(**settings)
    assert (made.asked_of_policy, made.asked_of_teacher) == (of_policy, of_teacher)


@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        ({"estimator": "sampled"}, False),
        ({"estimator": "full"}, False),
        ({"estimator": "top_k"}, True),
        ({"estimator": "top_k", "tail": "bucket"}, False),
        ({"estimator": "top_k", "divergence": "jsd"}, False),
        ({"estimator": "top_k", "divergence": "forward_kl"}, False),
    ],
)
def test_the_tail_is_sampled_where_that_is_unbiased(
    settings: dict[str, Any], samples: bool
) -> None:
    assert ObjectiveConfig(**settings).samples_tail is samples


def test_a_distillation_needs_its_teacher() -> None:
    require_teacher(ObjectiveConfig())
    with pytest.raises(ConfigError, match=r"kl_coef=0 leaves the teacher out .*recipe=rl"):
        require_teacher(ObjectiveConfig(kl_coef=0.0, reward_coef=1.0))


WHOLE: list[dict[str, Any]] = [
    {"estimator": "full"},
    {"estimator": "full", "divergence": "jsd"},
    {"estimator": "full", "entropy_coef": 0.01},
    {"estimator": "top_k", "tail": "bucket"},
    {"estimator": "top_k", "divergence": "forward_kl"},
]
SAMPLED: list[dict[str, Any]] = [
    {"estimator": "auto"},
    {"estimator": "sampled"},
    {"estimator": "top_k"},
    {"estimator": "full", "reward_coef": 1.0},
    {"estimator": "full", "bonus_coef": 0.1},
    {"estimator": "full", "hint_bonus_coef": 0.1},
    {"estimator": "top_k", "tail": "bucket", "reference_kl_coef": 0.1},
]
WEIGHING: list[dict[str, Any]] = [
    {"loss": "ppo"},
    {"loss": "ppo", "clip_low": 0.1, "dual_clip": 5.0},
    {"loss": "cispo"},
    {"loss": "gspo", "clip_high": 0.1},
    {"correction": "mask"},
    {"correction": "truncate", "correction_cap": 3.0},
]


@pytest.mark.parametrize("weighing", WEIGHING, ids=str)
def test_a_loss_that_would_weigh_nothing_is_refused(weighing: dict[str, Any]) -> None:
    [name, *_] = weighing
    for settings in WHOLE:
        assert not ObjectiveConfig(**settings).has_advantages
        with pytest.raises(ConfigError, match=rf"{name}=.*estimator=sampled"):
            require_advantages(ObjectiveConfig(**settings, **weighing))
    for settings in SAMPLED:
        require_advantages(ObjectiveConfig(**settings, **weighing))


@pytest.mark.parametrize("settings", [*WHOLE, *SAMPLED], ids=str)
@pytest.mark.parametrize("loss", ["importance_sampling", "dro", "package.module:own"])
def test_a_loss_with_terms_of_its_own_goes_with_any_estimator(
    loss: str, settings: dict[str, Any]
) -> None:
    require_advantages(ObjectiveConfig(**settings, loss=loss))


def test_rewards_need_a_weight_and_somebody_to_compare_with() -> None:
    require_reward(PolicyObjective(reward_coef=1.0), group_size=2)
    require_reward(PolicyObjective(bonus_coef=1.0), group_size=1)  # compared with nothing
    with pytest.raises(ConfigError, match="nothing to reward: the gradient is zero"):
        require_reward(PolicyObjective(entropy_coef=0.1), group_size=4)
    alone = PolicyObjective(reward_coef=0.5, bonus_coef=1.0)
    for require in (require_reward, require_comparison):
        with pytest.raises(ConfigError, match=r"group_size=1 with reward_coef=0.5: .* at least 2"):
            require(alone, group_size=1)


def test_groups_of_one_reward_are_not_left_out_beside_a_teacher() -> None:
    """The option would delete the teacher's term, and nothing else."""
    settings = {"remove_constant_reward_groups": True, "reward_coef": 1.0}
    with pytest.raises(ConfigError, match=r"with kl_coef=0.5 would only .* leave it out"):
        ObjectiveConfig(**settings, kl_coef=0.5)
    assert ObjectiveConfig(**settings, kl_coef=0).remove_constant_reward_groups
