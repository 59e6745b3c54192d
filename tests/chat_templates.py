"""Chat templates like those of common model families, and one tokenizer for all of them.

Each template is as short as possible while it keeps the behaviour that makes its family hard.
"""

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
    """ChatML; `spoken` sets how the assistant's content is written."""
    return (
        f"{_TOOLS}{before}{{%- for m in messages %}}{_HEARD}"
        f"{{%- else %}}{spoken}{{{{- '<|im_start|>assistant\n' + spoken }}}}{calls}"
        "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}"
        f"{{{{- '<|im_start|>assistant\n{prompt}' }}}}{{%- endif %}}"
    )


_AS_IT_IS = "{%- set spoken = m.content %}"
_LAST_WORDS = "{%- set spoken = m.content.split('</think>')[-1].lstrip('\n') %}"
# Thinking since the last question stays; an empty block is written where there was none.
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
    "{{- '<parameter=' + key + '>\n' ~ (value | tojson if value is mapping or "
    "(value is iterable and value is not string) else value) ~ '\n</parameter>\n' }}"
    "{%- endfor %}"
    "{{- '</function>\n</tool_call>' }}{%- endfor %}"
)
# At most one call, without text.
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

_EACH_CALL = (
    "{%- for call in m.tool_calls or [] %}{%- set name = call.function.name %}"
    "{%- set arguments = call.function.arguments %}"
)
_GAP_BEFORE = "{%- if spoken or not loop.first %}{{- '\n' }}{%- endif %}"
_JSON_OR_TEXT = "{{- (value if value is string else value | tojson) }}"
_GLM_CALLS = (
    f"{_EACH_CALL}{_GAP_BEFORE}{{{{- '<tool_call>' + name + '\n' }}}}"
    "{%- for key, value in arguments.items() %}"
    "{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' }}"
    f"{_JSON_OR_TEXT}{{{{- '</arg_value>\n' }}}}{{%- endfor %}}"
    "{{- '</tool_call>' }}{%- endfor %}"
)


def _invoke_calls(tag: str, section: str, gap: str, kind: str = "") -> str:
    return (
        f"{{%- if m.tool_calls %}}{{{{- ('{gap}' if spoken) ~ '<{section}>\n' }}}}{_EACH_CALL}"
        f"{{{{- '<{tag}invoke name=\"' + name + '\">\n' }}}}"
        "{%- for key, value in arguments.items() %}"
        f"{{{{- '<{tag}parameter name=\"' + key + '\"{kind}>' }}}}{_JSON_OR_TEXT}"
        f"{{{{- '</{tag}parameter>\n' }}}}{{%- endfor %}}"
        f"{{{{- '</{tag}invoke>\n' }}}}{{%- endfor %}}"
        f"{{{{- '</{section}>' }}}}{{%- endif %}}"
    )


_DSML = f"{_BAR}DSML{_BAR}"
_KIND = " string=\"' ~ ('true' if value is string else 'false') ~ '\""
_KIMI_CALLS = (
    "{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}"
    f"{_EACH_CALL}{{{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}}}"
    "{{- arguments | tojson + '<|tool_call_end|>' }}{%- endfor %}"
    "{{- '<|tool_calls_section_end|>' }}{%- endif %}"
)
_GEMMA_VALUE = (
    "{%- macro written(value) %}{%- if value is string %}{{- '<|\"|>' + value + '<|\"|>' }}"
    "{%- elif value is mapping %}{{- '{' }}{%- for key, inner in value | dictsort %}"
    "{{- key + ':' + written(inner) }}{{- '' if loop.last else ',' }}{%- endfor %}{{- '}' }}"
    "{%- elif value is iterable %}{{- '[' }}{%- for inner in value %}{{- written(inner) }}"
    "{{- '' if loop.last else ',' }}{%- endfor %}{{- ']' }}"
    "{%- elif value is boolean %}{{- value | tojson }}{%- else %}{{- value }}{%- endif %}"
    "{%- endmacro %}"
)
_GEMMA_CALLS = (
    f"{_EACH_CALL}{{{{- '<|tool_call>call:' + name + written(arguments) + '<tool_call|>' }}}}"
    "{%- endfor %}"
)
_PYTHON_CALLS = (
    f"{{%- if m.tool_calls %}}{{{{- '<|tool_call_start|>[' }}}}{_EACH_CALL}{{{{- name + '(' }}}}"
    "{%- for key, value in arguments.items() %}{{- key + '=' + value | tojson }}"
    "{{- '' if loop.last else ', ' }}{%- endfor %}{{- ')' + ('' if loop.last else ', ') }}"
    "{%- endfor %}{{- ']<|tool_call_end|>' }}{%- endif %}"
)
# Text stands between marks, followed by any number of calls.
_LLAMA4_WORDS = (
    "{%- set spoken = m.content if not m.tool_calls "
    "else '<|python_start|>' + m.content + '<|python_end|>' %}"
)
_LLAMA4_CALLS = (
    f'{_EACH_CALL}{{{{- \'{{"name": "\' + name + \'", "parameters": \' }}}}'
    "{{- arguments | tojson + '}' }}{%- endfor %}"
)
# At most one call; its text is thinking.
_HARMONY = (
    "{{- tools | tojson if tools else '' }}{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{%- if not messages[loop.index0 - 1].tool_calls %}{{- raise_exception('no call') }}"
    "{%- endif %}"
    "{{- '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{- m.content | tojson + '<|end|>' }}{%- elif m.role != 'assistant' %}"
    "{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- elif m.tool_calls %}"
    "{%- if m.content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.content }}"
    "{{- '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name }}"
    "{{- '<|channel|>commentary json<|message|>' }}"
    "{{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}{%- else %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{%- endif %}{%- endfor %}{{- '<|start|>assistant' if add_generation_prompt else '' }}"
)

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
    "deepseek v3.2": _chatml(
        _AS_IT_IS, calls=_invoke_calls(_DSML, f"{_DSML}function_calls", "\n\n", _KIND)
    ),
    "glm": _chatml(_AS_IT_IS, calls=_GLM_CALLS),
    "gemma4": _chatml(_AS_IT_IS, calls=_GEMMA_CALLS, before=_GEMMA_VALUE),
    "gpt-oss": _HARMONY,
    "kimi": _chatml(_AS_IT_IS, calls=_KIMI_CALLS),
    "lfm2.5": _chatml(_AS_IT_IS, calls=_PYTHON_CALLS),
    "llama4": _chatml(_LLAMA4_WORDS, calls=_LLAMA4_CALLS),
    "minimax": _chatml(_AS_IT_IS, calls=_invoke_calls("", "minimax:tool_call", "\n")),
}
# Differ from "qwen2.5" only in the format of calls.
ONLY_CALLS = ("deepseek v3.2", "glm", "gemma4", "kimi", "lfm2.5", "llama4", "minimax")
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
    "deepseek v3.2": "dsml",
    "glm": "glm",
    "gemma4": "gemma",
    "gpt-oss": "harmony",
    "kimi": "kimi",
    "lfm2.5": "pythonic",
    "llama4": "llama",
    "minimax": "minimax",
}


BAR, GAP = "\uff5c", "\u2581"


def deepseek(words: str) -> str:
    return f"<{BAR}{words.replace(' ', GAP)}{BAR}>"


def deepseek_call(arguments: str = '{"a": 1, "b": 2}') -> str:
    return (
        f"{deepseek('tool call begin')}function{deepseek('tool sep')}add\n```json\n{arguments}\n"
        f"```{deepseek('tool call end')}"
    )


def invoke(tag: str = "", kind: str = "") -> str:
    return (
        f'<{tag}invoke name="add">\n<{tag}parameter name="a"{kind}>1</{tag}parameter>\n'
        f'<{tag}parameter name="b"{kind}>2</{tag}parameter>\n</{tag}invoke>'
    )


DSML = f"{BAR}DSML{BAR}"
CALLS = deepseek("tool calls begin"), deepseek("tool calls end")
# A call `add(1, 2)` in variants that models of each format write.
ONE_CALL: dict[ToolFormat, list[str]] = {
    "hermes": [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        '<tool_call>{"arguments": {"a": 1, "b": 2}, "name": "add"}</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n',
    ],
    "xml": [
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        "<tool_call><function=add><parameter=a>1</parameter><parameter=b>2</parameter></function>",
    ],
    "llama": [
        '{"name": "add", "parameters": {"a": 1, "b": 2}}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}',
        '\n\n{"name": "add", "arguments": {"a": 1, "b": 2}} ',
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdefghi"}]',
        '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}',
        '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1, "b": 2}',
    ],
    "deepseek": [
        CALLS[0] + deepseek_call() + CALLS[1],
        CALLS[0]
        + deepseek("tool call begin")
        + "add"
        + deepseek("tool sep")
        # as V3.1 has it
        + '{"a": 1, "b": 2}'
        + deepseek("tool call end")
        + CALLS[1],
    ],
    "dsml": [
        "<DSMLfunction_calls>\n".replace("DSML", DSML)
        + invoke(DSML, ' string="false"')
        + f"\n</{DSML}function_calls>",
        invoke(DSML, ' string="false"'),
        invoke(DSML),
    ],
    "minimax": [f"<minimax:tool_call>\n{invoke()}\n</minimax:tool_call>", invoke()],
    "glm": [
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key>"
        "<arg_value>2</arg_value></tool_call>",
    ],
    "kimi": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1, "b": 2}<|tool_call_end|><|tool_calls_section_end|>',
        '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1, "b": 2}',
    ],
    "harmony": [
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}',
        "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
        '{"a": 1, "b": 2}<|call|>',
        '<|start|>assistant<|channel|>commentary to=add<|message|>{"a": 1, "b": 2}<|call|>',
    ],
    "gemma": ["<|tool_call>call:add{a:1,b:2}<tool_call|>", "<|tool_call>call:add{ b : 2, a : 1 }"],
    "pythonic": [
        "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>",
        "<|python_start|>[add(a=1, b=2)]<|python_end|>",
        "[add(a=1, b=2)]",
    ],
}
STOPS = {
    "llama": "<|eot_id|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "deepseek": "</s>",
    "gpt-oss": "<|call|>",
}


def call_of(family: str) -> str:
    """A call `add(1, 2)` as the family's template writes it."""
    written = ONE_CALL[FORMATS.get(family, "hermes")]
    if family == "llama4":
        return f"<|python_start|><|python_end|>{written[0]}"
    return written[1 if family == "mistral" else 0]


def stop_of(family: str) -> str:
    """Token that ends a turn."""
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
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_start|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|tool_call>",
    '<|"|>',
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
    """Byte-level BPE tokenizer with all families' control tokens and one family's template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_trained()))
    tokenizer.chat_template = TEMPLATES[family]
    return tokenizer
