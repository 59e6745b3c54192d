"""Formats: patterns and schemas by value, and refusals."""

import asyncio
import json
import socket
from pathlib import Path

import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.envs.single_turn import SingleTurn
from distill.errors import ConfigError, DataError
from distill.rewards.formats import json_schema, matches
from distill.rewards.registry import exact_match, judge
from tests.refusals import refuses
from tests.scripted import setting

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


async def test_endless_backtracking_is_no_match_and_blocks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Schemas use Python's `re`, which holds the interpreter lock."""
    monkeypatch.setattr("distill.rewards.formats.CHILD_TIMEOUT_S", 2.0)
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


def test_answers_are_read_before_anything_starts(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "4?", "answer": "{}"}\n{"prompt": "4?", "answer": "{"}\n')
    assert len(SingleTurn()(str(path), setting(tokenizer, reward=exact_match))) == 2
    with refuses(DataError, "answer", names="prompts.jsonl:2:"):
        SingleTurn()(str(path), setting(tokenizer, reward=json_schema))
