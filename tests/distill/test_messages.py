"""Messages and templates: rendering, and the run's own template with its arguments."""

import json
import logging
import pickle
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from distill.chat.template import answered, chat_text, check_messages, render_messages
from distill.chat.template_choice import ChatTemplateSettings
from distill.chat.unwritten import check_written
from distill.data.assistant_masks import conversation_chains
from distill.errors import ConfigError, DataError
from distill.tokenizer import load_tokenizer
from tests.chat_templates import ADD, FORMATS, TEMPLATES, chat_tokenizer, stop_of
from tests.refusals import refuses
from tests.tiny import save_tokenizer

ASK = {"role": "user", "content": "1+2?"}
SAY = {"role": "assistant", "content": "3"}
ARGUMENTS = {"a": 1, "b": 2}
TEXT = json.dumps(ARGUMENTS)


def calling(arguments: Any = TEXT, **message: Any) -> dict:
    function = {"name": "add", "arguments": arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call], **message}


def flat(arguments: Any) -> dict:
    call = {"id": "abcdefghi", "name": "add", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def without(message: dict, field: str) -> dict:
    return {name: value for name, value in message.items() if name != field}


FORMS = {
    "object": calling(ARGUMENTS), "text in text": calling(json.dumps(TEXT)),
    "flat object": flat(ARGUMENTS), "flat text": flat(TEXT), "null content": calling(content=None),
    "no content": without(calling(), "content"),
    "null fields": calling(name=None, reasoning_content=None, function_call=None),
    "calls as text": calling(tool_calls=json.dumps(calling()["tool_calls"])),
    "all as text": json.dumps(calling()),
}  # fmt: skip
# As DeepSeek's shipped templates, which add the arguments to a text; and one that interpolates.
ADDS = (
    "{% for m in messages %}{{ m.role + ':' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.name + ' ' + c.function.arguments + '</call>' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
INTERPOLATES = ADDS.replace("' ' + c.function.arguments + '</call>'", "' ' ~ c.function.arguments")
ALL = {**TEMPLATES, "adds": ADDS, "interpolates": INTERPOLATES}


def tokenizer_of(template: str) -> Any:
    tokenizer = deepcopy(chat_tokenizer("qwen2.5"))
    tokenizer.chat_template = ALL.get(template, template)
    return tokenizer


def written(template: str, messages: Any, **settings: Any) -> str:
    settings = {"tools": None, "add_generation_prompt": False, **settings}
    return chat_text(tokenizer_of(template), check_messages(messages, "messages"), **settings)


@pytest.mark.parametrize("family", [*FORMATS, "adds", "interpolates"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_call_is_written_alike(family: str, form: str) -> None:
    right = written(family, [ASK, calling()])
    assert written(family, [ASK, FORMS[form]]) == right
    assert "None" not in right and "\\" not in right and "'a'" not in right


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("calls", [None, []])
def test_no_calls_are_no_field(family: str, calls: object) -> None:
    message = {**SAY, "tool_calls": calls, "reasoning_content": None}
    assert written(family, [ASK, message]) == written(family, [ASK, SAY])
    assert written(family, json.dumps([ASK, message])) == written(family, [ASK, SAY])


@pytest.mark.parametrize("arguments", ["{x", "[1]", [1], 3, '"x"'])
@pytest.mark.parametrize("form", [calling, flat])
def test_arguments_that_are_no_object_are_refused(form: Any, arguments: object) -> None:
    with refuses(DataError, "messages[1].tool_calls[0]"):
        check_messages([ASK, form(arguments)], "messages")


def test_a_developer_is_the_system_unless_the_template_knows_the_role() -> None:
    chat = [{"role": "developer", "content": "LATIN"}, ASK]
    system = [{"role": "system", "content": "LATIN"}, ASK]
    assert written("qwen2.5", chat) == written("qwen2.5", system)
    mentions = "{# as the developer says #}" + TEMPLATES["qwen2.5"]
    assert written(mentions, chat) == written("qwen2.5", system)
    knows = "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{{ m.content }}"
    assert written(knows + "{% endfor %}", chat) == "DLATIN1+2?"


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("known", ["reasoning_content", "thinking"])
def test_reasoning_has_the_name_that_the_template_reads(field: str, known: str) -> None:
    template = f"{{% for m in messages %}}{{{{ m.{known} }}}}{{{{ m.content }}}}{{% endfor %}}"
    assert written(template, [{**SAY, field: "hm "}]) == "hm 3"


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
HEARD = {"role": "tool", "content": "3"}


@pytest.mark.parametrize(
    ("template", "messages", "tools", "field"),
    [
        (CHATML, [ASK, calling(), HEARD, SAY], None, "tool_calls"),
        (CHATML, [ASK, SAY], [ADD], "tools"),
        (NO_SYSTEM, [{"role": "system", "content": "LATIN"}, ASK, SAY], None, "content"),
        (NO_SYSTEM, [{"role": "developer", "content": "LATIN"}, ASK, SAY], None, "content"),
        (CHATML, [ASK, {**SAY, "reasoning_content": "hm"}], None, "reasoning_content"),
        ("llama", [ASK, calling(content="I add.")], None, "content"),
        ("{% for m in messages %}{{ m.content[:5] }}{% endfor %}", [ASK, SAY], None, "content"),
    ],
)
def test_content_that_the_template_drops_is_refused(
    template: str, messages: list[dict], tools: list | None, field: str
) -> None:
    with refuses(DataError, field):
        check_written(tokenizer_of(template), messages, tools=tools, context=1)


# As Qwen3.8's, which writes thinking twice, and gpt-oss's, whose marks are others.
_TWICE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
_CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.thinking %}<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|><|start|>assistant{% endif %}<|channel|>final<|message|>"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@pytest.mark.parametrize("template", [_TWICE, _CHANNELS])
def test_thinking_that_the_template_renders_as_the_answer_is_refused(
    template: str, caplog: pytest.LogCaptureFixture
) -> None:
    inside = {**SAY, "content": "<think>\nhm\n</think>\n\n3"}
    with refuses(DataError, "content"):
        check_written(tokenizer_of(template), [ASK, inside], context=0)
    check_written(tokenizer_of(template), [ASK, inside, ASK])
    assert "`content`" in caplog.text
    check_written(tokenizer_of(template), [ASK, {**SAY, "reasoning_content": "hm"}], context=0)
    check_written(tokenizer_of("qwen3"), [ASK, inside], context=0)


def test_reasoning_that_is_context_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    thought = {**SAY, "reasoning_content": "hm"}
    with caplog.at_level(logging.WARNING):
        check_written(tokenizer_of(CHATML), [ASK, thought, ASK])
    assert "reasoning_content" in caplog.text


@pytest.mark.parametrize("family", FORMATS)
def test_a_conversation_with_tools_is_written(family: str) -> None:
    tokenizer = tokenizer_of(family)
    heard = {**HEARD, "tool_call_id": "abcdefghi"}
    check_written(tokenizer, [ASK, calling(), heard, SAY, ASK, SAY], tools=[ADD], context=0)


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_marked_turns_are_not_trained(mark: dict) -> None:
    tokenizer = tokenizer_of("qwen2.5")
    messages = [ASK, {**SAY, "content": "WRONG", **mark}, ASK, {**SAY, "weight": 1, "train": True}]
    stops = [tokenizer.convert_tokens_to_ids(stop_of("qwen2.5"))]
    [chain] = conversation_chains(tokenizer, messages, stop_ids=stops)
    assert "WRONG" in tokenizer.decode(chain.tokens_T.tolist())
    assert tokenizer.decode(chain.tokens_T[chain.loss_mask_T].tolist()) == "3<|im_end|>"
    with pytest.raises(DataError):
        conversation_chains(tokenizer, messages[:2], stop_ids=stops)


@pytest.mark.parametrize("mark", [{"weight": 0.5}, {"weight": "0"}, {"train": "no"}])
def test_marks_of_other_values_are_refused(mark: dict) -> None:
    with refuses(DataError, next(iter(mark))):
        conversation_chains(tokenizer_of("qwen2.5"), [ASK, {**SAY, **mark}], stop_ids=[1])


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama", "gemma", "mistral", "deepseek"])
def test_a_begun_answer_is_continued(family: str) -> None:
    tokenizer = tokenizer_of(family)
    messages = [ASK, {"role": "assistant", "content": "The answer is"}]
    ids = tokenizer.apply_chat_template(
        messages, continue_final_message=True, tokenize=True, return_dict=False
    )
    assert render_messages(tokenizer, messages).tolist() == ids
    assert tokenizer.decode(ids).endswith("The answer is")
    whole = [ASK, {"role": "assistant", "content": "The answer is 3."}]
    assert answered(messages, " 3.") == whole and answered([ASK], "3") == [ASK, SAY]


def test_an_unanswered_call_cannot_be_continued() -> None:
    with pytest.raises(DataError):
        render_messages(tokenizer_of("qwen2.5"), [ASK, calling()])


SWITCH = (
    "{%- macro end() %}{{- '' if enable_thinking else '<think>\n\n</think>\n\n' }}{%- endmacro %}"
    "{%- for m in messages %}{{- m.role + ': ' + m.content + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'assistant: ' }}{{- end() }}{{- style }}{%- endif %}"
)


@pytest.fixture
def switch(tmp_path: Path) -> str:
    path = tmp_path / "switch.jinja"
    path.write_text(SWITCH)
    return str(path)


def text(settings: ChatTemplateSettings, family: str = "qwen3", **arguments: Any) -> str:
    tokenizer = settings.choose_template(deepcopy(chat_tokenizer(family)))
    return str(
        tokenizer.apply_chat_template(
            [ASK], add_generation_prompt=True, tokenize=False, **arguments
        )
    )


@pytest.mark.parametrize("value", ["true", "false"])
def test_arguments_are_the_template_s_defaults(switch: str, value: str) -> None:
    settings = ChatTemplateSettings(
        chat_template=switch,
        chat_template_kwargs=f'{{"enable_thinking": {value}, "style": "\\n☂"}}',
    )
    thinks = value == "true"
    assert (
        text(settings)
        == "user: 1+2?\nassistant: " + "<think>\n\n</think>\n\n" * (not thinks) + "\n☂"
    )
    assert text(settings, enable_thinking=not thinks) != text(settings)  # a server's request


@pytest.mark.parametrize(
    ("value", "written"),
    [("null", "None"), ('[1, {"a": null}]', "[1, {'a': None}]"), ('"a\\"b\'c"', "a\"b'c")],
)
def test_any_json_value_arrives(tmp_path: Path, value: str, written: str) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ x }}")
    settings = ChatTemplateSettings(
        chat_template=str(path), chat_template_kwargs=f'{{"x": {value}}}'
    )
    assert text(settings) == written


def test_invalid_templates_and_arguments_are_refused(switch: str, tmp_path: Path) -> None:
    for bad in ("{", "[1]"):
        with refuses(ConfigError, "model.chat_template_kwargs"):
            ChatTemplateSettings(chat_template_kwargs=bad)
    with refuses(ConfigError, "model.chat_template_kwargs"):
        text(
            ChatTemplateSettings(
                chat_template=switch, chat_template_kwargs='{"enable_thinkin": false}'
            )
        )
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    with refuses(ConfigError, "model.chat_template"):
        text(ChatTemplateSettings(chat_template=str(broken)))
    with refuses(ConfigError, "model.chat_template"):
        text(ChatTemplateSettings(chat_template=str(tmp_path / "none")))


def test_teacher_messages_go_through_the_teacher_s_own_template(switch: str) -> None:
    settings = ChatTemplateSettings(
        chat_template=switch, chat_template_kwargs='{"enable_thinking": false}'
    )
    student, teacher = deepcopy(chat_tokenizer("qwen3")), deepcopy(chat_tokenizer("llama"))
    own = student.chat_template
    run = settings.choose_template(student)
    theirs = render_messages(teacher, [ASK])
    chosen = settings.choose_teacher_template(teacher, own, run)
    assert render_messages(chosen, [ASK]).tolist() == theirs.tolist()
    same = deepcopy(chat_tokenizer("qwen3"))
    assert settings.choose_teacher_template(same, own, run) is run


def test_content_may_be_a_list_of_text_parts() -> None:
    parts = [{"type": "text", "text": "1+2"}, {"type": "text", "text": "?"}]
    assert check_messages([{"role": "user", "content": parts}], "messages") == [ASK]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with refuses(DataError, "messages[0].content[0]"):
        check_messages(image, "messages")


def test_every_process_prints_one_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tokenizer(
        tmp_path, chat_template="{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}"
    )
    tokenizer = load_tokenizer(str(tmp_path))
    before = render_messages(tokenizer, [{"role": "user", "content": "a"}]).tolist()
    late = Mock(now=Mock(return_value=datetime(2001, 1, 1)))
    monkeypatch.setattr("distill.chat.template.datetime", late)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", late)
    for other in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        assert render_messages(other, [{"role": "user", "content": "a"}]).tolist() == before


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "05 Jan 2026"),
        # As Llama 3.2 and Granite write it, with whitespace that blocks trim.
        ("\n  {%- if strftime_now is defined %}\n  {% set day = '%B %-d' %}{% endif %}\n"
         "{% macro head() %}Today: {{ strftime_now(day ~ ', %Y') }}.{% endmacro %}{{ head() }}",
         "Today: January 5, 2026."),
        ("  {% if messages %}a{% endif %}\n b {{ strftime_now('%%d%%%y') }}", "a b %d%26"),
    ],
)  # fmt: skip
def test_a_template_prints_the_chosen_date(template: str, shown: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, chat_template=template)
    tokenizer = load_tokenizer(str(tmp_path))
    ChatTemplateSettings(chat_date="2026-01-05").choose_template(tokenizer)
    message = [{"role": "user", "content": "a"}]
    assert shown == chat_text(tokenizer, message, tools=None, add_generation_prompt=False)
