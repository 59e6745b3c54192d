"""Settings that contradict one another are refused, and one of them is named.

Declared rules of single settings are in test_rules.py.
"""

import math
from typing import Any

import pytest

from cluster.config.recipes import make
from distill.envs.games.tic_tac_toe import TicTacToeGames
from distill.envs.reading import Reading
from distill.envs.tool_use import ToolUse
from distill.errors import ConfigError
from tests.refusals import refuses

BASE: dict[str, dict[str, Any]] = {
    "opd": {
        "student": "s", "teacher": "t", "prompts": "p", "out": "o", "temperature": 0.7,
        "steps": 3, "estimator": "sampled",
    },
    "rl": {"student": "s", "prompts": "p", "out": "o", "temperature": 1.0, "reward": "contains"},
    "selfplay": {"student": "s", "out": "o", "temperature": 0.7},
    "sft": {"model": "m", "data": "d", "out": "o"},
    "reward_model": {"model": "m", "data": "d", "out": "o"},
}  # fmt: skip
# Policy and learner on eight GPUs, by turns.
EIGHT = {
    "device": "cuda", "gpu_memory_gib": 79.0, "engine": "sglang", "learner_workers": 8,
    "policy_engines": 8, "colocate": "sleep", "gpus_per_actor": 0.5,
}  # fmt: skip
TURNS = {
    "teacher": None, "engine": "sglang", "teacher.gpus": "shared", "teachers.a.model": "a",
    "teachers.b.model": "b",
}  # fmt: skip
WITH_POLICY = {"engine": "sglang", "teacher.gpus": "policy"}
NODES = {"policy.server_flags": "--tp-size 2 --nnodes 2"}
SERVED = {"estimator": "full", "teacher.head": "m"}
MOVES = {"teacher": "policy"}
WORDS = {"teacher.sft_steps": 1, "teacher.samples_from": "m@http://h:1/v1"}
TEXT = "teacher.samples_from"
SMALL = {"prompts_per_step": 4, "group_size": 2}

# (recipe, settings, the named field, another name in the message)
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    *(("opd", {"lr": value}, "learner.lr", "") for value in (0.0, math.nan, math.inf)),
    *(("opd", {"temperature": value}, "sampling.temperature", "") for value in (0.0, math.nan)),
    ("opd", {"on_stale": "train_late", "max_staleness": 0}, "queue.on_stale", ""),
    ("opd", {"on_stale": "restart", "prompts_per_step": 4, "groups_in_flight": 4},
     "queue.on_stale", ""),
    ("opd", {"eval.size": 0, "eval.every": 3}, "eval.every", ""),
    ("opd", {"eval.size": 0, "eval.source": "p"}, "eval.source", ""),
    ("opd", {"eval.size": 0, "eval.temperature": 0.5}, "eval.temperature", ""),
    ("opd", {"eval.size": 0, "eval.max_new_tokens": 5}, "eval.max_new_tokens", ""),
    ("rl", {"reward.timeout_s": 5.0}, "reward.timeout_s", "contains"),
    ("opd", {"prompts": "a.jsonl:0,b.jsonl"}, "data.source", ""),
    ("opd", {"eval.source": "a.jsonl,,b.jsonl"}, "eval.source", ""),
    ("opd", {"sft.data": "a.jsonl,,b.jsonl"}, "sft.data", ""),
    ("opd", {"track": "tensorbord"}, "tracking.track", ""),
    ("opd", {"track": "wandb,"}, "tracking.track", ""),
    ("opd", {"env": TicTacToeGames(), "prompts": None, "columns": {"answer": "a"}},
     "data.columns", ""),
    ("opd", {"reward": "model:"}, "reward.function", ""),
    ("opd", {"reward": "model:DIR", "env": Reading()}, "reward.function", "env=Reading"),
    # teachers
    ("opd", {"sample_share": 0.5, "sft_steps": 3}, "teacher.sample_share", ""),
    ("opd", {"sample_share": 0.5, "teacher": "policy"}, "teacher.sample_share", ""),
    *(("opd", WORDS | {TEXT: text}, TEXT, "")
      for text in ("http://h:1/v1", " @http://h:1/v1", "m@http://me:secret@h:1/v1")),
    ("opd", {TEXT: WORDS[TEXT]}, TEXT, ""),
    ("opd", WORDS | {"teacher": None, "teachers": {"a": {"model": "t"}}}, TEXT, ""),
    ("opd", {"sft_steps": 1, "teacher": None,
             "teachers": {"a": {"model": "t", "samples_from": "http://h:1/v1"}}},
     "teachers.a.samples_from", ""),
    *(("opd", {"teacher": None, "teachers": {name: {"model": "t"}}}, "teachers", f"teachers.{name}")
      for name in ("a/b", "policy", "reference", "reward_model")),
    *(("opd", {"teacher": None, "teachers": {"a": {"model": "t", "weight": weight}}},
       "teachers.a.weight", "") for weight in (0.0, math.inf)),
    ("opd", {"teacher": None, "teachers": {"a": {"model": "policy"}}}, "teachers.a.model", ""),
    ("opd", MOVES | {"teacher.engines": 2}, "teacher.engines", ""),
    ("opd", MOVES | {"teacher.server_flags": "--tp-size 2"}, "teacher.server_flags", ""),
    ("opd", MOVES | {"teacher.ema": 0.9, "teacher.server_flags": "--pp-size 2"},
     "teacher.server_flags", ""),
    ("opd", {"teacher": "http://h:1", "teacher.server_flags": "--tp-size 2"},
     "teacher.server_flags", ""),
    ("opd", MOVES | {"kl_coef": 0.0}, "objective.kl_coef", ""),
    ("opd", MOVES | {"kl_coef": 0.0, "hint_bonus_coef": 0.1, "estimator": "top_k"},
     "objective.estimator", ""),
    ("opd", MOVES | {"teacher.lag": 4, "rollout_only": True}, "teacher.lag", ""),
    ("opd", MOVES | {"correct_reward_threshold": 0.5}, "objective.correct_reward_threshold", ""),
    *(("opd", MOVES | {"teacher.feedback": text}, "teacher.feedback", "")
      for text in ("{prompt}{anwser}", "{answer}", "{prompt!r}", "{prompt}{")),
    ("opd", SERVED | {"estimator": "top_k"}, "teacher.head", ""),
    ("opd", SERVED | {"rollout_only": True}, "teacher.head", ""),
    ("opd", SERVED | {"teacher": "policy"}, "teacher.head", ""),
    ("opd", SERVED | {"train_from": "runs/kept"}, "teacher.head", ""),
    ("opd", {"estimator": "full", "teacher": "http://h:1"}, "teacher.head", ""),
    # what is kept
    ("opd", {"keep": 3}, "keep", ""),
    ("opd", {"keep": 0}, "keep", ""),
    ("opd", {"rollout_only": True, "keep": 10}, "keep", ""),
    *(("opd", {"rollout_only": True, name: 20}, name, "rollout_only")
      for name in ("checkpoint.keep_every", "checkpoint.keep_last")),
    ("opd", {"train_from": "e", "eval_every": 2}, "eval.every", ""),
    ("opd", {"train_from": "e", "dry_run": "rehearse"}, "train_from", ""),
    # workers, engines, GPUs
    *(("opd", {name: 0}, name, "") for name in ("policy.engines", "teacher.engines",
                                                 "rollout.workers")),
    ("opd", SMALL | {"learner_workers": 9}, "learner.workers", "at most 8"),
    ("opd", SMALL | {"learner_workers": 3, "learner_replicas": 2}, "learner.workers",
     "learner.replicas=2"),
    ("opd", SMALL | {"learner_replicas": 2}, "learner.workers", "learner.replicas=2"),
    ("opd", SMALL | {"learner_replicas": 0}, "learner.replicas", ""),
    ("opd", {"lora.rank": 4, "lora.targets": "q_proj,"}, "lora.targets", ""),
    ("opd", {"local": True, "learner_workers": 2}, "learner.workers", ""),
    ("opd", {"local": True, "policy_engines": "1..3"}, "policy.engines", ""),
    ("opd", {"local": True, "weights": "group"}, "weights.transport", ""),
    ("opd", {"local": True, "rollout.cpus": 1}, "rollout.cpus", ""),
    ("opd", {"local": True, "colocate": "share"}, "cluster.colocate", ""),
    *(("opd", EIGHT | {"policy_engines": engines, "policy_server_flags": flags},
       "policy.server_flags", "")
      for engines, flags in ((8, "--tp-size 2"), ("4..5", "--tp-size 2"), (2, "--tp-size 3"),
                             (8, "--pp-size 2"))),
    ("opd", EIGHT | {"teacher_server_flags": "--nnodes 2"}, "teacher.server_flags", ""),
    *(("opd", EIGHT | setting, "cluster.colocate", "")
      for setting in ({"on_weight_update": "in_place"}, {"engine": "embedded"},
                      {"gpus_per_actor": 1.0})),
    ("opd", TURNS | {"teachers.b.model": "http://127.0.0.1:1"}, "teacher.gpus", ""),
    ("opd", TURNS | {"engine": "embedded"}, "teacher.gpus", ""),
    ("opd", TURNS | {"local": True}, "teacher.gpus", ""),
    ("opd", TURNS | {"teacher.engines": "1..3"}, "teacher.engines", ""),
    ("opd", TURNS | {"teacher.server_flags": "--tp-size 2 --nnodes 2"}, "teacher.server_flags", ""),
    ("opd", WITH_POLICY | {"teacher": "http://127.0.0.1:1"}, "teacher.gpus", ""),
    ("opd", WITH_POLICY | {"teacher": "policy", "teacher.lag": 2}, "teacher.gpus", ""),
    ("opd", WITH_POLICY | {"policy.engines": 2}, "teacher.engines", ""),
    ("opd", WITH_POLICY | {"policy.server_flags": "--tp-size 2"}, "policy.server_flags", ""),
    ("opd", WITH_POLICY | {"colocate": "share"}, "cluster.colocate", ""),
    ("opd", WITH_POLICY | {"colocate": "sleep", "learner.workers": 2}, "policy.engines", ""),
    ("opd", WITH_POLICY | {"colocate": "sleep", "device": "cuda", "gpus_per_actor": 0.4},
     "cluster.gpus_per_actor", ""),
    ("opd", WITH_POLICY | {"weights": "adapter", "lora.rank": 4}, "weights.transport", ""),
    ("opd", WITH_POLICY | {"on_weight_update": "in_place"}, "engine.on_weight_update", ""),
    ("opd", NODES | {"weights": "shared_memory"}, "weights.transport", ""),
    ("opd", NODES | {"local": True}, "policy.server_flags", ""),
    ("opd", NODES | {"colocate": "share"}, "cluster.colocate", ""),
    ("opd", {"policy.server_flags": "--node-rank 1"}, "policy.server_flags", ""),
    # other recipes
    ("rl", {"baseline": "global", "constant_groups": "drop"}, "objective.constant_groups", ""),
    ("rl", {"baseline": "global", "constant_groups": "replace"}, "objective.constant_groups", ""),
    ("rl", {"baseline": "global", "prompts_per_step": 1, "group_size": 1}, "objective.baseline",
     ""),
    ("rl", {"group_size": 1}, "sampling.group_size", ""),
    ("selfplay", {"prompts": "p"}, "data.source", ""),
    ("selfplay", {"eval.source": "p"}, "eval.source", "eval.source=p"),
    ("selfplay", {"reward": "contains"}, "reward.function", ""),
    ("selfplay", {"group_size": 3}, "sampling.group_size", ""),
    ("selfplay", {"env": TicTacToeGames(opponent="reference", opponent_temperature=0.0)},
     "model.reference", "reference=DIR"),
    ("selfplay", {"reference": "r"}, "model.reference", ""),
    ("selfplay", {"env": ToolUse()}, "data.source", ""),
    ("sft", {"eval.source": "v", "eval.size": 0.1}, "eval.size", ""),
    ("sft", {"eval.size": 2.5}, "eval.size", ""),
    ("sft", {"eval.size": math.nan}, "eval.size", ""),
    ("sft", {"eval.source": "v:2,w"}, "eval.source", ""),
    ("sft", {"eval.every": 5}, "eval.every", ""),
    ("reward_model", {"lora.rank": 4}, "lora.rank", ""),
    ("reward_model", {"lora.adapter": "a"}, "lora.adapter", ""),
]  # fmt: skip


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang is installed, as far as settings are concerned."""
    monkeypatch.setattr("actors.config.sglang_installed", lambda: True)
    monkeypatch.setattr("actors.config.require_sglang", lambda: None)


@pytest.mark.parametrize(("recipe", "settings", "field", "names"), REFUSED, ids=str)
def test_settings_that_contradict_others_are_refused(
    recipe: str, settings: dict[str, Any], field: str, names: str
) -> None:
    with refuses(ConfigError, field, names=names):
        make(recipe, **BASE[recipe] | settings)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        *((recipe, {}) for recipe in ("opd", "rl", "sft", "reward_model")),
        ("rl", {"baseline": "global", "group_size": 1, "overlong_buffer": 8}),
        *(("opd", given) for given in (EIGHT, TURNS, WITH_POLICY, NODES, SERVED, WORDS, SMALL)),
    ],
    ids=str,
)
def test_the_base_settings_are_accepted(recipe: str, settings: dict[str, Any]) -> None:
    make(recipe, **BASE[recipe] | settings)


@pytest.mark.parametrize("pool", ["policy.engines", "rollout.workers", "teacher.engines"])
@pytest.mark.parametrize(
    "size", ["2..1", "0..2", "2...3", "..2", "2..x", "many", "1..10001", 99_999_999_999, -1, 0]
)
def test_a_pool_is_a_number_or_a_range(pool: str, size: int | str) -> None:
    with refuses(ConfigError, pool):
        make("opd", **BASE["opd"] | {pool: size})
