"""Every bad input is found before anything starts, and the message says which and where."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.checks import check_opd, check_sft
from cluster.config import OpdConfig, SftConfig
from distill.errors import CheckpointError, ConfigError, DataError
from tests.conftest import TinyPair
from tests.tiny import save_tokenizer, tiny_model_dir

NewOpd = Callable[..., OpdConfig]
NewSft = Callable[..., SftConfig]


@pytest.fixture
def broken(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    """A copy of the teacher, for a test to break."""
    return Path(shutil.copytree(tiny_pair.teacher, tmp_path / "broken"))


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., str]:
    def write(*rows: dict | str) -> str:
        path = tmp_path / "prompts.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines))
        return str(path)

    return write


def test_good_inputs_are_read_whole(opd: NewOpd, tiny_pair: TinyPair) -> None:
    inputs = check_opd(opd())
    lines = [prompt.line for prompt in inputs.train_prompts_P + inputs.eval_prompts_P]
    assert sorted(lines) == list(range(1, 21))
    assert len(inputs.eval_prompts_P) == 2  # at most a tenth
    first = next(prompt for prompt in inputs.train_prompts_P if prompt.line == 2)
    assert inputs.tokenizer.decode(first.tokens_T.tolist()) == "0 + 1 ="
    assert first.answer == "1"


def test_the_held_out_prompts_follow_the_seed(opd: NewOpd) -> None:
    def held_out(**settings: int) -> list[int]:
        return [prompt.line for prompt in check_opd(opd(**settings)).eval_prompts_P]

    assert held_out(seed=1) == held_out(seed=1)
    assert len({tuple(held_out(seed=seed)) for seed in range(5)}) > 1
    assert len(held_out(eval_size=1)) == 1


def test_evaluation_prompts_of_their_own(opd: NewOpd, prompts) -> None:
    inputs = check_opd(opd(eval_prompts=prompts({"prompt": "a"}, {"prompt": "b"}), eval_size=1))
    assert len(inputs.train_prompts_P) == 20
    assert [inputs.tokenizer.decode(p.tokens_T.tolist()) for p in inputs.eval_prompts_P] == ["a"]


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_missing_checkpoints(opd: NewOpd, role: str, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=f"cannot read a model config from '{nowhere}'"):
        check_opd(opd(**{role: nowhere}))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty has no config\.json"):
        check_opd(opd(**{role: str(tmp_path / "empty")}))


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_missing_and_corrupt_weights(opd: NewOpd, broken: Path, role: str) -> None:
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    for kept in (whole[:-1], whole[:50], b"", b"\xff" * 100):
        weights.write_bytes(kept)
        with pytest.raises(CheckpointError, match=rf"{weights} is corrupt or cut short"):
            check_opd(opd(**{role: str(broken)}))
    weights.unlink()
    with pytest.raises(CheckpointError, match="broken holds no weights"):
        check_opd(opd(**{role: str(broken)}))


def test_a_corrupt_config(opd: NewOpd, broken: Path) -> None:
    (broken / "config.json").write_text('{"model_type": "qwen3", "hidden_size": "wide"}')
    with pytest.raises(CheckpointError, match=r"cannot read a model config .*hidden_size"):
        check_opd(opd(teacher=str(broken)))


def test_a_missing_tokenizer(opd: NewOpd, tmp_path: Path) -> None:
    bare = tiny_model_dir(tmp_path, seed=3, hidden_size=32, layers=1)
    with pytest.raises(CheckpointError, match=f"cannot load a tokenizer from '{bare}'"):
        check_opd(opd(teacher=bare))


def test_tokenizers_that_differ(opd: NewOpd, broken: Path) -> None:
    save_tokenizer(broken, alphabet="0123456798")
    with pytest.raises(ConfigError, match="id 11 is '8' to the student and '9' to the teacher"):
        check_opd(opd(teacher=str(broken)))


def test_a_model_too_small_for_its_tokenizer(opd: NewOpd, tmp_path: Path) -> None:
    small = tiny_model_dir(tmp_path, seed=3, hidden_size=32, layers=1, vocab_size=50)
    save_tokenizer(small)
    with pytest.raises(
        ConfigError, match=r"teacher=.* has a vocabulary of 50, smaller than .* 100;"
    ):
        check_opd(opd(teacher=small))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "not valid JSON"),
        ('"a"', "expected a JSON object"),
        ({"text": "a"}, "exactly one of `prompt`"),
        ({"prompt": ""}, "`prompt` must be a non-empty string"),
        ({"messages": [{"content": "a"}]}, "must be an object with a `role`"),
        ({"prompt": "x" * 121}, "has 121 tokens, and max_new_tokens=8 more exceed the model's"),
    ],
)
@pytest.mark.parametrize("setting", ["prompts", "eval_prompts"])
def test_bad_prompts_by_file_and_line(opd: NewOpd, prompts, setting: str, line, message) -> None:
    path = prompts({"prompt": "good"}, "", line)
    with pytest.raises(DataError, match=f"{path}:3: .*{message}"):
        check_opd(opd(**{setting: path}))


def test_the_longest_of_training_and_evaluation_must_fit(opd: NewOpd, prompts) -> None:
    path = prompts({"prompt": "x" * 100})
    assert check_opd(opd(prompts=path)).train_prompts_P[0].tokens_T.shape == (100,)
    with pytest.raises(DataError, match=r":1: .* max_new_tokens=29 more"):
        check_opd(opd(prompts=path, eval_max_new_tokens=29))


def test_the_shorter_context_counts(opd: NewOpd, prompts, tmp_path: Path) -> None:
    short = tiny_model_dir(tmp_path, seed=3, hidden_size=32, layers=1, context_length=32)
    save_tokenizer(short)
    with pytest.raises(DataError, match="exceed the model's context of 32"):
        check_opd(opd(teacher=short, prompts=prompts({"prompt": "x" * 25})))


@pytest.mark.parametrize("setting", ["prompts", "eval_prompts"])
def test_empty_and_missing_prompt_files(opd: NewOpd, prompts, setting: str) -> None:
    with pytest.raises(DataError, match=r"prompts\.jsonl holds no rows"):
        check_opd(opd(**{setting: prompts("", "  ")}))
    with pytest.raises(DataError, match=r"cannot read '/nowhere\.jsonl'"):
        check_opd(opd(**{setting: "/nowhere.jsonl"}))


def test_a_reward_needs_answers(opd: NewOpd, prompts) -> None:
    path = prompts({"prompt": "a", "answer": "b"}, {"prompt": "c"})
    with pytest.raises(
        ConfigError, match=rf"reward_coef=1.0 needs an `answer` .*{path}:2 has none"
    ):
        check_opd(opd(prompts=path, reward_coef=1.0))
    assert len(check_opd(opd(prompts=path)).train_prompts_P) == 2


def test_supervised_rows(sft: NewSft, prompts) -> None:
    assert len(check_sft(sft()).rows_D) == 6
    path = prompts({"prompt": "a", "completion": "b"}, {"prompt": "a"})
    with pytest.raises(DataError, match=f"{path}:2: `completion` must be a non-empty string"):
        check_sft(sft(data=path))
    path = prompts({"prompt": "a", "completion": "b" * 127})
    with pytest.raises(DataError, match=f"{path}:1: 129 tokens exceed the limit of 128"):
        check_sft(sft(data=path))
    with pytest.raises(DataError, match="129 tokens exceed the limit of 16"):
        check_sft(sft(data=path, max_length=16))


@pytest.mark.parametrize("max_length", [1, 129])
def test_supervised_lengths_fit_the_model(sft: NewSft, max_length: int) -> None:
    with pytest.raises(ConfigError, match=f"max_length={max_length} must be between 2 and .* 128"):
        check_sft(sft(max_length=max_length))


def test_a_supervised_checkpoint_is_looked_at(sft: NewSft, broken: Path) -> None:
    (broken / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is corrupt or cut short"):
        check_sft(sft(model=str(broken)))
