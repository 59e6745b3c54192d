"""Chat templates in the manner of the families people train, and one tokenizer for all of them.

They are ours: each is as short as the behaviour allows that makes its family hard.
"""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.chat.tool_formats import ToolFormat

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}

_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\nTools:' }}{%- for tool in tools %}"
    "{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}"
)
_HERMES_CALLS = (
    "{%- for call in m.tool_calls or [] %}{%- if spoken or not loop.first %}{{- '\n' }}{%- endif %}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}"
)
_HEARD = (
    "{%- if m.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- elif m.role != 'assistant' %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
)
_LAST_QUERY = (
    "{%- set ns = namespace(query=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.query = loop.index0 %}{%- endif %}{%- endfor %}"
)


def _chatml(spoken: str, *, calls: str = _HERMES_CALLS, prompt: str = "", before: str = "") -> str:
    """ChatML; `spoken` sets what is written of the assistant's content."""
    return (
        f"{_TOOLS}{before}{{%- for m in messages %}}{_HEARD}"
        f"{{%- else %}}{spoken}{{{{- '<|im_start|>assistant\n' + spoken }}}}{calls}"
        "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}"
        f"{{{{- '<|im_start|>assistant\n{prompt}' }}}}{{%- endif %}}"
    )


_AS_IT_IS = "{%- set spoken = m.content %}"
_LAST_WORDS = "{%- set spoken = m.content.split('</think>')[-1].lstrip('\n') %}"
# The thinking since the last question stays, and an empty one is written where there was none.
_RECENT_THINKING = (
    "{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '' %}"
    f"{_LAST_WORDS}{{%- if loop.index0 > ns.query and (loop.last or thought) %}}"
    "{%- set spoken = '<think>\n' + thought + '\n</think>\n\n' + spoken %}{%- endif %}"
)
_QWEN3_CALLS = _HERMES_CALLS.replace("if spoken or", "if (spoken and not spoken.endswith('\n')) or")
_XML_CALLS = (
    "{%- for call in m.tool_calls or [] %}{%- if spoken or not loop.first %}{{- '\n' }}{%- endif %}"
    "{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{%- for key, value in call.function.arguments.items() %}"
    "{{- '<parameter=' + key + '>\n' ~ value ~ '\n</parameter>\n' }}{%- endfor %}"
    "{{- '</function>\n</tool_call>' }}{%- endfor %}"
)
# One call at most, and nothing beside it.
_LLAMA = (
    "{{- '<|begin_of_text|>' }}{%- if tools %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|eot_id|>' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.tool_calls %}{%- if m.tool_calls | length > 1 %}"
    "{{- raise_exception('one call at a time') }}{%- endif %}"
    '{{- \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' }}'
    '{{- m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{- m.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) }}"
    "{{- '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{%- endif %}"
)
# Calls have ids of nine characters; nothing opens the assistant's turn.
_MISTRAL = (
    "{{- '<s>' }}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- if tools and loop.first %}{{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}"
    "{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}{{- '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}{%- if m.tool_call_id is not defined %}"
    "{{- raise_exception('a result needs the id of its call') }}{%- endif %}"
    "{{- '[TOOL_RESULTS]' + m.content + ' ' + m.tool_call_id + '[/TOOL_RESULTS]' }}"
    "{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}"
    "{%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}"
    '{{- \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- ', \"id\": \"' + call.id + '\"}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']</s>' }}"
    "{%- else %}{{- m.content + '</s>' }}{%- endif %}{%- endfor %}"
)
_GEMMA = (
    "{{- '<s>' }}{%- for m in messages %}{%- if m.role not in ('user', 'assistant') %}"
    "{{- raise_exception('no role ' + m.role) }}{%- endif %}"
    "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{- m.content | trim + '<end_of_turn>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"
)
_BAR, _GAP = "\uff5c", "\u2581"
_DEEPSEEK = (
    (
        "{{- tools | tojson if tools else '' }}{%- for m in messages %}{%- if m.role == 'user' %}"
        "{{- '<|User|>' + m.content + '<|Assistant|>' }}{%- elif m.role == 'tool' %}"
        "{{- '<|tool-output|>' + m.content }}{%- else %}{{- m.content }}{%- if m.tool_calls %}"
        "{{- '<|tool-calls-begin|>' }}{%- for call in m.tool_calls %}"
        "{{- '<|tool-call-begin|>function<|tool-sep|>' + call.function.name + '\n```json\n' }}"
        "{{- call.function.arguments | tojson }}{{- '\n```<|tool-call-end|>' }}{%- endfor %}"
        "{{- '<|tool-calls-end|>' }}{%- endif %}{{- '</s>' }}{%- endif %}{%- endfor %}"
    )
    .replace("<|", f"<{_BAR}")
    .replace("|>", f"{_BAR}>")
    .replace("tool-", f"tool{_GAP}")
)
_DEEPSEEK = _DEEPSEEK.replace("-begin", f"{_GAP}begin").replace("-end", f"{_GAP}end")

TEMPLATES = {
    "qwen2.5": _chatml(_AS_IT_IS),
    "qwen3": _chatml(_RECENT_THINKING, calls=_QWEN3_CALLS, before=_LAST_QUERY),
    "qwen3-coder": _chatml(_AS_IT_IS, calls=_XML_CALLS),
    "qwq": _chatml(_LAST_WORDS, prompt="<think>\n"),
    "opens thinking": _chatml(_AS_IT_IS, prompt="<think>\n"),
    "trims": _chatml("{%- set spoken = m.content | trim %}"),
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "gemma": _GEMMA,
    "deepseek": _DEEPSEEK,
}
FORMATS: dict[str, ToolFormat] = {
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "qwen3-coder": "xml",
    "qwq": "hermes",
    "opens thinking": "hermes",
    "trims": "hermes",
    "llama": "llama",
    "mistral": "mistral",
    "deepseek": "deepseek",
}
STOPS = {"llama": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>", "deepseek": "</s>"}


def stop_of(family: str) -> str:
    """The token that ends a turn."""
    return STOPS.get(family, "<|im_end|>")


_SPECIAL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "<start_of_turn>",
    "<end_of_turn>",
    f"<{_BAR}tool{_GAP}sep{_BAR}>",
)
_PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")


@cache
def _trained() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = 'the user asks and the assistant answers "name": "add", "arguments": {"a": 1} \n\n'
    backend.train_from_iterator([words] * 4, trainer)
    for special, tokens in ((True, _SPECIAL), (False, _PLAIN)):
        backend.add_tokens([AddedToken(t, special=special, normalized=False) for t in tokens])
    return backend.to_str()


@cache
def chat_tokenizer(family: str) -> PreTrainedTokenizerBase:
    """Byte-level BPE with every family's control tokens, and the family's chat template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_trained()))
    tokenizer.chat_template = TEMPLATES[family]
    return tokenizer
