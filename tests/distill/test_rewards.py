"""Built-in rewards by value; custom ones by name, checked for finite numbers."""

import asyncio
import pickle
import sys
from pathlib import Path

import pytest

from distill.errors import ConfigError, DataError
from distill.rewards.registry import (
    answer_of,
    contains,
    exact_match,
    judge,
    last_number,
    load_reward,
    verdict,
)
from distill.rewards.verdict import Verdict
from tests.refusals import refuses
from tests.scripted import load_function

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
def test_any_exception_of_a_reward_is_an_error_of_the_reward(
    user_module: str, answer: str, error: str
) -> None:
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
