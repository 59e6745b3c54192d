"""Rewards of a judge in whole groups: each response scored, or all of them compared."""

import asyncio
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from math import exp
from pathlib import Path
from typing import Any

import pytest

from actors.envs.judge import API_KEY_VARIABLE
from actors.envs.judge_env import Judged, balanced_pairs
from actors.rollout.episode import play_group
from distill.envs.base import EnvDataset, Episode
from distill.errors import ConfigError, DataError
from distill.models.reward import start_reward_model
from distill.rewards.model_reward import REWARD_MODEL, RewardInput
from distill.sampling import TrainSampling
from tests.actors.judge_server import API_KEY, MODEL, ScriptedJudge, running_judge
from tests.conftest import TinyPair
from tests.refusals import refuses
from tests.rows import write_rows
from tests.samples import TEMPERATURE
from tests.scripted import Scripted, chat_tokenizer, setting
from tests.tiny import save_tokenizer

TOKENIZER = chat_tokenizer()

SAMPLING = TrainSampling(temperature=TEMPERATURE, max_new_tokens=48)
RUBRIC = "Large numbers are good."


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedJudge]:
    monkeypatch.setenv(API_KEY_VARIABLE, API_KEY)
    with running_judge() as server:
        server.script = larger
        yield server


def larger(text: str, given: dict[str, str]) -> str:
    """Judge of numbers: the larger one is better, and its value is its score."""
    if "answer" in given:
        return f"Score: {given['answer']}"
    a, b = int(given["answer A"]), int(given["answer B"])
    return f"Verdict: {'TIE' if a == b else 'A' if a > b else 'B'}"


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi."}]
    rows = [
        {"prompt": "Name a number", "answer": "10", "tag": "numbers"},
        {"messages": [*chat, {"role": "user", "content": "Another"}]},
    ]
    return write_rows(tmp_path / "prompts.jsonl", *rows)


def judged(server: ScriptedJudge, **settings: Any) -> Judged:
    given = {"judge_url": server.url, "judge_model": MODEL, "rubric": RUBRIC}
    return Judged(**{**given, **settings})


def play(dataset: EnvDataset, policy: Scripted, group_size: int, problem: int = 0) -> list[Episode]:
    builder = pickle.loads(pickle.dumps(dataset.builder(problem, group_size)))
    return asyncio.run(play_group(policy, builder, SAMPLING, group_id=0, seed=0))


def rewards(episodes_G: list[Episode]) -> list[float]:
    return [episode.reward for episode in episodes_G]


class Lengths:
    """Reward model that scores length."""

    async def rewards(self, conversations: Sequence[RewardInput]) -> list[float]:
        return [0.5 * len(asked.response) for asked in conversations]


@pytest.fixture(scope="module")
def checkpoint(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Reward model for the checks before a run."""
    path = tmp_path_factory.mktemp("reward-model")
    start_reward_model(tiny_pair.student, padding=0, device="cpu").save_pretrained(path)
    save_tokenizer(path)
    return str(path)


@pytest.mark.parametrize("mode", ["score", "pairs"])
def test_a_reward_model_judges_a_group_at_once(prompts: str, checkpoint: str, mode: str) -> None:
    dataset = Judged(reward_model=checkpoint, mode=mode)(prompts, setting(TOKENIZER))
    builder = pickle.loads(pickle.dumps(dataset.builder(0, 3)))
    policy = Scripted(TOKENIZER, ["a", "<think>at length</think>bbb", "ccccc"])
    models: dict[str, Any] = {REWARD_MODEL: Lengths()}
    playing = play_group(policy, builder, SAMPLING, group_id=0, seed=0, models=models)
    scores = [0.5, 1.5, 2.5]
    expected = scores
    if mode == "pairs":
        expected = [
            sum(1 / (1 + exp(b - a)) for j, b in enumerate(scores) if j != i) / 2
            for i, a in enumerate(scores)
        ]
    assert rewards(asyncio.run(playing)) == pytest.approx(expected)


def test_a_judge_has_a_rubric() -> None:
    with refuses(ConfigError, "env.rubric"):
        Judged(judge_url="http://h/v1", judge_model="m")


def test_every_response_is_scored(server: ScriptedJudge, prompts: str) -> None:
    dataset = judged(server)(prompts, setting(TOKENIZER))
    assert len(server.bodies) == 1 and RUBRIC in server.asked[0]
    server.bodies.clear()
    server.meets = 3  # sequential requests would hang
    episodes = play(dataset, Scripted(TOKENIZER, ["1", "10", "4"]), 3)
    assert rewards(episodes) == pytest.approx([0.0, 1.0, 1 / 3])
    assert all(len(episode.turns) == 1 for episode in episodes)
    assert all(RUBRIC in asked and "reference answer" in asked for asked in server.asked)


def test_a_judge_that_is_down_for_a_while_is_waited_for(
    server: ScriptedJudge, prompts: str
) -> None:
    dataset = judged(server)(prompts, setting(TOKENIZER))
    replies: list[str | int] = [*[503] * 10, "Score: 10"]
    server.script = lambda text, given: replies.pop(0)
    assert rewards(play(dataset, Scripted(TOKENIZER, ["1"]), 1)) == [1.0]


def test_the_judge_sees_the_conversation_of_a_chat(server: ScriptedJudge, prompts: str) -> None:
    seen: list[dict[str, str]] = []
    server.script = lambda text, given: seen.append(given) or "Score: 1"
    dataset = judged(server, system="Be brief")(prompts, setting(TOKENIZER))
    seen.clear()
    policy = Scripted(TOKENIZER, ["<think>9, or 8?</think>\n\n7"])
    play(dataset, policy, 1, problem=1)
    question = "[system]\nBe brief\n\n[user]\nHi\n\n[assistant]\nHi.\n\n[user]\nAnother"
    assert seen == [{"question": question, "answer": "7"}]
    assert "Be brief" in policy.seen[0]


def test_thinking_without_an_answer_earns_nothing(server: ScriptedJudge, prompts: str) -> None:
    dataset = judged(server)(prompts, setting(TOKENIZER))
    server.bodies.clear()
    assert rewards(play(dataset, Scripted(TOKENIZER, ["<think>9", ""]), 2)) == [0.0, 0.0]
    assert not server.bodies


def test_all_pairs_are_compared(server: ScriptedJudge, prompts: str) -> None:
    dataset = judged(server, mode="pairs")(prompts, setting(TOKENIZER))
    server.bodies.clear()
    episodes = play(dataset, Scripted(TOKENIZER, ["3", "1", "8", "3"]), 4)
    assert rewards(episodes) == pytest.approx([0.5, 0.0, 1.0, 0.5])
    assert len(server.bodies) == 2 * 5, "two that say the same are no question"


def test_some_pairs_are_compared(server: ScriptedJudge, prompts: str) -> None:
    dataset = judged(server, mode="pairs", max_pairs=6)(prompts, setting(TOKENIZER))
    server.bodies.clear()
    replies = ["1", "2", "3", "4", "5", "6"]
    episodes = play(dataset, Scripted(TOKENIZER, replies), 6)
    assert len(server.bodies) == 2 * 6
    assert rewards(episodes)[0] == 0.0 and rewards(episodes)[5] == 1.0
    assert set(rewards(episodes)) <= {0.0, 0.5, 1.0}, "each is in two pairs"
    assert rewards(play(dataset, Scripted(TOKENIZER, replies), 6)) == rewards(episodes)


@pytest.mark.parametrize("group_size", range(2, 10))
def test_pairs_are_balanced(group_size: int) -> None:
    every = group_size * (group_size - 1) // 2
    least = group_size // 2 if group_size % 2 == 0 else group_size
    for max_pairs in (None, *range(min(least, every), every + 2)):
        pairs = balanced_pairs(group_size, max_pairs, seed=3)
        assert pairs == balanced_pairs(group_size, max_pairs, seed=3)
        assert len({frozenset(pair) for pair in pairs}) == len(pairs)
        assert all(a != b for a, b in pairs)
        counts = Counter(member for pair in pairs for member in pair)
        assert len(counts) == group_size and len(set(counts.values())) == 1
        wanted = every if max_pairs is None else min(max_pairs, every)
        assert wanted - group_size < len(pairs) <= wanted


def test_a_judge_without_a_verdict_fails_the_group(server: ScriptedJudge, prompts: str) -> None:
    right = server.script
    for mode in ("score", "pairs"):
        server.script = right
        dataset = judged(server, mode=mode)(prompts, setting(TOKENIZER))
        server.script = lambda text, given: "Nice!"
        with refuses(ConfigError, "env.judge_url"):
            judged(server, mode=mode)(prompts, setting(TOKENIZER))
        with pytest.raises(DataError):
            play(dataset, Scripted(TOKENIZER, ["1", "2"]), 2)


def test_evaluations_score(server: ScriptedJudge, prompts: str) -> None:
    config = judged(server, mode="pairs", max_pairs=4).evaluation()
    assert isinstance(config, Judged) and config.evaluation() is config
    dataset = config(prompts, setting(TOKENIZER))
    assert rewards(play(dataset, Scripted(TOKENIZER, ["10"]), 1)) == [1.0]
    alone = judged(server, mode="pairs")(prompts, setting(TOKENIZER))
    with refuses(ConfigError, "env.mode"):
        play(alone, Scripted(TOKENIZER, ["10"]), 1)


def test_the_rubric_may_stand_in_a_file(
    server: ScriptedJudge, prompts: str, tmp_path: Path
) -> None:
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("Even numbers are good: {really}.\n")
    play(
        judged(server, rubric=f"@{rubric}")(prompts, setting(TOKENIZER)),
        Scripted(TOKENIZER, ["2"]), 1,
    )  # fmt: skip
    assert "Even numbers are good: {really}." in server.asked[0]
    rubric.write_bytes(b"\xff")
    with refuses(ConfigError, "env.rubric"):
        judged(server, rubric=f"@{rubric}")(prompts, setting(TOKENIZER))
    rubric.write_text(" ")
    with refuses(ConfigError, "env.rubric"):
        judged(server, rubric=f"@{rubric}")(prompts, setting(TOKENIZER))


def test_groups_that_cannot_be_compared() -> None:
    given: dict[str, Any] = {"judge_url": "http://host", "judge_model": MODEL, "rubric": RUBRIC}
    Judged(**given).check_group(1)
    with refuses(ConfigError, "sampling.group_size"):
        Judged(**given, mode="pairs").check_group(1)
    few = Judged(**given, mode="pairs", max_pairs=3)
    for group_size in (2, 3, 6):
        few.check_group(group_size)
    for group_size in (5, 8):
        with refuses(ConfigError, "env.max_pairs"):
            few.check_group(group_size)
