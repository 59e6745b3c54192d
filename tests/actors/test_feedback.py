"""`{feedback}` of the built-in environments describes the episode that the teacher scores."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from actors.rollout.episode import rollout_group
from distill.data.feedback import FeedbackTemplate
from distill.envs.base import EnvConfig, EnvContext
from distill.envs.games.tic_tac_toe import TicTacToeGames
from distill.envs.reading import Reading
from distill.envs.single_turn import SingleTurn
from distill.envs.tool_use import ToolUse
from distill.errors import DataError
from distill.rewards.registry import contains, last_number
from distill.rewards.unit_tests import unit_tests
from distill.sampling import TrainSampling
from tests.distill.test_two_player import first_free
from tests.refusals import refuses
from tests.rows import write_rows
from tests.samples import TEMPERATURE
from tests.scripted import Script, Scripted, call, chat_tokenizer, setting

TOKENIZER = chat_tokenizer()

SAMPLING = TrainSampling(temperature=TEMPERATURE, max_new_tokens=48)
TOLD = FeedbackTemplate(text="<{feedback}>{prompt}", correct_reward_threshold=1.0)


def contexts(
    env: EnvConfig, path: str | None, room: EnvContext, script: Script | Sequence[str]
) -> list[str]:
    """Teacher context of each member's first response, as text."""
    builder, policy = env(path, room).builder(0, 2), Scripted(TOKENIZER, script)
    group = asyncio.run(rollout_group(policy, builder, SAMPLING, group_id=0, seed=0))
    firsts = [trajectory.segments[0].teacher_context_T for trajectory in group.trajectories_G]
    assert all(first_T is not None for first_T in firsts)
    return [str(TOKENIZER.decode(first_T.tolist())) for first_T in firsts if first_T is not None]


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_feedback_on_a_wrong_answer_has_the_right_one(tmp_path: Path) -> None:
    solution = "6*7 is 42\n#### 42"
    messages = [{"role": "user", "content": "What is 6*7?"}]
    path = write_rows(tmp_path / "prompts.jsonl", {"messages": messages, "answer": solution})
    room = setting(TOKENIZER, reward=last_number, feedback=TOLD)
    assert contexts(SingleTurn(), path, room, ["it is 41", "42"]) == [
        user(f"<Wrong. The right answer is: {solution}>What is 6*7?"),
        user("<Right.>What is 6*7?"),
    ]


@pytest.mark.usefixtures("sandbox")
def test_feedback_on_a_program_has_the_failed_test(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "prompts.jsonl",
        {"prompt": "Add!", "answer": "assert f(1) == 2\nassert f(7) == 42"},
    )
    room = setting(TOKENIZER, reward=unit_tests, feedback=TOLD)
    wrong, right = contexts(
        SingleTurn(), path, room, ["def f(x): return x+1", "def f(x): return x*6-(x<2)*4"]
    )
    assert 'File "tests.py", line 2' in wrong and "assert f(7) == 42" in wrong
    assert "AssertionError" in wrong and "program.py" not in wrong
    assert right == "<The tests passed.>Add!"


def test_feedback_has_tool_errors_and_limits_unless_an_answer_is_graded(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "prompts.jsonl", {"prompt": "What is 6*7?", "answer": "42"})
    room = setting(TOKENIZER, reward=last_number, feedback=TOLD, context_length=1024)
    fails = call("calculator", {"expression": "1/0"})

    def script(_turn: int, seen: str) -> str:
        return "42" if "Error" in seen else fails

    judged = contexts(ToolUse(), path, room, script)
    assert all("<Right.>What is 6*7?" in text for text in judged)
    assert all(text.startswith("<|im_start|>system\n# Tools\n") for text in judged)
    cut = contexts(
        ToolUse(max_turns=1), path, room, [fails, call("calculator", {"expression": "6*7"})]
    )
    assert "<Error: " in cut[0] and "division by zero" in cut[0]
    assert all("It was cut off by a limit (turns) before its end.>What is 6*7?" in t for t in cut)
    assert "Error" not in cut[1], "another member's error is told"


def test_feedback_has_the_result_of_the_game_for_each_seat() -> None:
    """The teacher's text replaces that seat's first message."""
    env = TicTacToeGames(random_moves=0, rules=False)
    room = setting(TOKENIZER, feedback=TOLD)
    first, second = contexts(env, None, room, first_free)
    assert first == user("<You won.>X\n...\n...\n...")
    assert second == user("<You lost.>O\nX..\n...\n...")
    blundered = contexts(env, None, room, lambda turn, seen: "1" if turn else first_free(0, seen))
    assert blundered[0].startswith(user("<The other player lost by an illegal move")[:50])
    assert "<You lost by an illegal move: square 1 is taken.>O\nX..\n" in blundered[1]


def test_feedback_on_reading_has_the_answer(tmp_path: Path) -> None:
    row = {"document": "It is red.", "question": "Colour?", "answer": "red"}
    room = setting(TOKENIZER, reward=contains, feedback=TOLD)
    path = write_rows(tmp_path / "prompts.jsonl", row)
    env = Reading(by="keywords", terse=True)
    assert contexts(env, path, room, ["blue", "red"]) == [
        user("<Wrong. It should contain: red>Colour?|It is red.="),
        user("<Right.>Colour?|It is red.="),
    ]


def test_a_template_with_an_answer_is_refused_for_games() -> None:
    template = FeedbackTemplate(text="{answer}{prompt}", correct_reward_threshold=1.0)
    with refuses(DataError, "teacher.feedback"):
        TicTacToeGames()(None, setting(TOKENIZER, feedback=template))
