"""Every family's calls are parsed, no text raises, and text that is no call stays text."""

import json
from typing import Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distill.chat.template import chat_text
from distill.chat.token_text import agreement
from distill.chat.tool_calls import ParsedTurn, assistant_message, detect_format, parse_turn
from distill.chat.tool_formats import ToolFormat
from distill.chat.tool_readers import ToolCall
from distill.errors import ConfigError
from tests.chat_templates import (
    ADD,
    CALLS,
    DSML,
    FORMATS,
    ONE_CALL,
    chat_tokenizer,
    deepseek,
    deepseek_call,
    invoke,
    stop_of,
)
from tests.refusals import refuses

ARGUMENTS = {"a": 1, "b": 2}


def parse(text: str, tool_format: ToolFormat = "hermes", **settings: Any) -> ParsedTurn:
    return parse_turn(text, tool_format, [ADD], **settings)


def calls_of(parsed: ParsedTurn) -> list[tuple[str, object]]:
    return [(call.name, call.arguments) for call in parsed.calls]


@pytest.mark.parametrize(
    ("tool_format", "text"), [(name, text) for name, texts in ONE_CALL.items() for text in texts]
)
def test_one_call(tool_format: ToolFormat, text: str) -> None:
    parsed = parse(text, tool_format)
    assert calls_of(parsed) == [("add", ARGUMENTS)]
    assert (parsed.content, parsed.malformed, parsed.text) == ("", (), text)
    ids = [known for known in ("abcdefghi", "functions.add:0") if known in text]
    assert parsed.calls[0].id == (ids or ["call00000"])[0]


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", "\n".join(ONE_CALL["hermes"][:2])),
        ("llama", "; ".join([ONE_CALL["llama"][0]] * 2)),
        ("mistral", ONE_CALL["mistral"][2] * 2),
        ("glm", "\n".join(ONE_CALL["glm"])),
        ("harmony", "".join(ONE_CALL["harmony"][1:])),
        ("llama", ONE_CALL["llama"][0] * 2),
        ("llama", "<|python_tag|>" + ONE_CALL["llama"][0] * 2),
        ("llama", "<|python_start|><|python_end|>" + ONE_CALL["llama"][0] * 2),
    ],
)
def test_calls_in_parallel(tool_format: ToolFormat, text: str) -> None:
    """Forms that models write and templates do not; template forms are tested below."""
    parsed = parse(text, tool_format, first=7)
    assert calls_of(parsed) == [("add", ARGUMENTS)] * 2
    assert [call.id for call in parsed.calls] == ["call00007", "call00008"]
    assert parsed.content == ""


def test_content_is_kept_beside_calls() -> None:
    call = ONE_CALL["hermes"][0]
    assert parse(f"Let me see.\n{call}").content == "Let me see."
    assert parse(f"Let me see.\n\n{call}").content == "Let me see.\n"
    assert parse(f"{call}\nOne more:\n{call} Done.").content == "One more:\nDone."
    assert parse("  no call \n").content == "  no call \n"


def test_words_before_a_call_without_marks() -> None:
    for call in (ONE_CALL["llama"][0], "<|function_call|>" + ONE_CALL["llama"][0]):
        parsed = parse(f"Let me see. {call}", "llama")
        assert calls_of(parsed) == [("add", ARGUMENTS)] and parsed.content.strip() == "Let me see."
    marked = f"<|python_start|>Let me see.<|python_end|>{ONE_CALL['llama'][0]}"
    assert parse(marked, "llama").content == "Let me see."


def test_a_call_in_the_thinking_is_a_thought() -> None:
    call = ONE_CALL["hermes"][0]
    for thinking in (f"<think>{call}</think>\n\n", f"so {call}</think>\n\n"):
        parsed = parse(thinking + call)
        assert len(parsed.calls) == 1 and parsed.content == thinking.removesuffix("\n")
        assert parse(thinking + "no").calls == ()
    assert parse(f"<think>{call}").calls == ()
    assert parse(f"thus {call}", opened=True).calls == ()
    assert len(parse(f"thus {call}").calls) == 1
    assert calls_of(parse('hm</think>{"name": "add", "parameters": {}}', "llama")) == [("add", {})]


def test_arguments_may_speak_of_the_marks() -> None:
    for value in ("</tool_call>", "<think>", "</think>", "a\n</parameter> b"):
        text = json.dumps({"name": "add", "arguments": {"a": value}})
        assert calls_of(parse(f"<tool_call>\n{text}\n</tool_call>")) == [("add", {"a": value})]
        text = f"<tool_call>\n<function=add>\n<parameter=x>\n{value}\n</parameter>\n</function>\n"
        if value != "</tool_call>":
            assert calls_of(parse(f"{text}</tool_call>", "xml")) == [("add", {"x": value})]


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "number"}, "3.5", 3.5),
        ({"type": "number"}, "many", "many"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, "a\n\nb", "a\n\nb"),
        ({}, "3", "3"),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "object"}, '{"x": {}}', {"x": {}}),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "4", 4),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "4", 4),
        ({"type": ["string", "null"]}, "None", None),
        ({"description": "anything"}, '{"k": 1}', '{"k": 1}'),
        ({"$ref": "#/$defs/Point"}, '{"k": 1}', {"k": 1}),
        # to be refused as an object without `k`, not as text
        ({"$ref": "#/$defs/Point"}, '{"l": 1}', {"l": 1}),
        ({"$ref": "#/$defs/Text"}, '{"k": 1}', '{"k": 1}'),
        ({"allOf": [{"$ref": "#/$defs/Point"}]}, '{"k": 1}', {"k": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, '{"k": 1}', {"k": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"$ref": "#/$defs/Text"}, {"$ref": "#/$defs/Point"}]}, '{"k": 1}', {"k": 1}),
        ({"oneOf": [{"$ref": "#/$defs/Text"}, {"const": 0}]}, "0", 0),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"enum": [True, "auto"]}, "True", True),
        ({"const": [1]}, "[1]", [1]),
        ({"items": {"type": "integer"}, "type": "array"}, '["a"]', ["a"]),
        ({"type": "number"}, "1e400", "1e400"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"$ref": "#/$defs/nowhere"}, "3", "3"),
        ({"type": "integr"}, "3", "3"),
    ],
)
@pytest.mark.parametrize("place", ["properties", "additionalProperties", "allOf"])
def test_parameters_in_xml_have_the_types_of_the_schema(
    schema: dict, written: str, value: object, place: str
) -> None:
    where = {"properties": {"x": schema}}
    parameters = {
        "properties": where,
        "additionalProperties": {"additionalProperties": schema},
        "allOf": {"allOf": [where]},
    }[place]
    point = {"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"]}
    parameters["$defs"] = {"Point": point, "Text": {"type": "string"}}
    tool = {"function": {"name": "f", "parameters": parameters}}
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>\n"
    [call] = parse_turn(f"{text}</tool_call>", "xml", [tool]).calls
    assert isinstance(call.arguments, dict) and call.arguments == {"x": value}
    assert type(call.arguments["x"]) is type(value)


@pytest.mark.parametrize(
    ("tool_format", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {a}}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}} </tool_call>', None),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a"', None),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "[1]"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "\\ud800"}</tool_call>', None),
        ("xml", "<tool_call><function=add><parameter=a>1</function></tool_call>", None),
        ("xml", "<tool_call><function=add>so</function></tool_call>", None),
        ("llama", '{"name": "add", "parameters": {a}}', None),
        ("llama", '{"name": "add", "parameters": {}} Right?', None),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {a}}]', None),
        ("mistral", "[TOOL_CALLS]add[ARGS]{a}", "{a}"),
        ("deepseek", CALLS[0] + deepseek_call("{a}") + CALLS[1], None),
        ("dsml", invoke(DSML).replace(f"</{DSML}parameter>", ""), None),
        ("minimax", '<invoke name="add">\n<parameter name="a">1</invoke>', None),
        ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1\n</tool_call>", None),
        ("kimi", ONE_CALL["kimi"][0].replace('{"a": 1, "b": 2}', "{a}"), "{a}"),
        ("kimi", ONE_CALL["kimi"][1].replace("{", "["), None),
        ("harmony", ONE_CALL["harmony"][1].replace("1", "one"), None),
        ("gemma", "<|tool_call>call:add{a:one}<tool_call|>", "{a:one}"),
        ("gemma", '<|tool_call>call:add{a:<|"|>one}<tool_call|>', None),
        ("pythonic", "<|tool_call_start|>[add(1, 2)]<|tool_call_end|>", None),
        ("pythonic", "<|tool_call_start|>[add(a=b)]<|tool_call_end|>", None),
        ("pythonic", "<|tool_call_start|>[add(a=1]<|tool_call_end|>", None),
    ],
)
def test_arguments_that_are_no_object_are_kept_as_text(
    tool_format: ToolFormat, text: str, arguments: str | None
) -> None:
    parsed = parse(text, tool_format)
    [call] = parsed.calls
    assert call.name == "add" and isinstance(call.arguments, str) and not parsed.malformed
    assert call.arguments == arguments if arguments else call.arguments in text
    assert assistant_message(parsed) == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", "<tool_call>add(1, 2)</tool_call>"),
        ("hermes", '<tool_call>{"name": 3}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 9999),
        ("xml", ONE_CALL["hermes"][0]),
        ("glm", ONE_CALL["hermes"][0]),
        ("kimi", "<|tool_calls_section_begin|>add(1, 2)"),
        ("minimax", "<minimax:tool_call>add(1, 2)</minimax:tool_call>"),
        ("dsml", f"<{DSML}function_calls>add(1, 2)</{DSML}function_calls>"),
        ("gemma", "<|tool_call>add(1, 2)<tool_call|>"),
        ("pythonic", "<|tool_call_start|>add 1, 2<|tool_call_end|>"),
        ("llama", "<|python_tag|>add.call(a=1)"),
        ("mistral", "[TOOL_CALLS]"),
        ("deepseek", CALLS[0] + deepseek("tool call begin") + "add"),
    ],
)
def test_a_call_without_a_name_is_malformed(tool_format: ToolFormat, text: str) -> None:
    parsed = parse(text, tool_format)
    assert not parsed.calls
    [message] = parsed.malformed
    assert len(message) < 500
    assert assistant_message(parsed) == {"role": "assistant", "content": text}


def test_an_answer_in_json_is_no_call() -> None:
    spoken_of = f"I called {ONE_CALL['llama'][0]} and it is 3."
    for answer in ('{"answer": 4}', '{"name": "Ada"}', "{", "{'a': 1} is a dict", spoken_of):
        assert parse(answer, "llama") == ParsedTurn(text=answer, content=answer)


def test_brackets_in_an_answer_are_no_call() -> None:
    for answer in ("See [f(x) for x in y].", "It is [1, 2].", "So [g(1, 2)] it is", "[a](b)"):
        assert parse(answer, "pythonic") == ParsedTurn(text=answer, content=answer)
    parsed = parse("Let me see. [add(a=1, b=2)]", "pythonic")
    assert calls_of(parsed) == [("add", ARGUMENTS)] and parsed.content.strip() == "Let me see."


@pytest.mark.parametrize(
    ("tool_format", "begun"),
    [
        ("harmony", "to=functions.{}"),
        ("gemma", "<|tool_call>call:add{{{}a"),
        ("deepseek", "<\uff5ctool\u2581call\u2581begin\uff5c>{}"),
    ],
)
def test_a_long_run_of_one_character_is_read(tool_format: ToolFormat, begun: str) -> None:
    for character in ("a", " "):
        text = begun.format(character * 200_000)  # in quadratic time, it would be hours
        assert parse(text, tool_format).text == text


@pytest.mark.parametrize(
    ("tool_format", "unit", "end"),
    [
        ("pythonic", "[f(a=1)],", "x]"),
        ("pythonic", "[f(", "]"),
        ("pythonic", "[f(a=1), ", "]"),
        ("llama", '{"name": "a", "parameters": {}}', "x"),
        ("llama", '{"name":[', ""),
        ("xml", "<tool_call><function=f></tool_call>", "</function></tool_call>"),
        ("mistral", "[TOOL_CALLS]a{}", "x"),
    ],
)
def test_many_marks_are_read(tool_format: ToolFormat, unit: str, end: str) -> None:
    text = "x" + unit * (200_000 // len(unit)) + end  # in quadratic time, it would be minutes
    read = parse(text, tool_format)
    assert read.text == text and len(read.calls) + len(read.malformed) <= 512


_MARKS = ["{", "}", "[", "]", '"name": "add"', '"arguments": {}', ";", "```json\n", "\n", " ", "x"]
_MARKS += ["<think>", "</think>", "<function=add>", "<parameter=a>", "</parameter>", "</function>"]
_MARKS += [text for texts in ONE_CALL.values() for text in texts]


@settings(max_examples=25)
@given(
    text=st.text() | st.lists(st.sampled_from(_MARKS) | st.text(max_size=3)).map("".join),
    tool_format=st.sampled_from(get_args(ToolFormat)),
    opened=st.booleans(),
)
def test_any_text_is_parsed_and_rendered(text: str, tool_format: ToolFormat, opened: bool) -> None:
    parsed = parse(text, tool_format, opened=opened)
    assert all(call.id for call in parsed.calls)
    assert all(isinstance(call.arguments, (dict, str)) for call in parsed.calls)
    message = assistant_message(parsed)
    question = {"role": "user", "content": "q"}
    tokenizer = chat_tokenizer("qwen2.5")
    chat_text(tokenizer, [question, message], tools=[ADD], add_generation_prompt=False)


@settings(max_examples=20)
@given(arguments=st.dictionaries(st.text(), st.recursive(st.none() | st.text(), st.lists)))
def test_arguments_come_back_as_they_were_written(arguments: dict[str, Any]) -> None:
    written = json.dumps({"name": "add", "arguments": arguments})
    assert calls_of(parse(f"<tool_call>\n{written}\n</tool_call>")) == [("add", arguments)]


@pytest.mark.parametrize("family", FORMATS)
def test_the_format_is_detected_from_the_template(family: str) -> None:
    assert detect_format(chat_tokenizer(family)) == FORMATS[family]


_PARAMETERS = {
    "type": "object",
    "properties": {
        "s": {"type": "string"}, "i": {"type": "integer"}, "f": {"type": "number"},
        "b": {"type": "boolean"}, "n": {"type": "null"}, "l": {"type": "array"},
        "o": {"$ref": "#/$defs/Any"},
    },
    "$defs": {"Any": {"type": "object"}},
}  # fmt: skip
_EVERY = {"type": "function", "function": {"name": "every", "parameters": _PARAMETERS}}
# No marks; nor characters that a JSON encoder escapes in other ways than Python.
_WORDS = st.text(st.sampled_from("ab 01.,:'\"\\\n(){}\u00e9\U0001f40c"), max_size=12)
_KEYS = st.text("abc_1", min_size=1, max_size=4)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | _WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_KEYS, inner, max_size=2),
    max_leaves=4,
)
_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "s": _WORDS, "i": st.integers(), "f": st.floats(allow_nan=False, allow_infinity=False),
        "b": st.booleans(), "n": st.none(), "l": st.lists(_VALUES, max_size=3),
        "o": st.dictionaries(_KEYS, _VALUES, max_size=3),
    },
)  # fmt: skip


@pytest.mark.parametrize("family", FORMATS)
@settings(max_examples=6)
@given(
    words=st.sampled_from(["", "Let me see.", "One (1):\n\n- two"]),
    arguments=st.lists(_ARGUMENTS, min_size=1, max_size=2),
)
@example(words="", arguments=[{"s": '"quoted"'}])
def test_calls_are_parsed_back(family: str, words: str, arguments: list[dict[str, Any]]) -> None:
    if family in ("llama", "gpt-oss"):  # one call a turn
        arguments = arguments[:1]
    tokenizer, ids = chat_tokenizer(family), ["functions.every:0", "functions.every:1"]
    calls = tuple(
        ToolCall(name="every", arguments=each, id=ids[i] if family == "kimi" else f"a2b4c6d8{i}")
        for i, each in enumerate(arguments)
    )
    message = assistant_message(ParsedTurn(text="", content=words, calls=calls))
    messages = [{"role": "user", "content": "q"}]
    before = chat_text(tokenizer, messages, tools=[_EVERY], add_generation_prompt=True)
    after = chat_text(tokenizer, [*messages, message], tools=[_EVERY], add_generation_prompt=False)
    turn = after[agreement(before.removesuffix("<think>\n"), after) :]
    parsed = parse_turn(turn.rpartition(stop_of(family))[0], FORMATS[family], [_EVERY])
    assert calls_of(parsed) == [("every", each) for each in arguments] and not parsed.malformed
    if family not in ("llama", "mistral", "gpt-oss"):  # which do not write words there
        assert parsed.content.endswith(words)


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% if tools %}{{ raise_exception('no tools') }}{% endif %}",
        "{{ tools | tojson }}{{ raise_exception('no') if messages | length > 1 else '' }}",
        "{{ tools | tojson }}{% for m in messages %}{{ m.tool_calls }}{% endfor %}",
        "{{ tools | tojson }}",
        "{{ tools | tojson }}{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}"
        "{{ '<tool_call>' ~ m.content ~ c.function | tojson ~ '</tool_call>' }}"
        "{% endfor %}{% endfor %}",
        "{{ tools | tojson }}{% for m in messages if m.tool_calls %}{{ m.content }}<tool_call>"
        "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}</tool_call>"
        "{% endfor %}",
    ],
)
def test_a_template_without_a_known_format_is_refused(
    monkeypatch: pytest.MonkeyPatch, template: str | None
) -> None:
    tokenizer = chat_tokenizer("gemma")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with refuses(ConfigError, "model.chat_template"):
        detect_format(tokenizer)
