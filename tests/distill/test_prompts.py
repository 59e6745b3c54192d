"""Prompt files are read or refused by line; the order of prompts is seeded and resumable."""

import asyncio
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.data.order import PromptStream
from distill.data.prompts import ChatStyle, Prompt, PromptContext, load_prompts
from distill.data.row_conversion import TooLong
from distill.envs.base import EnvStream
from distill.envs.single_turn import PromptDataset, SingleTurnGroupBuilder
from distill.errors import DataError
from distill.rewards.formats import Format
from distill.rewards.registry import contains
from distill.rewards.token_rewards import phrase_bonuses
from distill.tokenizer import load_tokenizer
from tests.refusals import refuses
from tests.samples import ids, sample
from tests.tiny import VOCAB_SIZE, save_tokenizer

GOOD = '{"prompt": "2 + 2 =", "answer": 4}'
CHAT = '{"messages": [{"role": "user", "content": "hi"}]}'
LIMITS: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "context_length": 128, "max_new_tokens": 8}


@pytest.fixture
def load(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    def load_lines(
        *lines: str, tokenizer: PreTrainedTokenizerBase = tokenizer, **changes: Any
    ) -> list[Prompt]:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(lines))
        chat = changes.pop("chat", None)
        return load_prompts(str(path), PromptContext(tokenizer=tokenizer, **LIMITS | changes), chat)

    return load_lines


def test_text_chat_answers_and_blank_lines(load, tokenizer: PreTrainedTokenizerBase) -> None:
    text, chat = load(GOOD, "", CHAT, "  ")
    assert tokenizer.decode(text.tokens_T.tolist()) == "2 + 2 ="
    assert tokenizer.decode(chat.tokens_T.tolist()) == "u:hi\na:"
    assert (text.answer, text.line) == ("4", 1)
    assert (chat.answer, chat.line) == (None, 3)
    assert text.tokens_T.dtype == np.int32


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ('{"prompt": "a"', None),
        ('{"text": "a"}', None),
        ('{"prompt": "a", "messages": []}', None),
        ('{"prompt": ""}', "prompt"),
        ('{"prompt": 3}', "prompt"),
        ('{"messages": []}', "messages"),
        ('{"messages": "hi"}', "messages"),
        ('{"messages": ["hi"]}', "messages[0]"),
        ('{"messages": [{"content": "hi"}]}', "messages[0]"),
        ('{"messages": [{"role": "human", "content": "hi"}]}', "messages[0].role"),
        ('{"messages": [{"role": "User", "content": "hi"}]}', "messages[0].role"),
        (json.dumps({"prompt": json.dumps([{"from": "human", "value": "hi"}])}), "messages[0]"),
        (json.dumps({"prompt": "x" * 121}), "sampling.max_new_tokens"),
        (r'{"prompt": "\ud800"}', None),
        ('{"prompt": "a", "answer": [4]}', "answer"),
        ('{"prompt": "a", "answer": NaN}', "answer"),
        ('{"prompt": "a", "answer": 1e999}', "answer"),
        ('{"prompt": "a", "answer": true}', "answer"),
        ('{"prompt": "a", "teacher": 1}', "teacher"),
        ('{"prompt": "a", "tag": ["x"]}', "tag"),
        ('{"prompt": "a", "teacher_prompt": ""}', "teacher_prompt"),
        ('{"prompt": "a", "teacher_messages": "b"}', "teacher_messages"),
        ('{"prompt": "a", "teacher_prompt": "b", "teacher_messages": [{}]}', None),
        ('{"prompt": "a", "bonuses": ["so"]}', "bonuses"),
        ('{"prompt": "a", "bonuses": {"": 1}}', "bonuses"),
        ('{"prompt": "a", "bonuses": {"so": "1"}}', "bonuses"),
        ('{"prompt": "a", "bonuses": {"so": NaN}}', "bonuses"),
        ('{"prompt": "a", "bonuses": {"so": 1%s}}' % ("0" * 400), "bonuses"),
        ('{"prompt": "a", "bonuses": {"so": true}}', "bonuses"),
    ],
)
def test_a_bad_line_is_named(load, bad: str, field: str | None) -> None:
    with refuses(DataError, field, names="prompts.jsonl:3:"):
        load(GOOD, CHAT, bad)


def test_ids_outside_the_model_are_refused(load) -> None:
    with refuses(DataError, None, names=":2:"):
        load('{"prompt": "0"}', '{"prompt": "Z"}', vocab_size=50)


def test_a_template_that_refuses_is_quoted(load, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, chat_template="{{ raise_exception('no system role') }}")
    with refuses(DataError, "model.chat_template", names="no system role"):
        load(CHAT, tokenizer=load_tokenizer(str(tmp_path)))


def test_a_character_that_the_tokenizer_lacks_is_refused(load, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, alphabet="ab", unk_token=None)
    with refuses(DataError, None, names=":2:"):
        load('{"prompt": "ab"}', '{"prompt": "abc"}', tokenizer=load_tokenizer(str(tmp_path)))


def test_half_of_a_character_is_named(load) -> None:
    with refuses(DataError, None, names=":2:") as caught:
        load('{"prompt": "ab"}', r'{"prompt": "so \ud83c"}')
    assert caught.value.value == "\ud83c"


def test_optional_fields(load, tokenizer: PreTrainedTokenizerBase) -> None:
    plain, full = load(
        GOOD,
        json.dumps(
            {
                "prompt": "2 + 2 =", "answer": 4.5, "tag": "sums", "teacher_prompt": "(4) 2 + 2 =",
                "bonuses": {"so": 1, "hm": -0.5},
            }
        ),
    )  # fmt: skip
    assert (plain.teacher, plain.tag, plain.teacher_tokens_T, plain.bonuses) == ("", None, None, {})
    assert (full.answer, full.tag, full.bonuses) == ("4.5", "sums", {"so": 1.0, "hm": -0.5})
    assert tokenizer.decode(full.tokens_T.tolist()) == "2 + 2 ="
    assert tokenizer.decode(full.teacher_tokens_T.tolist()) == "(4) 2 + 2 ="


def test_the_teacher_may_see_a_chat(load, tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"prompt": "hi", "teacher_messages": [{"role": "user", "content": "hint"}]}
    [prompt] = load(json.dumps(row))
    assert tokenizer.decode(prompt.teacher_tokens_T.tolist()) == "u:hint\na:"


def test_tools_reach_the_template(load, tmp_path: Path) -> None:
    template = "{{ tools[0].name }}{% for m in messages %}:{{ m.content }}{% endfor %}"
    save_tokenizer(tmp_path, chat_template=template)
    tokenizer = load_tokenizer(str(tmp_path))
    [prompt] = load(CHAT[:-1] + ', "tools": [{"name": "add"}]}', tokenizer=tokenizer)
    assert str(tokenizer.decode(prompt.tokens_T.tolist())).startswith("add:")


def test_a_begun_answer_is_continued_and_reported(
    load, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    [prompt, _] = load(json.dumps({"messages": begun}), json.dumps({"prompt": "a"}))
    assert tokenizer.decode(prompt.tokens_T.tolist()) == "u:hi\na:ho"
    assert "1 of 2" in caplog.text
    with pytest.raises(DataError):
        load(json.dumps({"messages": begun}), chat=ChatStyle())


def named(teacher: str | None) -> str:
    return json.dumps({"prompt": "a"} | ({"teacher": teacher} if teacher else {}))


@pytest.mark.parametrize(
    ("teachers", "named_in_rows", "expected"),
    [
        (("code", "maths"), ["maths", "code"], ["maths", "code"]),
        (("maths",), ["maths", None], ["maths", "maths"]),
        ((), ["anyone", None], ["", ""]),
    ],
)
def test_rows_name_their_teacher(
    load, teachers: tuple[str, ...], named_in_rows: list, expected: list[str]
) -> None:
    prompts = load(*map(named, named_in_rows), teachers=teachers)
    assert [prompt.teacher for prompt in prompts] == expected


@pytest.mark.parametrize(
    ("teachers", "teacher"),
    [
        (("code", "maths"), "math"),
        (("code", "maths"), "zzz"),
        (("code", "maths"), None),
        (("maths",), "code"),
    ],
)
def test_unknown_teachers_are_refused(load, teachers: tuple[str, ...], teacher: str | None) -> None:
    with refuses(DataError, "teacher", names="prompts.jsonl:2:"):
        load(named("maths"), named(teacher), teachers=teachers)


def test_the_teacher_s_prompt_must_fit_its_context(load) -> None:
    row = json.dumps({"prompt": "a", "teacher_prompt": "x" * 30})
    for context in (None, 38):
        assert len(load(row, teacher_context_length=context)) == 1
    with refuses(TooLong, "sampling.max_new_tokens", names=":1:"):
        load(row, teacher_context_length=37)
    with refuses(TooLong, "sampling.max_new_tokens", names=":1:"):
        load(json.dumps({"prompt": "x" * 30}), teacher_context_length=37)
    longer = json.dumps({"prompt": "x" * 30, "teacher_prompt": "a"})
    assert len(load(longer, teacher_context_length=9)) == 1


@given(size=st.integers(1, 30), seed=st.integers(0, 2**31), epochs=st.integers(1, 4))
def test_every_epoch_is_a_permutation(size: int, seed: int, epochs: int) -> None:
    stream = PromptStream(size, seed)
    order = [stream.index(position) for position in range(epochs * size)]
    for epoch in range(epochs):
        assert sorted(order[epoch * size : (epoch + 1) * size]) == list(range(size))
    # a resumed run asks from the middle, workers out of order: the answer is the same
    resumed = PromptStream(size, seed)
    backwards = [resumed.index(position) for position in reversed(range(epochs * size))]
    assert backwards[::-1] == order


async def _rewards(builder: SingleTurnGroupBuilder, tokens: list[int]) -> list[float]:
    results = [await env.step(sample(*tokens)) for env in builder.make_envs({})]
    assert all(result.observation_T is None for result in results)
    return [result.reward for result in results]


def test_reward_and_facts_reach_the_environments(tokenizer: PreTrainedTokenizerBase) -> None:
    """Also after the dataset was pickled."""
    prompt = Prompt(
        tokens_T=ids(3), answer="4", line=1, teacher="maths", tag="sums",
        teacher_tokens_T=ids(5, 6), bonuses={"so": 1.0},
    )  # fmt: skip
    problems = PromptDataset([prompt], tokenizer, reward=contains)
    stream = pickle.loads(pickle.dumps(EnvStream(problems, group_size=2, seed=0)))
    builder = stream.builder(7)
    assert (builder.teacher, builder.tag) == ("maths", "sums")
    assert builder.teacher_tokens_T is not None and builder.teacher_tokens_T.tolist() == [5, 6]
    response = tokenizer("so 4!")["input_ids"]
    assert asyncio.run(_rewards(builder, response)) == [1.0, 1.0]
    result = asyncio.run(builder.make_envs({})[0].step(sample(*response)))
    assert result.bonuses_T.tolist() == [0.5, 0.5, 0, 0, 0]


def test_a_pickled_subset_has_no_other_problems(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = [
        Prompt(tokens_T=ids(3 + i), answer=f"answer-{i}", line=i + 1, tag=f"tag-{i}")
        for i in range(4)
    ]
    sent = pickle.dumps(PromptDataset(prompts, tokenizer).subset([3, 1]))
    assert b"answer-3" in sent and b"answer-0" not in sent and b"answer-2" not in sent
    arrived = pickle.loads(sent)
    builders = [arrived.builder(p, 1) for p in range(len(arrived))]
    assert [builder.answer for builder in builders] == ["answer-3", "answer-1"]
    assert [arrived.label(p) for p in range(len(arrived))] == ["4", "2"]


@pytest.mark.parametrize(("response", "has"), [("so 4!", 1.0), ("4, so", 0.0)])
def test_a_format_is_counted_and_pays_beside_the_prompt_s_phrases(
    tokenizer: PreTrainedTokenizerBase, response: str, has: float
) -> None:
    prompt = Prompt(tokens_T=ids(3), answer="4", line=1, bonuses={"so": 1.0})
    shape = Format(pattern=r"so\s+\d!", reward=2.0)
    problems = pickle.loads(pickle.dumps(PromptDataset([prompt], tokenizer, contains, shape)))
    builder = problems.builder(0, 1)
    tokens = [*tokenizer(response)["input_ids"], tokenizer.eos_token_id]
    result = asyncio.run(builder.make_envs({})[0].step(sample(*tokens)))
    assert builder.pays_bonuses and result.metrics == {"format": has} and result.reward == 1.0
    phrase_T = phrase_bonuses(np.array(tokens), tokenizer, {"so": 1.0})
    assert result.bonuses_T.tolist() == pytest.approx(phrase_T + 2.0 * has / len(tokens))


# Only against hangs.
DEADLINE_S = 60.0


def test_rewards_are_computed_one_by_one_beside_others(tokenizer: PreTrainedTokenizerBase) -> None:
    begun, may_end = threading.Semaphore(0), threading.Semaphore(0)
    at_work, at_once = 0, []

    def reward(_response: str, _answer: str) -> float:
        nonlocal at_work
        at_work += 1
        at_once.append(at_work)
        begun.release()
        assert may_end.acquire(timeout=DEADLINE_S)
        at_work -= 1
        return 1.0

    prompt = Prompt(tokens_T=np.array([3], np.int32), answer="4", line=1)
    builder = SingleTurnGroupBuilder(
        prompt=prompt, tokenizer=tokenizer, group_size=3, reward=reward
    )

    async def judge() -> list[float]:
        steps = [asyncio.create_task(env.step(sample(5))) for env in builder.make_envs({})]
        for _ in steps:  # the event loop goes on while a reward blocks
            while not begun.acquire(blocking=False):
                await asyncio.sleep(0.01)
            may_end.release()
        return [result.reward for result in await asyncio.gather(*steps)]

    assert asyncio.run(asyncio.wait_for(judge(), DEADLINE_S)) == [1.0] * 3
    assert at_once == [1, 1, 1]
