"""Tiny checkpoints that every loader accepts."""

import string
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.models.loading import new_qwen3
from distill.tokenizer import load_tokenizer
from tests.rows import write_rows

VOCAB_SIZE = 160
EOS = 1
PAD = 0
# Sizes of most families' configs, for models that no server has to load.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": EOS,
}  # fmt: skip


@dataclass(frozen=True)
class TinyPair:
    """Two models with one tokenizer, and prompts for them."""

    student: str
    teacher: str
    prompts: str


def make_tiny_pair(root: Path) -> TinyPair:
    """Save a pair under `root`; the teacher is the larger one."""
    student = tiny_model_dir(root, seed=1, hidden_size=32, layers=1)
    teacher = tiny_model_dir(root, seed=2)
    for directory in (student, teacher):
        save_tokenizer(directory)
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(4) for b in range(5)]
    prompts = write_rows(root / "prompts.jsonl", *rows)
    return TinyPair(student=student, teacher=teacher, prompts=prompts)


def tiny_model_dir(
    path: Path,
    *,
    seed: int,
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    context_length: int = 128,
    eos_token_id: int = EOS,
    sharpness: float = 12.0,
) -> str:
    """Save a random Qwen3-shaped model under `path`; return its directory.

    A freshly initialised model is nearly uniform and almost ignores its context, which would hide
    mistakes in temperatures, caches and masks. So the layers' weights are four times as large, and
    `sharpness` scales the final norm: 12 gives logits of standard deviation about 2.
    """
    model = new_qwen3(
        vocab_size=vocab_size, hidden_size=hidden_size, layers=layers, heads=heads,
        context_length=context_length, eos_token_id=eos_token_id, pad_token_id=PAD, seed=seed,
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight"):
            parameter.data.mul_(4)
    model.model.norm.weight.data.mul_(sharpness)
    directory = path / f"qwen3-{seed}-{vocab_size}-{hidden_size}x{layers}"
    model.save_pretrained(directory)
    return str(directory)


def token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    return tokenizer.get_vocab()[token]


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@cache
def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Tokenizer that `save_tokenizer` saves by default."""
    with TemporaryDirectory() as directory:
        save_tokenizer(directory)
        return load_tokenizer(directory)


def save_tokenizer(
    directory: str | Path,
    *,
    alphabet: str = string.printable[:-3],
    unk_token: str | None = "<unk>",
    eos_token: str = "<eos>",
    chat_template: str | None = CHAT_TEMPLATE,
) -> None:
    """Save a tokenizer of characters: pad 0, eos 1, unk 2, then `alphabet` from 3 on."""
    ids = {
        token: i for i, token in enumerate(["<pad>", "<eos>", unk_token or "<unused>", *alphabet])
    }
    backend = Tokenizer(models.WordLevel(ids, unk_token=unk_token))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token=eos_token, unk_token=unk_token
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
