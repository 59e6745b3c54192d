"""Small worlds to learn in minutes, as chats: products by a calculator, tic-tac-toe, documents.

Each has books for supervised fine-tuning, of conversations that a master or a careless pupil had,
and a tokenizer in which what every conversation repeats is a token or two.

    products     "What is 347*58?" -> a call of the calculator -> "20126". The careless one guesses.
    tic-tac-toe  transcripts of players that take any square, often a taken one
    documents    the highest of many digits, or the lowest, read part by part: the notes are the
                 highest so far. The careless one forgets it from part to part.
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
# ChatML, with tools and their calls as Qwen and Hermes models write them.
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

# Characters that are tokens of their own: what is copied digit by digit, square by square.
DIGITS_APART, SQUARES_APART, CAPITALS_APART = r"[0-9*]", r"[0-9XO.]", r"[0-9A-Z|>=\-]"


def train_chat_tokenizer(
    directory: str | Path, rows: Iterable[Row], apart: str
) -> PreTrainedTokenizerFast:
    """Trains a tokenizer on some conversations and saves it in `directory`.

    Args:
        apart: characters that are tokens of their own; the text between them is merged as far as
            the conversations repeat it.
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
    """Saves a tiny model that knows nothing yet, with a tokenizer trained on some of the rows."""
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
    """So many different pairs: three digits, two digits."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(900 * 90, size=count, replace=False)
    return [(100 + int(n) // 90, 10 + int(n) % 90) for n in chosen]


def product_prompts(pairs: Sequence[tuple[int, int]]) -> list[Row]:
    """`messages` and the `answer`."""
    return [{"messages": [_asked(a, b)], "answer": str(a * b)} for a, b in pairs]


def product_book(pairs: Sequence[tuple[int, int]], *, guesses: float, seed: int = 0) -> list[Row]:
    """A conversation a pair. With probability `guesses` it answers at once, and wrongly."""
    rng = np.random.default_rng(seed)
    schema = Calculator().schema
    rows: list[Row] = []
    for a, b in pairs:
        messages: Messages = [_asked(a, b)]
        if rng.random() < guesses:
            messages.append(_says(str(int(rng.integers(1_000, 90_000)))))
        else:
            arguments = json.dumps({"expression": f"{a}*{b}"})
            call = {"name": "calculator", "arguments": arguments}
            messages += [
                {**_says(""), "tool_calls": [{"type": "function", "function": call}]},
                {"role": "tool", "content": str(a * b)},
                _says(str(a * b)),
            ]
        rows.append({"messages": messages, "tools": [schema]})
    return rows


def _asked(a: int, b: int) -> dict[str, Any]:
    return {"role": "user", "content": f"What is {a}*{b}?"}


def _says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


# tic-tac-toe


def game_book(games: int, *, blunders: float, seed: int = 0) -> list[Row]:
    """Two conversations per game, one per seat, of players that take any free square.

    With probability `blunders` a move is any of the nine squares; a taken one ends the game.
    """
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for _ in range(games):
        game, seats = TicTacToe(), [Messages(), Messages()]
        while game.scores is None:
            seat = game.to_move
            squares = range(9) if rng.random() < blunders else free_squares(game.board)
            move = str(int(rng.choice(list(squares))) + 1)
            seats[seat] += [{"role": "user", "content": game.view(seat)}, _says(move)]
            try:
                game.move(move)
            except IllegalMove:
                break
        rows += [{"messages": messages} for messages in seats if messages]
    return rows


# documents


def documents(count: int, numbers: int, seed: int) -> list[Row]:
    """`document`, `question`, `answer`: digits, a line each; H: which is highest? L: lowest?"""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for _ in range(count):
        low, high = int(rng.integers(4)), int(rng.integers(6, 10))
        digits = rng.integers(low + 1, high, size=numbers)
        digits[rng.choice(numbers, size=2, replace=False)] = low, high  # each occurs once
        question = str(rng.choice(list(_ASKED)))
        answer = str(_ASKED[question](digits.tolist()))
        rows.append(
            {
                "document": "\n".join(map(str, digits.tolist())),
                "question": question,
                "answer": answer,
                "facts": [answer],
            }
        )
    return rows


_ASKED: dict[str, Callable[[list[int]], int]] = {"H": max, "L": min}


def reading_book(
    rows: Iterable[Row], *, lines_a_part: int, forgets: float, seed: int = 0
) -> list[Row]:
    """A conversation a turn of each reading; a turn that forgets notes the part that it sees alone.

    `forgets` is how often a turn does.
    """
    rng = np.random.default_rng(seed)
    book: list[Row] = []
    for row in rows:
        lines, question, notes = row["document"].split("\n"), row["question"], ""
        for start in range(0, len(lines), lines_a_part):
            part = lines[start : start + lines_a_part]
            shown = TERSE.read.format(question=question, notes=notes, part="\n".join(part))
            kept = [notes] if notes and rng.random() >= forgets else []
            notes = str(_ASKED[question]([int(digit) for digit in [*part, *kept]]))
            book.append({"messages": [{"role": "user", "content": shown}, _says(notes)]})
        shown = TERSE.answer.format(question=question, notes=notes)
        book.append({"messages": [{"role": "user", "content": shown}, _says(notes)]})
    return book
