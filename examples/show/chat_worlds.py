"""Chat tasks that a tiny model learns in minutes: products, tic-tac-toe, documents.

For each task, functions here generate prompts, and conversations for supervised fine-tuning: good
ones for a teacher, careless ones for a student. The tokenizer is trained on the conversations, so
text that all of them repeat takes one or two tokens.

    products     "What is 347*58?" -> a call of the calculator -> "20126". Careless: guess instead.
    tic-tac-toe  transcripts of random players. Careless: moves to squares that are taken.
    documents    find the highest or the lowest of many digits, read in parts; the notes hold the
                 best digit so far. Careless: the notes of earlier parts are forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from distill.chat.template import chat_text
from distill.envs.games.tic_tac_toe import TicTacToe, free_squares
from distill.envs.games.two_player import IllegalMove
from distill.envs.reading import TERSE
from distill.models.loading import new_qwen3
from distill.tools.calculator import Calculator

Row = Mapping[str, Any]
Messages = list[dict[str, Any]]

PAD, EOS = "<|pad|>", "<|im_end|>"
_START = "<|im_start|>"
_CALL = ("<tool_call>", "</tool_call>")
# ChatML, with tools and tool calls in the format of Qwen and Hermes models.
_CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}\
{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}\
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}\
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}\
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}\
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Characters that are always single tokens, because models copy them one by one.
DIGITS_APART, SQUARES_APART, CAPITALS_APART = r"[0-9*]", r"[0-9XO.]", r"[0-9A-Z|>=\-]"


def train_chat_tokenizer(
    directory: str | Path, rows: Iterable[Row], apart: str
) -> PreTrainedTokenizerFast:
    """Train a tokenizer on conversations and save it in `directory`.

    Args:
        apart: regular expression of the characters that are always single tokens. Other text is
            merged into longer tokens (BPE).
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(apart), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, chat_template=_CHAT_TEMPLATE
    )
    texts = [
        chat_text(tokenizer, row["messages"], tools=row.get("tools"), add_generation_prompt=True)
        for row in rows
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=[PAD, EOS, _START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in _CALL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[_START],
        chat_template=_CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def write_untrained(
    directory: str | Path, rows: Sequence[Row], apart: str, *, context_length: int, seed: int
) -> None:
    """Save a tiny untrained model, with a tokenizer trained on the first 500 rows."""
    tokenizer = train_chat_tokenizer(directory, rows[:500], apart)
    vocabulary = tokenizer.get_vocab()
    new_qwen3(
        vocab_size=len(tokenizer),
        hidden_size=64,
        layers=2,
        heads=4,
        context_length=context_length,
        eos_token_id=vocabulary[EOS],
        pad_token_id=vocabulary[PAD],
        seed=seed,
    ).save_pretrained(directory)


# products


def products(count: int, seed: int) -> list[tuple[int, int]]:
    """Draw `count` distinct pairs of a three-digit and a two-digit number."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(900 * 90, size=count, replace=False)
    return [(100 + int(n) // 90, 10 + int(n) % 90) for n in chosen]


def product_prompts(pairs: Sequence[tuple[int, int]]) -> list[Row]:
    """Prompt rows with `messages` and `answer`."""
    return [{"messages": [_question(a, b)], "answer": str(a * b)} for a, b in pairs]


def product_rows(pairs: Sequence[tuple[int, int]], *, guesses: float, seed: int = 0) -> list[Row]:
    """One conversation per pair. With probability `guesses` it is a wrong answer without a call."""
    rng = np.random.default_rng(seed)
    schema = Calculator().schema
    rows: list[Row] = []
    for a, b in pairs:
        messages: Messages = [_question(a, b)]
        if rng.random() < guesses:
            messages.append(_assistant(str(int(rng.integers(1_000, 90_000)))))
        else:
            arguments = json.dumps({"expression": f"{a}*{b}"})
            call = {"name": "calculator", "arguments": arguments}
            messages += [
                {**_assistant(""), "tool_calls": [{"type": "function", "function": call}]},
                {"role": "tool", "content": str(a * b)},
                _assistant(str(a * b)),
            ]
        rows.append({"messages": messages, "tools": [schema]})
    return rows


def _question(a: int, b: int) -> dict[str, Any]:
    return {"role": "user", "content": f"What is {a}*{b}?"}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


# tic-tac-toe


def game_rows(games: int, *, blunders: float, seed: int = 0) -> list[Row]:
    """Two conversations per game, one per seat, of players that choose free squares at random.

    With probability `blunders` a move is any of the nine squares; a taken square ends the game.
    """
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for _ in range(games):
        game, seats = TicTacToe(), [Messages(), Messages()]
        while game.scores is None:
            seat = game.to_move
            squares = range(9) if rng.random() < blunders else free_squares(game.board)
            move = str(int(rng.choice(list(squares))) + 1)
            seats[seat] += [{"role": "user", "content": game.view(seat)}, _assistant(move)]
            try:
                game.move(move)
            except IllegalMove:
                break
        rows += [{"messages": messages} for messages in seats if messages]
    return rows


# documents


def documents(count: int, numbers: int, seed: int) -> list[Row]:
    """Rows of `document`, `question` and `answer`.

    A document is one digit per line. Question H asks for the highest digit, L for the lowest.
    """
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for _ in range(count):
        low, high = int(rng.integers(4)), int(rng.integers(6, 10))
        digits = rng.integers(low + 1, high, size=numbers)
        digits[rng.choice(numbers, size=2, replace=False)] = low, high  # each occurs once
        question = str(rng.choice(list(_ANSWERS)))
        answer = str(_ANSWERS[question](digits.tolist()))
        rows.append(
            {
                "document": "\n".join(map(str, digits.tolist())),
                "question": question,
                "answer": answer,
                "facts": [answer],
            }
        )
    return rows


_ANSWERS: dict[str, Callable[[list[int]], int]] = {"H": max, "L": min}


def reading_rows(
    rows: Iterable[Row], *, lines_per_part: int, forgets: float, seed: int = 0
) -> list[Row]:
    """One conversation per turn of each reading.

    Args:
        forgets: probability that a turn ignores the earlier notes and reports its own part only.
    """
    rng = np.random.default_rng(seed)
    turns: list[Row] = []
    for row in rows:
        lines, question, notes = row["document"].split("\n"), row["question"], ""
        for start in range(0, len(lines), lines_per_part):
            part = lines[start : start + lines_per_part]
            shown = TERSE.read.format(question=question, notes=notes, part="\n".join(part))
            kept = [notes] if notes and rng.random() >= forgets else []
            notes = str(_ANSWERS[question]([int(digit) for digit in [*part, *kept]]))
            turns.append({"messages": [{"role": "user", "content": shown}, _assistant(notes)]})
        shown = TERSE.answer.format(question=question, notes=notes)
        turns.append({"messages": [{"role": "user", "content": shown}, _assistant(notes)]})
    return turns
