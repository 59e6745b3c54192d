"""Descriptions of errors have the user's line; kinds of errors group them."""

import json
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distill.data.row_files import located, read_rows
from distill.errors import ConfigError, DataError, described, kind_of
from distill.rewards.registry import load_reward
from distill.text.condense import load_condenser
from distill.tools.load import load_tools
from tests.distill.test_token_rewards import byte_tokenizer


def raised_by(code: str, path: Path) -> Exception:
    path.write_text(code)
    with pytest.raises(Exception) as caught:
        exec(compile(code, str(path), "exec"), {"json": json})
    return caught.value


def test_the_place_of_an_error_is_the_users_line(tmp_path: Path) -> None:
    path = tmp_path / "shop.py"
    error = raised_by("def price(text):\n    return json.loads(text)\n\nprice('x')\n", path)
    assert described(error).startswith("JSONDecodeError: Expecting value")
    assert described(error).endswith(f"({path}:2)")


def test_the_message_of_an_error_of_ours_is_complete() -> None:
    assert described(DataError("row 3 has no prompt; give one")) == "row 3 has no prompt; give one"


def test_a_message_that_no_file_can_hold_is_escaped() -> None:
    assert described(DataError("no number in é\ud83d")) == "no number in é\\ud83d"


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (
            "failed 3 times: KeyError: 'a' (shop.py:3), in problem 7",
            "failed 3 times: KeyError: 'b' (shop.py:3), in problem 8",
            True,
        ),
        ("KeyError: 'a' (shop.py:3)", "KeyError: 'a' (shop.py:4)", False),
        ("KeyError: 'a' (shop.py:3)", "ValueError: a (shop.py:3)", False),
        (
            "reward m:f raised KeyError: 1 (m.py:9) (for the answer '1')",
            "failed 3 times: reward m:f raised KeyError: 2 (m.py:9) (for the answer '2')",
            True,
        ),
        ("2 workers died or hung with it: a", "failed 3 times: b", False),
    ],
)
def test_a_kind_is_an_error_type_and_a_line(first: str, second: str, same: bool) -> None:
    assert (kind_of(first) == kind_of(second)) is same


def test_the_kind_of_a_long_description() -> None:
    text = "a: " * 200_000  # in quadratic time, it would be hours
    assert kind_of(text) == text[:60]
    assert kind_of(f"{text}(m.py:3)") == "a (m.py:3)"


def test_an_error_keeps_its_field_and_value_between_processes() -> None:
    error = ConfigError("lr=0 must be above 0", field="lr", value=0)
    there = pickle.loads(pickle.dumps(error))
    assert (type(there), str(there)) == (ConfigError, "lr=0 must be above 0")
    assert (there.field, there.value) == ("lr", 0)


def test_the_row_of_an_error_leaves_its_field() -> None:
    with pytest.raises(DataError) as caught, located("data.jsonl:3"):
        raise DataError("`answer` is blank", field="answer", value="")
    assert str(caught.value).startswith("data.jsonl:3: ")
    assert (caught.value.field, caught.value.value) == ("answer", "")


BYTES = byte_tokenizer()


@pytest.mark.parametrize(
    ("module", "use", "named"),
    [
        ("math_verify", partial(load_reward, "math_equal"), ("reward=math_equal", "math-verify")),
        ("jsonschema", partial(load_reward, "json_schema"), ("reward=json_schema", "jsonschema")),
        ("simpleeval", partial(load_tools, "calculator"), ("tools=calculator", "simpleeval")),
        ("bm25s", partial(load_tools, "retrieval:."), ("retrieval:.", "bm25s")),
        ("bm25s", partial(load_condenser, "keywords", BYTES), ("condenser=keywords", "bm25s")),
        ("pyarrow", partial(read_rows, "rows.parquet"), ("rows.parquet", "pyarrow")),
    ],
)
def test_a_missing_library_is_named(
    module: str,
    use: Callable[[], Any],
    named: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "rows.parquet").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as raised:
        use()
    assert all(name in str(raised.value) for name in named)
