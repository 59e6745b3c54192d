"""Chat template of a run: the tokenizer's own or that of a file, with arguments from the settings.

Arguments such as Qwen3's `enable_thinking` become defaults in the text of the template. Thus all
parts of a run render with the same values, and so does a server of `final/`, whose requests can
still override them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import chz

from distill.chat.template import set_chat_time
from distill.errors import ConfigError
from distill.json_values import read_object
from distill.rules import readable_as, setting
from distill.settings import Section
from distill.types import Tokenizer


def _arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a chat template. Raises ValueError if the text is invalid."""
    given = read_object(text) if text else {}
    if wrong := [name for name in given if not name.isidentifier()]:
        raise ValueError(f"{wrong[0]!r} is not a valid name")
    return given


@chz.chz
class ChatTemplateSettings:
    """Settings of the chat template that renders the model's chats."""

    section: ClassVar[Section] = Section.MODEL
    within: ClassVar[str] = "model."

    chat_template: str | None = chz.field(
        default=None,
        doc="file with a chat template (Jinja) that replaces the checkpoint's, also in final/",
    )
    chat_template_kwargs: str = setting(
        readable_as(
            "JSON object of names and values, such as '{\"enable_thinking\": false}'",
            _arguments,
            allows='{"a": 1}',
            refuses='{"a b": 1}',
        ),
        default="",
        doc='arguments of the chat template as a JSON object, for example \'{"enable_thinking": '
        "false}'; they become defaults in the template of final/",
    )

    chat_date: str | None = setting(
        readable_as("date", datetime.fromisoformat, allows="2026-01-31", refuses="2026-02-31"),
        default=None,
        doc="date that chat templates print, YYYY-MM-DD; default: the date on which the run in "
        "out= began, else today",
    )

    def chat_day(self) -> datetime:
        """Time that chat templates receive: the start of `chat_date`, or the current time."""
        return datetime.now() if self.chat_date is None else datetime.fromisoformat(self.chat_date)

    def choose_template(self, tokenizer: Tokenizer) -> Tokenizer:
        """Set the run's chat template in the tokenizer, and return the tokenizer.

        Raises:
            ConfigError: the file cannot be read or is not a template, or an argument has no effect.
        """
        template = tokenizer.chat_template
        if self.chat_template is not None:
            template = _read(self.chat_template)
        arguments = _arguments(self.chat_template_kwargs)
        if arguments and not template:
            raise ConfigError(
                f"chat_template_kwargs={self.chat_template_kwargs!r} changes nothing: the "
                "tokenizer has no chat template; give chat_template=FILE, or leave them out",
                field="model.chat_template_kwargs",
            )
        for name in arguments:
            if not _mentions(template, name):
                raise ConfigError(
                    f"chat_template_kwargs={self.chat_template_kwargs!r} changes nothing: the chat "
                    f"template does not mention {name}; leave it out",
                    field="model.chat_template_kwargs",
                )
        tokenizer.chat_template = _with_defaults(template, arguments)
        set_chat_time(tokenizer, self.chat_day())
        return tokenizer

    def choose_teacher_template(self, teacher: Tokenizer, own: object, run: Tokenizer) -> Tokenizer:
        """Tokenizer whose template renders `teacher_messages`.

        This is the teacher's tokenizer with its own template and those of the arguments that the
        template mentions. If the teacher has no template, or the same template as the student's
        checkpoint (`own`), which the run's template replaces, it is the run's tokenizer (`run`).
        """
        template = teacher.chat_template
        if not template or template == own:
            return run
        known = {
            name: value
            for name, value in _arguments(self.chat_template_kwargs).items()
            if _mentions(template, name)
        }
        teacher.chat_template = _with_defaults(template, known)
        set_chat_time(teacher, self.chat_day())
        return teacher


def template_text(path: str) -> str:
    """Read a template's file. Raises ConfigError if it cannot be read or is empty."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template={path} cannot be read: {error}; give a file with a chat template",
            field="model.chat_template",
        ) from error
    if not text.strip():
        raise ConfigError(
            f"chat_template={path} is empty; give a file with a chat template",
            field="model.chat_template",
        )
    return text


def _read(path: str) -> str:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    text = template_text(path)
    try:
        _compile_jinja_template(text)
    except Exception as error:  # jinja2's errors, which are not imported here
        line = getattr(error, "lineno", "?")
        raise ConfigError(
            f"chat_template={path} is not a chat template: line {line}: {error}; correct the file",
            field="model.chat_template",
        ) from error
    return text


def _mentions(template: Any, name: str) -> bool:
    texts = template.values() if isinstance(template, Mapping) else [template]
    return any(re.search(rf"\b{name}\b", text) for text in texts)


def _with_defaults(template: Any, arguments: Mapping[str, Any]) -> Any:
    """Add default values for `arguments` to a template, or to each of several templates."""
    if isinstance(template, Mapping):
        return {name: _with_defaults(text, arguments) for name, text in template.items()}
    if not template:
        return template
    defaults = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif -%}}"
        for name, value in arguments.items()
    ]
    return "".join(defaults) + template


def _literal(value: Any) -> str:
    """Jinja literal of a JSON value."""
    if isinstance(value, dict):
        pairs = (f"{_literal(name)}: {_literal(each)}" for name, each in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
