"""The run's chat template: from a file, with its arguments written into the template."""

import pickle
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.chat.template import chat_text, check_messages, render_messages
from distill.chat.template_choice import ChatTemplateSettings
from distill.errors import ConfigError, DataError
from distill.tokenizer import load_tokenizer
from tests import chat_templates
from tests.refusals import refuses
from tests.tiny import save_tokenizer

ASK = [{"role": "user", "content": "Why?"}]
SWITCH = (
    "{%- macro end() %}{{- '' if enable_thinking else '<think>\n\n</think>\n\n' }}{%- endmacro %}"
    "{%- for m in messages %}{{- m.role + ': ' + m.content + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'assistant: ' }}{{- end() }}{{- style }}{%- endif %}"
)


def chat_tokenizer(family: str) -> PreTrainedTokenizerBase:
    return deepcopy(chat_templates.chat_tokenizer(family))


@pytest.fixture
def switch(tmp_path: Path) -> str:
    path = tmp_path / "switch.jinja"
    path.write_text(SWITCH)
    return str(path)


def text(settings: ChatTemplateSettings, family: str = "qwen3", **arguments: Any) -> str:
    tokenizer = settings.choose_template(chat_tokenizer(family))
    return str(
        tokenizer.apply_chat_template(ASK, add_generation_prompt=True, tokenize=False, **arguments)
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
        == "user: Why?\nassistant: " + "<think>\n\n</think>\n\n" * (not thinks) + "\n☂"
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
    student, teacher = chat_tokenizer("qwen3"), chat_tokenizer("llama")
    own = student.chat_template
    run = settings.choose_template(student)
    theirs = render_messages(teacher, ASK)
    chosen = settings.choose_teacher_template(teacher, own, run)
    assert render_messages(chosen, ASK).tolist() == theirs.tolist()
    same = chat_tokenizer("qwen3")
    assert settings.choose_teacher_template(same, own, run) is run


def test_content_may_be_a_list_of_text_parts() -> None:
    parts = [{"type": "text", "text": "Why"}, {"type": "text", "text": "?"}]
    assert check_messages([{"role": "user", "content": parts}], "messages") == ASK
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with refuses(DataError, "messages[0].content[0]"):
        check_messages(image, "messages")


def test_a_template_prints_one_date_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
