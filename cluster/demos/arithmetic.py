"""The demo's task: two-digit sums, and answers with forgotten carries.

    prompt "47+85="   answer "231"      47 + 85 = 132, written units first

Operands are zero-padded to two digits, and the sum has three digits, in the order of addition by
hand: units, tens, hundreds. A model writes each digit when it knows the carry into it, so a tiny
model learns the task in seconds. There are 100 x 100 problems. The seeded held-out problems appear
in no training file, so accuracy on them measures carrying, not memorised sums.

Answers with errors drop the 1 with a given probability at each column that carries. A model trained
on them adds digits perfectly and carries too rarely.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

OPERAND_DIGITS = 2
ANSWER_TOKENS = OPERAND_DIGITS + 2  # the sum's digits and EOS: max_new_tokens of this task
ALPHABET = "0123456789+="

# Messages are concatenated unchanged, so one user message renders to the plain prompt.
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """The problem `left` + `right`; both are in [0, 100)."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left:0{OPERAND_DIGITS}d}+{self.right:0{OPERAND_DIGITS}d}="

    @property
    def answer(self) -> str:
        """The sum, units first."""
        return f"{self.left + self.right:0{OPERAND_DIGITS + 1}d}"[::-1]

    def answer_with_errors(self, forget_carry: float, rng: np.random.Generator) -> str:
        """The sum, units first; each carry is dropped with probability `forget_carry`."""
        digits, carry = "", 0
        for column in range(OPERAND_DIGITS):
            total = self.left // 10**column % 10 + self.right // 10**column % 10 + carry
            digits += str(total % 10)
            carry = int(total >= 10 and rng.random() >= forget_carry)
        return digits + str(carry)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problems:
    """All problems in a seeded order: some for training, the others held out."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]

    @classmethod
    def split(cls, *, held_out: int, seed: int) -> Problems:
        """Hold out `held_out` problems by a seeded permutation; the others are for training."""
        count = 10 ** (2 * OPERAND_DIGITS)
        assert 0 < held_out < count
        order = np.random.default_rng(seed).permutation(count).tolist()
        problems = tuple(Problem(*divmod(index, 10**OPERAND_DIGITS)) for index in order)
        return cls(train=problems[held_out:], held_out=problems[:held_out])


def write_prompts(path: str | Path, problems: Iterable[Problem]) -> None:
    """Write JSONL rows of `prompt` and reference `answer`."""
    write_jsonl(path, ({"prompt": p.prompt, "answer": p.answer} for p in problems))


def write_sft(path: str | Path, problems: Iterable[Problem]) -> None:
    """Write JSONL rows of `prompt` and correct `completion`, without EOS: training appends it."""
    write_jsonl(path, ({"prompt": p.prompt, "completion": p.answer} for p in problems))


def write_sft_with_errors(
    path: str | Path,
    problems: Iterable[Problem],
    *,
    forget_carry: float,
    seed: int,
    answers_each: int,
) -> None:
    """Write a file as `write_sft` does, with several answers to each problem, some with errors.

    With one answer to each problem, a student would memorise the errors instead of learning to add.

    Args:
        forget_carry: probability that a carry is forgotten.
        answers_each: number of answers to each problem, which are independent of one another.
    """
    assert 0 <= forget_carry <= 1 and answers_each >= 1
    rng = np.random.default_rng(seed)
    write_jsonl(
        path,
        (
            {"prompt": p.prompt, "completion": p.answer_with_errors(forget_carry, rng)}
            for p in problems
            for _ in range(answers_each)
        ),
    )


def train_tokenizer(directory: str | Path, problems: Sequence[Problem]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of single characters on the problems' text and save it in `directory`.

    Special tokens come first (pad 0, eos 1, unk 2), then `ALPHABET` in the order of its code
    points, independent of the problems: no token is longer than a character.
    """
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        special_tokens=["<pad>", "<eos>", "<unk>"],
        initial_alphabet=list(ALPHABET),
        show_progress=False,
    )
    backend.train_from_iterator([p.prompt + p.answer for p in problems], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def write_jsonl(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
