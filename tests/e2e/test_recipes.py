"""Every recipe and estimator reaches its purpose, in one process, measured without its own code."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.config.on_policy import MOST_REPLACED
from cluster.config.supervised import DpoConfig, SftConfig
from cluster.inspect.audit import audit
from cluster.store.kept_groups import KeptGroups
from distill.envs.single_turn import SingleTurn
from tests.conftest import TinyPair
from tests.e2e.harness import distil, lines, measured, train
from tests.e2e.judge import exact_reverse_kl
from tests.e2e.objectives import POLICY_GRADIENT
from tests.rows import write_rows

pytestmark = pytest.mark.e2e

# Synchronous, so that a run is a function of its seed.
SMALL: dict[str, Any] = {
    "temperature": 0.7, "steps": 20, "prompts_per_step": 8, "group_size": 4, "max_new_tokens": 8,
    "lr": 1e-3, "eval_size": 2, "checkpoint_every": 100, "engine": "embedded", "max_staleness": 0,
    "local": True,
}  # fmt: skip
RUNS = ("straight", "halves")


def opd(pair: TinyPair, out: Path, **settings: object) -> list[dict[str, float]]:
    return distil(pair, out, **SMALL | settings)


def weights(directory: str | Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"estimator": "full"}, marks=pytest.mark.slow),
        pytest.param(
            {"estimator": "full", "divergence": "jsd", "jsd_beta": 0.9}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"estimator": "top_k", "teacher_top_k": 16, "divergence": "jsd"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"estimator": "top_k", "teacher_top_k": 8, "top_k_from": "union"},
            marks=pytest.mark.slow,
        ),
        {"estimator": "top_k", "teacher_top_k": 16},
    ],
    ids=["full", "jsd", "bucket", "union", "sampled tail"],
)
def test_whole_distributions_lower_the_exact_kl(
    tiny_pair: TinyPair, tmp_path: Path, settings: dict
) -> None:
    steps = opd(tiny_pair, tmp_path / "run", **settings)
    prompts = [f"{a} + {b} =" for a in range(4) for b in (1, 3)]

    def judged(student: str) -> float:
        return exact_reverse_kl(
            student, tiny_pair.teacher, prompts, 0.7, max_new_tokens=8, samples=4
        )

    assert judged(str(tmp_path / "run/final")) < 0.6 * judged(tiny_pair.student)
    assert steps[-1]["opd/reverse_kl"] < steps[0]["opd/reverse_kl"]
    assert all("opd/divergence" in step for step in steps)
    assert all(step["train/updates"] == 1 for step in steps)


def test_a_share_of_scores_changes_metrics_but_not_training(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    """estimator=full asks the learner's own copy; the teacher's engine only feeds metrics.

    A custom loss reads the engine's scores of all groups. Advantages are 0, so it adds nothing.
    """
    shown, learnt = {}, {}
    for scored, loss in (("some", "importance_sampling"), ("all", POLICY_GRADIENT)):
        out = tmp_path / scored
        made = opd(
            tiny_pair, out, estimator="full", loss=loss, steps=2, prompts_per_step=12,
            smoke_test=False,
        )  # fmt: skip
        shown[scored], learnt[scored] = made, weights(out / "final")
        for step in made:
            assert step["opd/reverse_kl"] > 0 and step["opd/bias"] != 0
        assert audit(out / "ledger.jsonl").problems == []
        assert json.loads((out / "certificate.json").read_text())["proven"] is True
        for kept in KeptGroups(out / "groups"):
            assert all(each.teacher_logprobs_T is not None for each in kept.group.segments())
    for name, tensor in learnt["all"].items():
        assert torch.equal(tensor, learnt["some"][name]), name
    for every, some in zip(shown["all"], shown["some"], strict=True):
        assert every["opd/divergence"] == some["opd/divergence"]
        assert every["opd/reverse_kl"] != some["opd/reverse_kl"], "as many were scored"


def test_each_prompt_is_scored_by_its_own_teacher(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """One teacher is the student itself: its KL is zero at the start, the other's is not."""
    prompts = write_rows(
        tmp_path / "prompts.jsonl",
        *({"prompt": f"{a} + 1 =", "teacher": "own", "tag": "first"} for a in range(9)),
        *({"prompt": f"{a} + 2 =", "teacher": "other"} for a in range(9)),
    )
    teachers = {
        "other": {"model": tiny_pair.teacher, "weight": 2.0},
        "own": {"model": str(_copy(tiny_pair.student, tmp_path / "own"))},
    }
    steps = opd(
        tiny_pair, tmp_path / "run", teacher=None, teachers=teachers, prompts=prompts, steps=2,
        prompts_per_step=16,
    )  # fmt: skip
    assert steps[0]["opd/reverse_kl/teacher=own"] == pytest.approx(0, abs=1e-4)
    assert steps[0]["opd/reverse_kl/tag=first"] == steps[0]["opd/reverse_kl/teacher=own"]
    assert steps[0]["opd/reverse_kl/teacher=other"] > 1
    assert steps[1]["opd/reverse_kl/teacher=own"] > 1e-3, "the student did not move"


def _copy(model: str, to: Path) -> Path:
    return Path(shutil.copytree(model, to))


@pytest.mark.slow
def test_rl_raises_its_reward_near_its_reference(tiny_pair: TinyPair, tmp_path: Path) -> None:
    prompts = write_rows(
        tmp_path / "prompts.jsonl",
        *({"prompt": f"{a} + 1 =", "answer": "e", "bonuses": {"a": 0.1}} for a in range(9)),
    )
    steps = train(
        "rl", tmp_path / "run",
        student=tiny_pair.student, prompts=prompts, reward="contains",
        reference=tiny_pair.student, reference_kl_coef=0.02, loss="ppo", num_substeps=2,
        correction="truncate", entropy_coef=1e-3, eval_source=prompts,
        env=SingleTurn(format=".*e.*", format_reward=0.05), constant_groups="replace",
        sft_data=write_rows(tmp_path / "sft.jsonl", {"prompt": "1", "completion": "e"}),
        **SMALL | {"group_size": 8},
    )  # fmt: skip
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    assert steps[0]["reference/kl"] == pytest.approx(0, abs=1e-4) and steps[-1]["reference/kl"] > 0
    assert steps[-1]["sft/nll"] < steps[0]["sft/nll"]
    assert all(step["train/updates"] == 2 for step in steps)
    assert "opd/reverse_kl" not in steps[0]
    bound = MOST_REPLACED * SMALL["prompts_per_step"]
    for step in steps:  # what has the answer has the format, which pays a twentieth
        assert step["env/format"] == pytest.approx(step["reward/mean"])
        assert step["reward/bonus"] >= 0.05 * step["env/format"] - 1e-6
        # Groups of one reward are replaced, unless they are too many.
        assert step["groups/replaced"] == bound or step["reward/constant_groups"] == 0
    assert 0 < sum(step["groups/replaced"] for step in steps) < len(steps) * bound
    assert not audit(tmp_path / "run/ledger.jsonl", steps=len(steps)).problems
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["eval after"]["eval/accuracy"] >= summary["eval before"]["eval/accuracy"]


def test_custom_advantage_and_loss_train_like_the_built_in_ones(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    """Also: long responses cost, and truncated ones do not count."""
    prompts = write_rows(
        tmp_path / "prompts.jsonl", *({"prompt": f"{a} + 1 =", "answer": "e"} for a in range(9))
    )

    def trained(name: str, **settings: object) -> list[dict[str, float]]:
        return train(
            "rl", tmp_path / name,
            student=tiny_pair.student, prompts=prompts, reward="contains", mask_truncated=True,
            overlong_buffer=12,
            stop_tokens=",".join("abcdefghijklmnopqrst"),
            **SMALL | {"steps": 2, "max_new_tokens": 16} | settings,
        )  # fmt: skip

    built_in = trained("built-in", baseline="global", scale_by_std=True)
    own = trained(
        "own", baseline="tests.e2e.objectives:global_advantage",
        loss=POLICY_GRADIENT, smoke_test=False,
    )  # fmt: skip
    for name in ("train/loss", "train/grad_norm"):
        assert [s[name] for s in own] == pytest.approx([s[name] for s in built_in], rel=1e-4)
    assert built_in[0]["rollout/stop/length"] > 0
    for step in built_in:
        # Truncated responses have the maximum length and lose 1.
        assert step.get("rollout/stop/length", 0.0) <= step["env/overlong"] + 1e-6
        assert step["train/grad_norm"] > 0


def test_a_step_without_a_signal_updates_nothing(tiny_pair: TinyPair, tmp_path: Path) -> None:
    prompts = write_rows(
        tmp_path / "prompts.jsonl", *({"prompt": f"{a}", "answer": "no way"} for a in range(9))
    )
    steps = train(
        "rl", tmp_path / "run",
        student=tiny_pair.student, prompts=prompts, constant_groups="drop", **SMALL | {"steps": 2},
    )  # fmt: skip
    for step in steps:
        assert (step["train/groups"], step["train/updates"], step["train/tokens"]) == (0, 0, 0)
        assert step["reward/constant_groups"] == 1
        assert step["reward/mean"] == 0
    found = audit(tmp_path / "run/ledger.jsonl", steps=2)
    assert not found.problems and found.trained == 2 * SMALL["prompts_per_step"]
    assert not found.set_aside
    before, after = weights(tiny_pair.student), weights(tmp_path / "run/final")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_dpo_learns_the_preferences_and_resumes(tiny_pair: TinyPair, tmp_path: Path) -> None:
    data = write_rows(
        tmp_path / "pairs.jsonl",
        *({"prompt": f"{a}+1=", "chosen": f"{a + 1}", "rejected": f"{a}"} for a in range(8)),
    )

    apart = write_rows(
        tmp_path / "apart.jsonl",
        *({"prompt": f"{a}+1=", "chosen": f"{a + 1}", "rejected": f"{a - 1}"} for a in range(1, 4)),
    )

    def dpo(out: Path, steps: int) -> list[dict[str, float]]:
        return train(
            "dpo", out,
            model=tiny_pair.student, data=data, steps=steps, batch_size=8, lr=1e-3,
            checkpoint_every=4, local=True, eval_source=apart, eval_every=2,
            keep_last=1, keep_best="validation/loss",
        )  # fmt: skip

    straight = dpo(tmp_path / "straight", 8)
    assert straight[0]["train/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert straight[-1]["train/loss"] < 0.6 and straight[-1]["dpo/accuracy"] == 1
    dpo(tmp_path / "halves", 4)
    (tmp_path / "halves/summary.json").unlink()  # as if killed after the evaluation
    dpo(tmp_path / "halves", 4)
    resumed = dpo(tmp_path / "halves", 8)
    assert resumed[-1]["train/loss"] == pytest.approx(straight[-1]["train/loss"], abs=1e-6)
    one, other = weights(tmp_path / "straight/final"), weights(tmp_path / "halves/final")
    assert all(torch.equal(one[name], other[name]) for name in one)
    # The reference of held-out pairs is kept as well: what is evaluated is the same again.
    for out in ("halves", "straight"):
        held_out = [line for line in lines(tmp_path / out) if "validation/loss" in line]
        assert [line["step"] for line in held_out] == [0, 2, 4, 6, 8]
    assert held_out[0]["validation/loss"] == pytest.approx(0.6931, abs=1e-3)
    best = min(held_out[1:], key=lambda line: line["validation/loss"])
    marked = json.loads((tmp_path / "straight/checkpoints/best.json").read_text())
    assert (marked["step"], marked["value"]) == (best["step"], best["validation/loss"])
    assert (tmp_path / f"straight/checkpoints/step-{int(best['step']):06d}/model").is_dir()
    summaries = [json.loads((tmp_path / run / "summary.json").read_text()) for run in RUNS]
    assert summaries[0]["best"] == marked
    for when in ("before", "after"):
        straightly, resumedly = (each[f"validation {when}"] for each in summaries)
        assert measured(straightly) == set(DpoConfig.measured)
        for name in ("validation/loss", "validation/accuracy", "validation/margin"):
            assert straightly[name] == pytest.approx(resumedly[name], abs=1e-6)


def test_sft_evaluates_held_out_rows(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """Each source by itself, too; an epoch has the other rows."""
    for name, ask, text in (("ones", "?", "1"), ("twos", " is what?", "2")):
        rows = ({"prompt": f"{a}{b}{ask}", "completion": text} for a in range(4) for b in range(5))
        write_rows(tmp_path / f"{name}.jsonl", *rows)
    steps = train(
        "sft", tmp_path / "run",
        model=tiny_pair.student, data=f"{tmp_path / 'ones.jsonl'}:3,{tmp_path / 'twos.jsonl'}",
        eval_size=0.2, epochs=3, batch_size=16, lr=3e-3,
        local=True, packing=True,
    )  # fmt: skip
    assert len(steps) == 6  # 32 rows, 3 epochs
    assert all(step["train/padding_share"] == 0 for step in steps), "prompts have two lengths"
    for step in steps:  # each row trains two tokens
        ones, twos = (step[f"train/nll/source={name}"] for name in ("ones", "twos"))
        share = step["train/share/source=ones"]
        assert share * ones + (1 - share) * twos == pytest.approx(step["train/nll"], rel=1e-5)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    before, after = (summary[f"validation {when}"] for when in ("before", "after"))
    assert measured(after) == set(SftConfig.measured)
    for of in ("", "/source=ones", "/source=twos"):
        assert after[f"validation/nll{of}"] < before[f"validation/nll{of}"]
    mean = (after["validation/nll/source=ones"] + after["validation/nll/source=twos"]) / 2
    assert after["validation/nll"] == pytest.approx(mean, rel=1e-5)
    settings = json.loads((tmp_path / "run/config.json").read_text())["settings"]
    assert settings["steps"] == 6 and settings["epochs"] is None
