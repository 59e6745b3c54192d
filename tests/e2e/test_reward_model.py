"""A reward model learns preferences, then rewards a policy, in one process."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from actors.embedded.reward_model import EmbeddedRewardModel
from actors.envs.judge_env import Judged
from cluster.config.supervised import RewardModelConfig
from cluster.evaluate import main as evaluate
from cluster.inspect.audit import audit
from cluster.recipes.context import Observer
from distill.chat.template import chat_text
from distill.tokenizer import load_tokenizer
from tests.conftest import TinyPair
from tests.e2e.harness import events, lines, measured, metrics, process_of, train, trained_groups
from tests.e2e.test_recipes import SMALL
from tests.rows import write_rows

pytestmark = pytest.mark.e2e

RIGHT, WRONG = "e", "f"


def preference(a: int, b: int, chat: bool) -> dict:
    """Preference for the answer with an `e` in it."""
    chosen, rejected = (f"{a}{letter}{b}" for letter in (RIGHT, WRONG))
    if chat:
        asked = [{"role": "user", "content": f"{a}+{b}?"}]
        return {"messages": asked, "chosen": chosen, "rejected": rejected}
    return {"prompt": f"{a}+{b}=", "chosen": chosen, "rejected": rejected}


def scores(model_dir: Path, rows: list[dict]) -> list[tuple[float, float]]:
    """Scores (chosen, rejected) of the text by transformers, row by row."""
    model = AutoModelForSequenceClassification.from_pretrained(model_dir).eval()
    tokenizer = load_tokenizer(str(model_dir))

    def score(row: dict, side: str) -> float:
        if "messages" in row:
            messages = [*row["messages"], {"role": "assistant", "content": row[side]}]
            text = chat_text(tokenizer, messages, tools=None, add_generation_prompt=False)
        else:
            text = row["prompt"] + row[side] + tokenizer.eos_token
        given = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            return model(input_ids=given["input_ids"]).logits[0, 0].item()

    return [(score(row, "chosen"), score(row, "rejected")) for row in rows]


@pytest.fixture(scope="module")
def trained(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of recipe=reward_model over text and chats, with its own held-out pairs."""
    root = tmp_path_factory.mktemp("reward")
    data, apart = root / "pairs.jsonl", root / "apart.jsonl"
    write_rows(data, *(preference(a, b, a % 2 == 0) for a in range(8) for b in range(8)))
    write_rows(apart, *held_out())
    return run(tiny_pair, root / "out", data=str(data), eval_source=str(apart), epochs=6)


def held_out() -> list[dict]:
    return [preference(a, b, a % 2 == 0) for a in (8, 9) for b in range(8)]


def run(pair: TinyPair, out: Path, **settings: object) -> Path:
    given = {
        "model": pair.student, "batch_size": 16, "lr": 3e-3, "local": True,
        "checkpoint_every": 5, "eval_every": 10, "max_grad_norm": 1.0,
    }  # fmt: skip
    train("reward_model", out, **given | settings)
    return out


def test_a_reward_model_learns_the_preferences(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    after = summary["validation after"]
    assert measured(after) == set(RewardModelConfig.measured)
    assert after["validation/accuracy"] == pytest.approx(1) and after["validation/margin"] > 1
    assert after["validation/loss"] < 0.3 < summary["validation before"]["validation/loss"]
    steps = metrics(trained)
    assert len(steps) == summary["steps"] == 24  # 64 pairs, 6 epochs of 4 steps
    assert steps[-1]["reward_model/accuracy"] == pytest.approx(1)
    assert [int(step["step"]) for step in steps if "validation/loss" in step] == [10, 20]
    apart = [line for line in lines(trained) if "time/step" not in line]
    assert [line["step"] for line in apart] == [0, 24]
    assert apart[1]["validation/loss"] == after["validation/loss"]


def test_the_saved_model_is_transformers_own(trained: Path) -> None:
    config = json.loads((trained / "final/config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert config["pad_token_id"] == load_tokenizer(str(trained / "final")).pad_token_id
    made = torch.tensor(scores(trained / "final", held_out()))
    after = json.loads((trained / "summary.json").read_text())["validation after"]
    loss = -torch.nn.functional.logsigmoid(made[:, 0] - made[:, 1]).mean().item()
    assert after["validation/loss"] == pytest.approx(loss, abs=1e-5)
    assert after["validation/chosen_mean"] == pytest.approx(made[:, 0].mean().item(), abs=1e-5)


# As a reward


def rl(pair: TinyPair, out: Path, rows: list[dict], **settings: object) -> list[dict[str, float]]:
    prompts = write_rows(out.parent / "prompts.jsonl", *rows)
    given = SMALL | {"student": pair.student, "prompts": prompts, "group_size": 8, "lr": 2e-3}
    return train("rl", out, **given | settings)


def rose(steps: list[dict[str, float]], name: str = "reward/mean") -> float:
    values = [step[name] for step in steps]
    return sum(values[-5:]) / 5 - sum(values[:5]) / 5


def test_a_policy_raises_its_reward(trained: Path, tiny_pair: TinyPair, tmp_path: Path) -> None:
    """Text and chats; the policy also writes the letter that is rewarded."""
    rows: list[dict] = [{"prompt": f"{a}+1="} for a in range(6)]
    rows += [{"messages": [{"role": "user", "content": f"{a}+1?"}]} for a in range(6)]
    steps = rl(tiny_pair, tmp_path / "run", rows, reward=f"model:{trained / 'final'}")
    assert rose(steps) > 0.3
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    gained = [summary[f"eval {when}"]["eval/accuracy"] for when in ("before", "after")]
    assert gained[1] > gained[0]


def test_a_reward_model_judges_groups(trained: Path, tiny_pair: TinyPair, tmp_path: Path) -> None:
    env = Judged(reward_model=str(trained / "final"), mode="pairs")
    rows = [{"prompt": f"{a}+1?"} for a in range(12)]
    steps = rl(tiny_pair, tmp_path / "run", rows, env=env, steps=3, eval_size=0)
    # A preference of one over another is one less that of the other over the one.
    assert [step["reward/mean"] for step in steps] == pytest.approx([0.5] * 3, abs=1e-5)
    assert all(step["advantage/std"] > 1e-3 for step in steps)


def test_a_reward_model_evaluates_a_checkpoint(
    trained: Path, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", *({"prompt": f"{a}+1="} for a in range(4)))
    arguments = [
        f"model={tiny_pair.student}", f"prompts={prompts}", f"out={tmp_path / 'eval.json'}",
        f"reward=model:{trained / 'final'}", "max_new_tokens=8", "engine=embedded",
    ]  # fmt: skip
    assert evaluate(arguments) == 0
    report = json.loads((tmp_path / "eval.json").read_text())
    [made] = report["data sets"].values()
    rows = [{"prompt": f"{a}+1="} for a in range(4)]
    responses = [each["text"] for each in made["responses"]]
    both = [
        {**row, "chosen": text, "rejected": "?"} for row, text in zip(rows, responses, strict=True)
    ]
    expected = [chosen for chosen, _ in scores(trained / "final", both)]
    assert [each["correct"] for each in made["responses"]] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_dead_reward_model_is_restarted(
    trained: Path, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    out = tmp_path / "run"

    def kill(line: Mapping[str, float]) -> None:
        if line["step"] == 1:
            os.kill(process_of("reward model", out), signal.SIGKILL)

    rows = [{"prompt": f"{a}+1="} for a in range(12)]
    reward = f"model:{trained / 'final'}"
    steps = rl(
        tiny_pair, out, rows, reward=reward, local=False, steps=12, eval_every=4,
        observer=Observer(line=kill),
    )  # fmt: skip
    assert len(steps) == 12
    assert [event["who"] for event in events(out, "death")] == ["reward model"]
    assert len([event for event in events(out, "start") if event["who"] == "reward model"]) == 2
    assert trained_groups(out) == list(range(12 * 8)), "a group was lost with it"


def certified(out: Path) -> dict[str, Any]:
    certificate = json.loads((out / "certificate.json").read_text())
    found = audit(out / "ledger.jsonl")
    assert found.problems == [] and found.scoring is not None
    assert found.scoring.holds == certificate["proven"]
    return certificate


@pytest.mark.slow
def test_groups_of_a_changed_reward_model_are_sampled_again(
    trained: Path, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    models: list[EmbeddedRewardModel] = []
    score = EmbeddedRewardModel.score_rows

    def watched(model: EmbeddedRewardModel, rows: Any) -> list[float]:
        models.append(model)
        if len(models) == 40:  # the head's sign is flipped
            with torch.no_grad():
                model._model.score.weight.neg_()
        return score(model, rows)

    monkeypatch.setattr(EmbeddedRewardModel, "score_rows", watched)
    rows = [{"prompt": f"{a}+1="} for a in range(12)]
    reward = f"model:{trained / 'final'}"
    settings = {"steps": 12, "verify_every": 2, "checkpoint_every": 2, "eval_size": 0}
    steps = rl(tiny_pair, out, rows, reward=reward, **settings)
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert models[0] is not models[-1]
    certificate = certified(out)
    assert certificate["proven"], certificate["verdict"]
    first, second = certificate["replicas"]
    # Its weights may change between their checksum and the scores of the same canary.
    assert "scores differ" in first["quarantine"]["why"]
    assert second["quarantine"] is None and second["groups"] > 0
    [finding] = [each for each in events(out, "finding") if each["name"] == "scorer_moved"]
    assert "reward model has moved" in finding["text"]
    assert events(out, "death")[0]["who"] == "reward model"
