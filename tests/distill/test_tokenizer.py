"""Two tokenizers agree on every id, or the first difference is an error."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.errors import CheckpointError, ConfigError
from distill.models.loading import load_config
from distill.tokenizer import (
    check_same_tokenizer,
    fingerprint,
    load_tokenizer,
    probe_tokenizer,
)
from tests.refusals import refuses
from tests.tiny import save_tokenizer, tiny_model_dir


@pytest.fixture
def make(tmp_path: Path):
    def made(**settings: Any) -> PreTrainedTokenizerBase:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        save_tokenizer(directory, **settings)
        return load_tokenizer(str(directory))

    return made


@pytest.mark.parametrize(
    "settings", [{"alphabet": "acb"}, {"alphabet": "ab"}, {"alphabet": "abcd"}]
)
def test_the_first_difference_is_named(make, settings: dict) -> None:
    student, teacher = make(alphabet="abc"), make(**settings)
    assert fingerprint(student) != fingerprint(teacher)
    with refuses(ConfigError, "teacher.model"):
        check_same_tokenizer(student, teacher)


def test_one_vocabulary_two_encodings(make) -> None:
    student, teacher = make(), make()
    teacher.backend_tokenizer.normalizer = normalizers.Lowercase()
    with refuses(ConfigError, "teacher.model"):
        check_same_tokenizer(student, teacher)


def test_a_template_that_refuses_the_probe_is_no_obstacle(make) -> None:
    refusing = make(chat_template="{{ raise_exception('no system message') }}")
    assert probe_tokenizer(refusing) == probe_tokenizer(make(chat_template=None))


def test_the_fingerprint_covers_the_chat_template(make) -> None:
    plain, chat = fingerprint(make(chat_template=None)), fingerprint(make())
    assert plain.chat_template_hash is None and chat.chat_template_hash is not None
    assert plain.vocab_hash == chat.vocab_hash
    assert fingerprint(make(chat_template="x")).chat_template_hash != chat.chat_template_hash


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    weights_only = tiny_model_dir(tmp_path, seed=0, hidden_size=32, layers=1)
    (tmp_path / "run" / "final").mkdir(parents=True)
    for path in (str(tmp_path / "nowhere"), weights_only, str(tmp_path / "run")):
        with pytest.raises(CheckpointError):
            load_tokenizer(path)
    with pytest.raises(CheckpointError):
        load_config(str(tmp_path / "run"))


def test_truncation_in_the_file_is_off_before_threads_encode(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    backend = Tokenizer.from_file(str(path))
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(path))
    loaded = load_tokenizer(str(tmp_path)).backend_tokenizer
    assert isinstance(loaded, Tokenizer)
    assert (loaded.truncation, loaded.padding) == (None, None)


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"version": "1.0"})])
def test_a_corrupt_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError):
        load_tokenizer(str(tmp_path))
