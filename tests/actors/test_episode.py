"""A group's rollout on a scripted engine: turns, rewards, metadata and `{feedback}`."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from actors.rollout.episode import EpisodesFailed, rollout_group
from distill.chat.template import Message, render_messages
from distill.data.feedback import FeedbackContext, FeedbackTemplate, Outcome
from distill.data.prompts import PromptContext
from distill.engine import GenerateRequest, Sample, SamplingModel
from distill.envs.base import Env, EnvConfig, EnvContext, EnvGroupBuilder, Episode, StepResult
from distill.envs.games.tic_tac_toe import TicTacToeGames
from distill.envs.reading import Reading
from distill.envs.single_turn import SingleTurn
from distill.envs.tool_use import ToolUse
from distill.errors import DataError
from distill.rewards.length import LengthRules
from distill.rewards.registry import contains, last_number
from distill.rewards.unit_tests import unit_tests
from distill.sampling import TrainSampling
from distill.types import Segment, StopReason, TokenArray, TrajectoryGroup
from tests.distill.test_two_player import first_free
from tests.refusals import refuses
from tests.rows import write_rows
from tests.samples import TEMPERATURE, ids, sample
from tests.scripted import Script, Scripted, call, chat_tokenizer, setting

SAMPLING = TrainSampling(temperature=TEMPERATURE, max_new_tokens=8)


class CountingEngine:
    """Answer (40 + request, 50 + member) and record the requests."""

    def __init__(self, stop_reason: StopReason = StopReason.EOS) -> None:
        self.requests: list[GenerateRequest] = []
        self._stop_reason = stop_reason

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        self.requests.append(request)
        return [
            replace(sample(39 + len(self.requests), 50 + g), stop_reason=self._stop_reason)
            for g in range(request.num_samples)
        ]


@dataclass
class ScriptedEnv(Env):
    """Show `observations` in turn and pay 1 per turn, with scripted bonuses."""

    observations: list[TokenArray]
    bonuses: list[list[float] | None] = field(default_factory=list)
    turn: int = 0

    async def initial_observation(self) -> TokenArray:
        return self.observations[0]

    async def step(self, sample: Sample) -> StepResult:
        self.turn += 1
        ended = self.turn == len(self.observations)
        bonuses = self.bonuses[self.turn - 1] if self.bonuses else None
        return StepResult(
            reward=1.0,
            observation_T=None if ended else self.observations[self.turn],
            bonuses_T=None if bonuses is None else np.array(bonuses, np.float32),
            metrics={"turns": self.turn},
        )


@dataclass(frozen=True, kw_only=True)
class ScriptedBuilder(EnvGroupBuilder):
    envs: Sequence[Env]

    def make_envs(self, models: Mapping[str, SamplingModel]) -> Sequence[Env]:
        return self.envs


def rollout(
    builder: ScriptedBuilder,
    engine: CountingEngine | None = None,
    lengths: LengthRules | None = None,
) -> TrajectoryGroup:
    policy = engine or CountingEngine()
    return asyncio.run(
        rollout_group(policy, builder, SAMPLING, group_id=3, seed=0, lengths=lengths)
    )


def test_members_with_one_prompt_are_one_request() -> None:
    engine = CountingEngine()
    builder = ScriptedBuilder(envs=[ScriptedEnv([ids(n)]) for n in (5, 6, 5)])
    group = rollout(builder, engine)
    asked = [(r.prompt_tokens_T.tolist(), r.num_samples) for r in engine.requests]
    assert asked == [([5], 2), ([6], 1)]
    assert [made.tokens_T.tolist() for made in group.segments()] == [
        [5, 40, 50], [6, 41, 50], [5, 40, 51],
    ]  # fmt: skip
    assert group.group_id == 3 and group.temperature == TEMPERATURE


class Turnless(Env):
    """A game that the other player ends before our first turn."""

    async def initial_observation(self) -> None:
        return None

    async def step(self, sample: Sample) -> StepResult:
        raise AssertionError


def test_members_without_a_turn_are_left_out() -> None:
    group = rollout(ScriptedBuilder(envs=[Turnless(), ScriptedEnv([ids(5)])]))
    assert len(group.trajectories_G) == 1
    with pytest.raises(EpisodesFailed):
        rollout(ScriptedBuilder(envs=[Turnless(), Turnless()]))


def test_rewards_add_up_over_the_turns() -> None:
    builder = ScriptedBuilder(envs=[ScriptedEnv([ids(5), ids(5, 40, 50, 6), ids(9)])])
    [trajectory] = rollout(builder).trajectories_G
    assert trajectory.reward == 3.0 and trajectory.metrics == {"turns": 3}
    assert [made.tokens_T.tolist() for made in trajectory.segments] == [
        [5, 40, 50, 6, 41, 50],
        [9, 42, 50],
    ]


def test_requests_have_the_length_of_the_known_prefix() -> None:
    """`known` covers the previous turn without its last token; 0 if it is no prefix."""
    engine = CountingEngine()
    observations = [ids(5, 2), ids(5, 2, 40, 50, 6), ids(5, 2, 40, 50, 6, 41, 50), ids(9)]
    rollout(ScriptedBuilder(envs=[ScriptedEnv(observations)]), engine)
    assert [request.known for request in engine.requests] == [0, 3, 6, 0]


def test_the_group_has_its_builder_s_teacher_and_tag() -> None:
    group = rollout(ScriptedBuilder(envs=[ScriptedEnv([ids(5)])], teacher="maths", tag="sums"))
    assert (group.teacher, group.tag) == ("maths", "sums")
    plain = rollout(ScriptedBuilder(envs=[ScriptedEnv([ids(5)])]))
    assert (plain.teacher, plain.tag) == ("", None)


def test_the_privileged_context_is_on_every_member_s_segments_of_its_own_prompt() -> None:
    """Only the second member's second segment continues its prompt."""
    envs = [ScriptedEnv([ids(5), ids(9)]), ScriptedEnv([ids(6, 5), ids(6, 5, 1)])]
    group = rollout(ScriptedBuilder(envs=envs, teacher_tokens_T=ids(7, 8)))
    contexts = [
        [None if s.teacher_context_T is None else s.teacher_context_T.tolist() for s in t.segments]
        for t in group.trajectories_G
    ]
    assert contexts == [[[7, 8], None], [[7, 8], [7, 8]]]
    assert [[s.teacher_replaces for s in t.segments] for t in group.trajectories_G] == [
        [1, 0],
        [2, 2],
    ]
    assert group.metrics == {"opd/unhinted_segments": 0.25}
    plain = rollout(ScriptedBuilder(envs=[ScriptedEnv([ids(5)])]))
    assert plain.metrics == {}


def feedback_on(
    template: FeedbackTemplate,
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    room: int,
    **given: Any,
) -> FeedbackContext:
    """Feedback of a run whose turns have at most two tokens."""
    context = PromptContext(
        tokenizer=tokenizer, vocab_size=len(tokenizer), context_length=room, max_new_tokens=2,
        feedback=template,
    )  # fmt: skip
    made = context.feedback_on(messages, teacher="", per_episode=False, **given)
    assert made is not None
    return made


def test_feedback_has_the_result_of_each_member(tokenizer: PreTrainedTokenizerBase) -> None:
    """Feedback has the whole reward with the group's comparison, response and last feedback.

    Without room for the response, the teacher sees what the policy saw.
    """

    class Says(ScriptedEnv):
        async def step(self, sample: Sample) -> StepResult:
            made = await super().step(sample)
            return replace(made, feedback="turn 1" if self.turn == 1 else "")

    class Ranked(ScriptedBuilder):
        async def group_rewards(
            self, envs_G: Sequence[Env], episodes_G: Sequence[Episode]
        ) -> Sequence[float]:
            return [0.0, 10.0]

    text = "{reward}{outcome}{answer}({response})[{feedback}]{prompt}"
    template = FeedbackTemplate(text=text, correct_reward_threshold=11.0)
    feedback = feedback_on(template, tokenizer, [], text="P", answer="A", room=60)
    envs = [Says([ids(5)]), Says([ids(5), ids(5, 40, 51, 6)])]
    ended: list[Sequence[Segment]] = []
    builder = Ranked(envs=envs, feedback=feedback)
    group = asyncio.run(
        rollout_group(CountingEngine(), builder, SAMPLING, group_id=3, seed=0, ended=ended.append)
    )
    contexts = [s.teacher_context_T for s in group.segments() if s.teacher_context_T is not None]
    samples = [
        [s.tokens_T[s.action_mask_T].tolist() for s in t.segments] for t in group.trajectories_G
    ]
    one = tokenizer.decode(samples[0][0][:1])  # without the token that ended the turn
    other = f"{tokenizer.decode(samples[1][0][:1])}\n{tokenizer.decode(samples[1][0][2:3])}"
    assert [tokenizer.decode(context_T.tolist()) for context_T in contexts] == [
        f"1wrongA({one})[turn 1]P",
        f"12rightA({other})[turn 1]P",
    ]
    assert [list(segments) for segments in ended] == [
        list(t.segments) for t in group.trajectories_G
    ]
    assert group.metrics == {"opd/unhinted_segments": 0.0}
    tight = replace(feedback, room=len(contexts[0]) + 2)
    envs = [Says([ids(5)]), Says([ids(5), ids(5, 40, 51, 6)])]
    group = rollout(Ranked(envs=envs, feedback=tight))
    assert [s.teacher_context_T is None for s in group.segments()] == [False, True]
    assert group.metrics == {"opd/unhinted_segments": 0.5}


def test_feedback_of_a_chat_replaces_the_last_user_message() -> None:
    tokenizer = chat_tokenizer()
    chat = [
        {"role": "system", "content": "S"}, {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"}, {"role": "user", "content": "Q"},
    ]  # fmt: skip
    template = FeedbackTemplate(text="{{{prompt}}} {outcome}", correct_reward_threshold=1.0)
    made = feedback_on(template, tokenizer, chat, room=200)
    shown = [*chat[:3], {"role": "user", "content": "{Q} right"}]
    expected_T = render_messages(tokenizer, shown)
    assert made.tokens_T(Outcome(reward=1.0)).tolist() == expected_T.tolist()
    with refuses(DataError, "teacher.feedback"):
        feedback_on(template, tokenizer, chat[:1], room=200)


def test_a_group_is_rewarded_by_comparison_and_closes_its_environments() -> None:
    closed = []

    class Closes(ScriptedEnv):
        async def close(self) -> None:
            closed.append(self)

    class Ranked(ScriptedBuilder):
        async def group_rewards(
            self, envs_G: Sequence[Env], episodes_G: Sequence[Episode]
        ) -> Sequence[float]:
            assert list(envs_G) == self.envs
            return [float(len(episode.turns)) * 10 for episode in episodes_G]

    envs = [Closes([ids(5)]), Closes([ids(5), ids(9)])]
    group = rollout(Ranked(envs=envs))
    assert [trajectory.reward for trajectory in group.trajectories_G] == [11.0, 22.0]
    assert closed == envs


@pytest.mark.parametrize(
    ("field", "value"),
    [("reward", math.nan), ("reward", 1e308), ("size", math.inf), ("size", -1e308)],
)
def test_numbers_that_no_mean_can_hold_are_data(field: str, value: float) -> None:
    class Loud(ScriptedEnv):
        async def step(self, sample: Sample) -> StepResult:
            given = {"reward": 0.0, "size": 0.0} | {field: value}
            return StepResult(reward=given["reward"], metrics={"size": given["size"]})

    with refuses(DataError, field):
        rollout(ScriptedBuilder(envs=[Loud([ids(5)])]))


def test_numbers_of_any_library_become_plain_ones() -> None:
    class Counts(ScriptedEnv):
        async def step(self, sample: Sample) -> StepResult:
            one: Any = np.float32(1)
            return StepResult(reward=one, metrics={"size": one + one, "won": True})

    [made] = rollout(ScriptedBuilder(envs=[Counts([ids(5)])])).trajectories_G
    numbers = [made.reward, *made.metrics.values()]
    assert numbers == [1.0, 2.0, 1.0] and {type(each) for each in numbers} == {float}


def test_environments_are_closed_when_one_fails() -> None:
    closed = []

    class Fails(ScriptedEnv):
        async def step(self, sample: Sample) -> StepResult:
            raise RuntimeError("broken")

        async def close(self) -> None:
            closed.append(self)

    with pytest.raises(RuntimeError):
        rollout(ScriptedBuilder(envs=[Fails([ids(5)]), Fails([ids(6)])]))
    assert len(closed) == 2


def test_environments_may_ask_the_models_of_the_run() -> None:
    given: dict[str, SamplingModel] = {}

    class Asks(ScriptedBuilder):
        def make_envs(self, models: Mapping[str, SamplingModel]) -> Sequence[Env]:
            given.update(models)
            return self.envs

    policy, teacher = CountingEngine(), CountingEngine()
    asyncio.run(
        rollout_group(
            policy, Asks(envs=[ScriptedEnv([ids(5)])]), SAMPLING, group_id=3, seed=0,
            models={"maths": teacher},
        )
    )  # fmt: skip
    assert given == {"maths": teacher, "policy": policy}


@pytest.mark.parametrize("stop", [StopReason.EOS, StopReason.LENGTH])
def test_long_turns_cost_and_truncated_ones_do_not_count(stop: StopReason) -> None:
    """Every turn has two tokens."""
    rules = LengthRules(max_new_tokens=5, mask_truncated=True, overlong_buffer=4)
    builder = ScriptedBuilder(envs=[ScriptedEnv([ids(5), ids(5, 40, 50, 6)])])
    [made] = rollout(builder, CountingEngine(stop), rules).trajectories_G
    assert made.reward == 2 - 1 / 4
    assert made.metrics == {"turns": 2, "overlong": 1 / 4}
    assert made.reward_counts == (stop is StopReason.EOS)


@dataclass
class Inside:
    """Count entries into user code, and record the depth at each step."""

    depth: int = 0
    looks: list[tuple[str, int]] = field(default_factory=list)

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        self.depth += 1
        yield
        self.depth -= 1

    def look(self, where: str) -> None:
        self.looks.append((where, self.depth))


@dataclass(kw_only=True)
class LookingEnv(ScriptedEnv):
    inside: Inside

    async def initial_observation(self) -> TokenArray:
        self.inside.look("observation")
        return await super().initial_observation()

    async def step(self, sample: Sample) -> StepResult:
        self.inside.look("step")
        return await super().step(sample)


@dataclass(frozen=True, kw_only=True)
class LookingBuilder(ScriptedBuilder):
    inside: Inside

    def make_envs(self, models: Mapping[str, SamplingModel]) -> Sequence[Env]:
        self.inside.look("make")
        return self.envs

    async def group_rewards(
        self, envs_G: Sequence[Env], episodes_G: Sequence[Episode]
    ) -> Sequence[float]:
        self.inside.look("reward")
        return [0.0]


def test_user_code_runs_inside_the_context_and_sampling_outside() -> None:
    inside = Inside()

    class LookingEngine(CountingEngine):
        async def generate(self, request: GenerateRequest) -> list[Sample]:
            inside.look("sample")
            return await super().generate(request)

    env = LookingEnv([ids(5), ids(5, 40, 50, 6)], inside=inside)
    made = rollout_group(
        LookingEngine(), LookingBuilder(envs=[env], inside=inside), SAMPLING, group_id=3, seed=0,
        user_code=inside,
    )  # fmt: skip
    asyncio.run(made)
    assert inside.depth == 0
    assert inside.looks == [
        ("make", 1), ("observation", 1), ("sample", 0), ("step", 1), ("sample", 0), ("step", 1),
        ("reward", 1),
    ]  # fmt: skip


TOKENIZER = chat_tokenizer()

FEEDBACK_SAMPLING = TrainSampling(temperature=TEMPERATURE, max_new_tokens=48)
TOLD = FeedbackTemplate(text="<{feedback}>{prompt}", correct_reward_threshold=1.0)


def contexts(
    env: EnvConfig, path: str | None, room: EnvContext, script: Script | Sequence[str]
) -> list[str]:
    """Teacher context of each member's first response, as text."""
    builder, policy = env(path, room).builder(0, 2), Scripted(TOKENIZER, script)
    group = asyncio.run(rollout_group(policy, builder, FEEDBACK_SAMPLING, group_id=0, seed=0))
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
