"""Rewards and answers: values, custom ones by name, formats, and checks before a run."""

import asyncio
import json
import pickle
import socket
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.data.answers import answer_text
from distill.envs.single_turn import SingleTurn
from distill.errors import ConfigError, DataError
from distill.rewards.registry import (
    answer_of,
    check_answers,
    contains,
    exact_match,
    json_schema,
    judge,
    last_number,
    load_reward,
    matches,
    math_equal,
    unit_tests,
    verdict,
)
from distill.rewards.verdict import Verdict
from tests.refusals import refuses
from tests.rows import write_rows
from tests.scripted import load_function, setting

MODULE = """
import dataclasses
import math

LENGTH = 3

def length(response, answer):
    return len(response) - len(answer)

def one(response):
    return 1.0

def right(response, answer):
    return response == answer

@dataclasses.dataclass
class Scaled:
    by: float

    def __call__(self, response, answer):
        return self.by * right(response, answer)

half = Scaled(0.5)

def told(response, answer):
    return len(response), f"not {answer}"

def broken(response, answer):
    return {
        "nan": math.nan, "inf": math.inf, "none": None, "text": "1", "large": -1e308,
        "integer": 10**400, "pair": (1.0, 2.0),
    }[answer]

def hang(response, answer):
    RELEASE.wait()

def exits(response, answer):
    raise {"exit": SystemExit, "interrupt": KeyboardInterrupt, "mine": Mine}[answer](response)

class Mine(Exception):
    def __init__(self, one):
        super().__init__(one, "two")

    __reduce__ = None

import threading
RELEASE = threading.Event()
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "house").mkdir()
    (tmp_path / "house" / "__init__.py").touch()
    (tmp_path / "house" / "rewards_of_mine.py").write_text(MODULE)
    (tmp_path / "house" / "fails.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    return "house.rewards_of_mine"


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [("4", "4", 1), (" 4\n", "4", 1), ("5", "4", 0), ("4.", "4", 0), ("", "4", 0), ("", " ", 1)],
)
def test_exact_match(response: str, answer: str, reward: float) -> None:
    assert exact_match(response, answer) == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("so it is 18.", "18", 1),
        ("18", "16 - 3 - 4 = 9, and 9 * 2 = 18\n#### 18", 1),
        ("first 18, then 19", "18", 0),
        ("$1,234.50", "1234.5", 1),
        ("18.00", "18", 1),
        ("it costs $18...", "18", 1),
        ("so...18", "18", 1),
        ("1,000,000", "1000000", 1),
        ("the list 1,2,3", "3", 1),
        ("1234,567", "567", 1),
        ("-5", "-5", 1),
        ("-5", "5", 0),
        ("-$5", "-5", 1),
        ("$-5", "-5", 1),
        ("\N{MINUS SIGN}5", "-5", 1),
        ("10-5", "5", 1),
        ("(3)-5", "5", 1),
        ("10 - 5 = 5", "5", 1),
        (".5", "0.5", 1),
        (r"\boxed{18}", "18", 1),
        ("18 apples", "18", 1),
        ("0.1", "0.10000000000000001", 0),  # decimals, not floats
        ("none", "18", 0),
        ("", "18", 0),
        ("18", "eighteen", 0),
        ("", "", 0),
    ],
)
def test_last_number(response: str, answer: str, reward: float) -> None:
    assert last_number(response, answer) == reward


def test_custom_functions(user_module: str) -> None:
    assert load_function(f"{user_module}:length")("abc", "a") == 2.0
    right = load_function(f"{user_module}:right")
    assert (right("a", "a"), right("a", "b")) == (1.0, 0.0)
    assert isinstance(right("a", "a"), float)


def test_feedback_of_a_custom_reward_is_in_its_verdict(user_module: str) -> None:
    reward = load_function(f"{user_module}:told")
    assert asyncio.run(verdict(reward, "abc", "a")) == Verdict(reward=3.0, feedback="not a")
    assert asyncio.run(judge(reward, "abc", "a")) == 3.0


def test_a_custom_function_pickles_by_name(user_module: str) -> None:
    reward = load_function(f"{user_module}:length")
    packed = pickle.dumps(reward)
    assert f"{user_module}:length".encode() in packed
    assert pickle.loads(packed)("abc", "a") == 2.0


@pytest.mark.parametrize("answer", ["pair", "nan", "inf", "none", "text", "large", "integer"])
def test_rewards_that_are_no_finite_numbers_are_refused(user_module: str, answer: str) -> None:
    reward = load_function(f"{user_module}:broken")
    with refuses(DataError, "reward"):
        reward("response", answer)


def test_a_late_reward_is_an_error(user_module: str) -> None:
    reward = load_function(f"{user_module}:hang", timeout_s=0.2)
    with refuses(DataError, "reward"):
        asyncio.run(judge(pickle.loads(pickle.dumps(reward)), "response", "the answer"))
    assert asyncio.run(judge(load_function(f"{user_module}:length"), "abc", "a")) == 2.0
    sys.modules[user_module].RELEASE.set()


@pytest.mark.parametrize(
    ("answer", "error"),
    [("exit", "SystemExit"), ("interrupt", "KeyboardInterrupt"), ("mine", "Mine")],
)
def test_any_exception_is_an_error_of_the_reward(user_module: str, answer: str, error: str) -> None:
    reward = load_function(f"{user_module}:exits")
    with refuses(DataError, "reward", names=error) as raised:
        asyncio.run(judge(reward, "half a \ud800", answer))
    assert str(raised.value).encode()  # it goes into files


@pytest.mark.parametrize(
    "name",
    [
        "exact_mach",
        "zzz",
        "house.rewards_of_mine:",
        ":length",
        "nowhere.at.all:f",
        "house.rewards_of_mine:weight",
        "house.fails:f",
        "house.rewards_of_mine:LENGTH",
        "house.rewards_of_mine:one",
        "not a module:f",
    ],
)
def test_names_that_cannot_be_loaded(user_module: str, name: str) -> None:
    with refuses(ConfigError, "reward.function"):
        load_reward(name)


def test_only_built_in_rewards_extract_answers(user_module: str) -> None:
    """A custom one may be an object without a hash."""
    mine = load_function(f"{user_module}:half")
    assert mine("4", "4") == 0.5 and answer_of(mine) is None
    find = answer_of(last_number)
    assert find is not None and find("so 18") == find("18.0")
    assert answer_of(contains) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (72, "72"),
        (72.0, "72"),
        (-0.0, "0"),
        (0.00001, "0.00001"),
        (1e16, "10000000000000000"),
        (3.2e8, "320000000"),
        (2**70, str(2**70)),
        (np.float64(18.5), "18.5"),
        (np.float32(0.1), "0.1"),
        (np.int64(-7), "-7"),
        (Decimal("18.50"), "18.5"),
        (Decimal("1E+3"), "1000"),
        ("1e-05", "1e-05"),
        (" 72.0 ", " 72.0 "),
        (None, None),
    ],
)
def test_numbers_are_written_in_plain_decimals(value: object, text: str | None) -> None:
    assert answer_text(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers())
def test_a_number_keeps_its_value_and_is_read_by_last_number(value: float | int) -> None:
    text = answer_text(value)
    assert text is not None and "e" not in text.lower()
    assert type(value)(text) == value
    assert last_number(f"It is {text}.", text) == 1.0


@pytest.mark.parametrize(
    "value",
    ["", "  \n", float("nan"), float("inf"), Decimal("NaN"), True, np.bool_(True), [72], {"a": 1}],
)
def test_invalid_answers_are_refused(value: object) -> None:
    with refuses(DataError, "answer"):
        answer_text(value)


@pytest.mark.parametrize(
    ("reward", "good", "bad"),
    [
        (last_number, "#### 18", "eighteen"),
        (math_equal, r"\frac12", "$ $"),
        (unit_tests, "assert f(1) == 2", "assert f(1) =="),
        (unit_tests, "assert f(1) == 2", "# none"),
        (matches, r"\d+", "("),
        (json_schema, '{"type": "object"}', "{"),
    ],
)
def test_a_reward_reads_its_answers_before_the_run(reward, good: str, bad: str) -> None:
    check_answers(reward, [("rows:1", good), ("rows:2", None)])
    with refuses(DataError, "answer", names="rows:2:"):
        check_answers(reward, [("rows:1", good), ("rows:2", bad), ("rows:3", bad)])


def test_thousands_of_equal_answers_are_read_once(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "counting_reward.py").write_text(
        "read = []\n"
        "def reward(response, answer):\n    return 0.0\n"
        "def check(answer):\n"
        "    read.append(answer)\n"
        "    if answer == 'bad':\n        raise ValueError('it is bad')\n"
        "reward.check_answer = check\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reward = load_reward("counting_reward:reward")
    check_answers(reward, [(f"rows:{i}", "good") for i in range(5000)])
    with refuses(DataError, "reward", names="rows:7:"):
        check_answers(reward, [("rows:7", "bad")])
    import counting_reward  # pyright: ignore[reportMissingImports] - written above

    assert counting_reward.read == ["good", "bad"]


@pytest.mark.usefixtures("hub_cache")
def test_sampling_for_sft_reads_answers_first(tmp_path: Path, capfd) -> None:
    from cluster.sample_to_sft import main

    path = write_rows(tmp_path / "prompts.jsonl", {"prompt": "a", "answer": "eighteen"})
    arguments = [f"prompts={path}", f"data={tmp_path / 'data.jsonl'}", "model=a/b"]
    assert main([*arguments, "reward=last_number", "temperature=1", "max_new_tokens=4"]) == 2
    assert "prompts.jsonl:1" in "".join("".join(capfd.readouterr()).split())


THINKS = r"<think>.*</think>\s*\d+"
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("response", "pattern", "reward"),
    [
        ("<think>six\ntimes seven</think>\n42\n", THINKS, 1),
        ("<think></think>42", THINKS, 1),
        ("<think>six times seven</think> it is 42", THINKS, 0),
        ("so: <think>six</think> 42", THINKS, 0),
        ("42", THINKS, 0),
        ("", "", 1),
        ("\u4e09\u5341", r"\p{Han}+", 1),
        # All of what Python's own `re` would need for this is more than anyone has.
        ("a" * 60 + "!", r"(a|aa)+(b|c)(d)\1\2|((a*)*)*\?", 0),
    ],
)
def test_matches(response: str, pattern: str, reward: float) -> None:
    assert matches(response, pattern) == reward


async def test_endless_backtracking_blocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemas use Python's `re`, which holds the interpreter lock."""
    monkeypatch.setattr("distill.rewards.formats.CHILD_TIMEOUT_S", 1.0)
    ticks = []

    async def tick() -> None:
        while True:
            ticks.append(await asyncio.sleep(0.01))

    beside = asyncio.create_task(tick())
    earned = await judge(json_schema, json.dumps("a" * 60 + "!"), '{"pattern": "^(a+)+$"}')
    beside.cancel()
    assert earned == 0
    assert len(ticks) > 10
    assert json_schema('"aa"', '{"pattern": "^(a+)+$"}') == 1  # the next one is not kept waiting


def test_remote_schemas_are_refused_and_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"const": 1}')
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        for target in (address, (tmp_path / "schema.json").as_uri(), "#/nowhere", "other.json"):
            for schema in ({"$ref": target}, {"properties": {"x": {"$ref": target}}}):
                with refuses(DataError, "answer"):
                    json_schema("{}", json.dumps(schema))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    with refuses(DataError, "answer"):
        json_schema("1", '{"$ref": "#/const", "const": 1}')


DEEP = 5000


@pytest.mark.parametrize(
    ("response", "schema", "reward"),
    [
        ('{"x": 1}', SCHEMA, 1),
        (' {"x": 1, "y": null}\n', SCHEMA, 1),
        ('{"x": "1"}', SCHEMA, 0),
        ("{}", SCHEMA, 0),
        ('It is {"x": 1}', SCHEMA, 0),
        ("", SCHEMA, 0),
        ("[" * 100_000, SCHEMA, 0),
        ("9" * 10_000, SCHEMA, 0),
        ("1e400", {"multipleOf": 0.1}, 0),
        ("1" + "0" * 400, {"multipleOf": 0.1}, 0),
        ("1" + "0" * 400, {"type": "integer"}, 1),
        ("1" + "0" * 10_000, {}, 0),
        ("NaN", {}, 0),
        ("[-Infinity]", {}, 0),
        ("[" * DEEP + "]" * DEEP, {}, 0),
        ('{"a": ' * DEEP + "1" + "}" * DEEP, {"type": "object"}, 0),
        ('"\\ud800"', {}, 0),
        ('{"a": 1, "a": 2}', {"const": {"a": 2}}, 1),
    ],
)
def test_json_schema(response: str, schema: dict, reward: float) -> None:
    assert json_schema(response, json.dumps(schema)) == reward


@pytest.mark.parametrize(
    "answer",
    [
        '{"minimum": NaN}',
        '{"maximum": 1e400}',
        '{"multipleOf": 1e-400}',
        '{"pattern": "("}',
        '{"properties": {"a": {"pattern": "("}}}',
        '{"patternProperties": {"(": {}}}',
        '{"patternProperties": {"\\\\p{L}": {}}}',
        json.dumps({"pattern": "(" * 3000 + ")" * 3000}),
        '{"not": ' * DEEP + "{}" + "}" * DEEP,
        '{"type": "number of sorts"}',
        "4 or so",
        "[1]",
        "NaN",
    ],
)
def test_every_schema_that_cannot_be_checked_is_refused(answer: str) -> None:
    for response in ("1", '"a"', '{"a": "a"}'):
        with refuses(DataError, "answer"):
            json_schema(response, answer)


@pytest.mark.parametrize(
    "pattern",
    ["(" * 3000 + ")" * 3000, "(" * 3000, "a{99999999999999999999}", "[", r"\p{NoSuchScript}",
     "(?<n>a)(?<1>", "(?P<a>.)(?P=b)", "*", "a" + "{1,2}" * 3],
)  # fmt: skip
def test_every_pattern_is_one_or_refused(pattern: str) -> None:
    try:
        assert matches("no such text", pattern) == 0
    except DataError:
        with refuses(ConfigError, "env.format"):
            SingleTurn(format=pattern)
    else:
        SingleTurn(format=pattern)


def test_answers_are_read_before_a_run(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "4?", "answer": "{}"}\n{"prompt": "4?", "answer": "{"}\n')
    assert len(SingleTurn()(str(path), setting(tokenizer, reward=exact_match))) == 2
    with refuses(DataError, "answer", names="prompts.jsonl:2:"):
        SingleTurn()(str(path), setting(tokenizer, reward=json_schema))
