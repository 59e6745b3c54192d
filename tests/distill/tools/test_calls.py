"""Every call has an answer, in order and in time, without control tokens."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.chat.template import encode
from distill.chat.tool_readers import ToolCall
from distill.text.chunks import count_tokens
from distill.tools.base import Tool, ToolError
from distill.tools.calculator import Calculator
from distill.tools.calls import ToolLimits, ToolOutcome, run_calls
from tests.waiting import DEADLINE_S


class Given(Tool):
    """Tool with the given behaviour."""

    schema_of_arguments: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 0},
            "where": {"type": "object", "properties": {"unit": {"enum": ["m", "km"]}}},
        },
        "required": ["n"],
    }

    @property
    def name(self) -> str:
        return "given"

    @property
    def description(self) -> str:
        return "Does it."

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self.schema_of_arguments

    def __init__(self, does: Callable[[Mapping[str, Any]], Any]) -> None:
        self.does = does

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        result = self.does(arguments)
        return await result if asyncio.iscoroutine(result) else result


NESTED: list[Any] = []
for _ in range(5000):
    NESTED = [NESTED]


@pytest.fixture
def run(tokenizer: PreTrainedTokenizerBase):
    def run(*calls: ToolCall, does: Callable = lambda arguments: "done", **limits):
        tools = {"given": Given(does), "calculator": Calculator()}
        return asyncio.run(run_calls(calls, tools, ToolLimits(**limits), tokenizer))

    return run


def call(**arguments) -> ToolCall:
    return ToolCall(name="given", arguments=arguments or {"n": 1})


def content(outcomes: list[ToolOutcome]) -> str:
    (outcome,) = outcomes
    return outcome.message["content"]


def test_all_at_once_and_in_order(run) -> None:
    meet = asyncio.Barrier(3)

    async def wait(arguments) -> str:
        await meet.wait()  # only if the others run too
        await asyncio.sleep(0.05 * (3 - arguments["n"]))
        return str(arguments["n"])

    outcomes = run(*(call(n=n) for n in range(3)), does=wait, timeout_s=60)
    assert [outcome.message["content"] for outcome in outcomes] == ["0", "1", "2"]
    assert [outcome.error for outcome in outcomes] == [None] * 3


def test_the_message(run) -> None:
    (outcome,) = run(ToolCall(name="calculator", arguments={"expression": "6*7"}, id="call_3"))
    assert outcome.message == {
        "role": "tool", "name": "calculator", "content": "42", "tool_call_id": "call_3",
    }  # fmt: skip
    assert (outcome.error, outcome.truncated, outcome.neutralised) == (None, False, False)
    assert 0 <= outcome.seconds < 60
    assert "tool_call_id" not in run(call())[0].message


def test_one_that_fails_leaves_the_others(run) -> None:
    outcomes = run(call(n=-1), ToolCall(name="calculator", arguments={"expression": "1/0"}), call())
    assert [outcome.error for outcome in outcomes] == ["arguments", "failed", None]
    assert outcomes[1].message["content"] == "Error: division by zero"


def test_an_unknown_name(run) -> None:
    (outcome,) = run(ToolCall(name="calcuator", arguments={}))
    assert outcome.error == "unknown" and outcome.message["name"] == "calcuator"
    assert "did you mean 'calculator'" in outcome.message["content"]
    (outcome,) = run(ToolCall(name="x<eos>" * 1000, arguments={}, id="<eos>"))
    assert len(outcome.message["name"]) < 100
    assert not any("<eos>" in value for value in outcome.message.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('{"n": 1', "must be a JSON object, and are not JSON: Expecting"),
        ("[1]", "must be a JSON object, got a list"),
        ("[" * 100_000, "are not JSON"),
        ({}, "wrong: 'n' is a required property"),
        ({"n": "1"}, "wrong: n: '1' is not of type 'integer'"),
        ({"n": True}, "n: True is not of type 'integer'"),
        ({"n": -1}, "n: -1 is less than the minimum of 0"),
        ({"n": 1, "where": {"unit": "ft"}}, "where.unit: 'ft' is not one of ['m', 'km']"),
        ({"n": 1, "wher": {}}, "no argument 'wher'; did you mean 'where'"),
        ({"n": float("inf")}, "arguments of given are wrong"),
        ({"n": float("nan")}, "arguments of given are wrong"),
        ({"n": 1, "where": {"unit": NESTED}}, "arguments of given are wrong"),
        ('{"n": 1e400}', "are not JSON: the number 1e400"),
        ('{"n": NaN}', "are not JSON: NaN"),
        ('{"n": 1}', "got a JSON object within text"),
    ],
)
def test_arguments_that_do_not_fit(run, arguments, message: str) -> None:
    outcomes = run(ToolCall(name="given", arguments=arguments), max_tokens=4000)
    assert outcomes[0].error == "arguments" and message in content(outcomes)


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "((("},
        {"pattern": "^(a|aa)+$", "$ref": "#/$defs/nowhere"},
        {"patternProperties": {"[": {}}},
        {"type": "strnig"},
        {"type": 3},
        {"$ref": "#/properties/n"},
        {"$ref": "#/$defs/nowhere"},
        {"$ref": "https://example.invalid/schema.json"},
        {"minimum": "none"},
        {"multipleOf": 0},
        {"required": 3},
        {"enum": 3},
    ],
)
def test_an_invalid_schema(run, monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any]) -> None:
    monkeypatch.setattr(Given, "schema_of_arguments", {"properties": {"n": schema}})
    for value in ("a" * 40 + "b", 1, {"b": 1}):
        (outcome, other) = run(call(n=value), ToolCall(name="calculator", arguments={}))
        assert outcome.error in (None, "arguments") and other.error == "arguments"
        assert len(outcome.message["content"]) < 500


@pytest.mark.parametrize(
    ("schema", "value", "error"),
    [
        ({"pattern": r"^\p{L}+$"}, "Ärger", None),  # as JavaScript writes it
        ({"pattern": r"^\p{L}+$"}, "1", "arguments"),
        ({"pattern": "^(a+)+$"}, "a" * 60 + "b", "arguments"),  # exponential time
        ({"multipleOf": 0.1}, float("inf"), "arguments"),
        ({"$ref": "#/$defs/Even"}, 4, None),
        ({"$ref": "#/$defs/Even"}, 3, "arguments"),
    ],
)
def test_schemas_of_other_authors(
    run, monkeypatch: pytest.MonkeyPatch, schema: dict, value: object, error: str | None
) -> None:
    parameters = {"properties": {"n": schema}, "$defs": {"Even": {"multipleOf": 2}}}
    monkeypatch.setattr(Given, "schema_of_arguments", parameters)
    assert run(call(n=value))[0].error == error


@pytest.mark.parametrize("combined", ["$ref", "allOf"])
def test_names_elsewhere_in_the_schema(run, monkeypatch: pytest.MonkeyPatch, combined: str) -> None:
    named = {"properties": {"n": {"type": "integer"}}}
    reference = {"$ref": "#/$defs/Named"}
    top = reference if combined == "$ref" else {"allOf": [reference]}
    monkeypatch.setattr(Given, "schema_of_arguments", {**top, "$defs": {"Named": named}})
    assert run(call(n=1))[0].error is None
    assert run(call(n="1"))[0].error == "arguments"


def test_a_timeout_is_an_error(run) -> None:
    stopped = []

    async def hang(arguments) -> str:
        try:
            await asyncio.sleep(600)
        finally:
            stopped.append(True)
        return ""

    outcomes = run(call(), does=hang, timeout_s=0.05)
    assert outcomes[0].error == "timeout"
    assert stopped


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ToolError("no such city:\ntry Oslo"), "Error: no such city:\ntry Oslo"),
        (ValueError("first\nsecond"), "Error: given failed: ValueError: first"),
        (TimeoutError("of its own"), "Error: given failed: TimeoutError: of its own"),
        (asyncio.CancelledError(), "Error: given was cancelled"),
        (SystemExit(3), "Error: given failed: SystemExit: 3"),
        (RecursionError("x" * 10_000), None),
    ],
)
def test_any_exception_of_a_tool_is_an_error(run, error: BaseException, shown: str | None) -> None:
    def fail(arguments) -> str:
        raise error

    outcomes = run(call(), does=fail)
    assert outcomes[0].error == "failed"
    assert len(content(outcomes)) < 400 and shown in (None, content(outcomes))


async def test_cancelling_passes_on(tokenizer: PreTrainedTokenizerBase) -> None:
    tools = {"given": Given(lambda arguments: asyncio.sleep(600))}
    task = asyncio.create_task(run_calls([call()], tools, ToolLimits(), tokenizer))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, DEADLINE_S)


def test_results_that_are_no_text(run) -> None:
    assert content(run(call(), does=lambda arguments: 42)) == "42"
    assert content(run(call(), does=lambda arguments: "水\ud800!")) == "??!"

    class Spiteful:
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert "RuntimeError: no" in content(run(call(), does=lambda arguments: Spiteful()))


def test_long_results_are_cut(run, tokenizer: PreTrainedTokenizerBase) -> None:
    text = "".join(f"{i}, " for i in range(1000))
    (outcome,) = run(call(), does=lambda arguments: text, max_tokens=100)
    start, note = outcome.message["content"].rsplit("\n", 1)
    assert outcome.truncated and text.startswith(start)
    assert count_tokens(tokenizer, start) == 100
    assert "100" in note and str(len(text)) in note
    (outcome,) = run(call(), does=lambda arguments: text, max_tokens=len(text))
    assert not outcome.truncated and outcome.message["content"] == text


def test_megabytes_are_not_tokenised(run, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def noted(tokenizer: PreTrainedTokenizerBase, text: str, **settings: bool) -> list[int]:
        lengths.append(len(text))
        return encode(tokenizer, text, **settings)

    monkeypatch.setattr("distill.text.foreign.encode", noted)
    (outcome,) = run(call(), does=lambda arguments: "x" * (64 << 20), max_tokens=16)
    assert outcome.truncated and len(outcome.message["content"]) < 100
    assert 0 < max(lengths) < 10_000
