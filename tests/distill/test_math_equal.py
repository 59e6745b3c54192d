"""Mathematics that is equal, that is not, and that nobody should try to simplify."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from distill.errors import DataError
from distill.rewards import math_equal as maths
from distill.rewards.math_equal import math_answer, math_equal
from distill.rewards.registry import load_reward

ENDLESS = r"so \boxed{9^{9^{9^{9^{9}}}}!}"


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"so it is \boxed{\frac{1}{2}}.", "0.5", 1),
        ("The answer is 1/2.", r"\frac{1}{2}", 1),
        (r"$x^2+2x+1$", "(x+1)^2", 1),
        (r"\boxed{3\sqrt{2}}", r"$\sqrt{18}$", 1),
        (r"\boxed{(1,2)}", r"(1, 2)", 1),
        ("18", "$18$", 1),
        (r"first \boxed{3}, no: \boxed{4}", "4", 1),
        (r"\boxed{\frac{1}{3}}", "0.5", 0),
        ("I do not know", "18", 0),
        ("", "18", 0),
    ],
)
def test_what_is_equal(response: str, answer: str, reward: float) -> None:
    assert math_equal(response, answer) == reward
    assert load_reward("math_equal")(response, answer) == reward


def test_an_answer_that_is_no_mathematics_is_the_data_s_fault() -> None:
    with pytest.raises(DataError, match="the answer '' is no mathematical expression"):
        math_equal("18", "")


def test_the_same_answer_in_other_words_votes_together() -> None:
    assert math_answer(r"so \boxed{\frac{2}{4}}") == math_answer("The answer is $1/2$") == "1/2"
    assert math_answer("none") is None


@pytest.mark.parametrize(("response", "digits"), [(r"\boxed{2^{20000}}", 6021), (r"$2000!$", 5736)])
def test_numbers_of_any_length_vote(response: str, digits: int) -> None:
    answer = math_answer(response)
    assert answer is not None and len(answer) == digits
    assert math_equal(response, response) == 1


def test_what_takes_for_ever_is_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths, "_TIMEOUT_S", 3.0)
    assert math_equal(ENDLESS, "2") == 0
    assert math_equal("2", "2") == 1  # the next one is not kept waiting


def test_code_is_not_mathematics(tmp_path: Path) -> None:
    written = tmp_path / "written"
    code = f"__import__('pathlib').Path('{written}').write_text('x')"
    for response in (code, rf"\boxed{{{code}}}", f"${code}$", f"The answer is {code}"):
        assert math_equal(response, "2") == 0
    assert not written.exists()


def test_the_child_dies_with_the_process_that_asked() -> None:
    program = (
        "from distill.rewards import math_equal as maths\nmaths._TIMEOUT_S = 3600\n"
        f"maths.math_equal({ENDLESS!r}, '2')"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2])
    child = None
    while child is None:
        assert parent.poll() is None
        found = psutil.Process(parent.pid).children(recursive=True)
        busy = [each for each in found if each.cpu_times().user > 1.5]  # it is simplifying
        child = busy[0] if busy else None
    os.kill(parent.pid, 9)
    parent.wait()
    _, alive = psutil.wait_procs([child], timeout=60)
    assert not alive
