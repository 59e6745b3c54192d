"""Kept rollouts as supervised rows: their choice, and their exact tokens."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from cluster.inspect.rollouts_to_sft import main
from cluster.store.kept_groups import KeptGroupWriter
from distill.data.example_encoder import ExampleEncoder
from distill.data.sft_rows import load_sft_rows
from distill.errors import DataError
from distill.objective.batching import TrainingRow
from distill.objective.rows import policy_rows
from distill.objective.settings import ObjectiveConfig
from distill.tokenizer import load_tokenizer
from distill.types import Segment, TrajectoryGroup
from tests.conftest import TinyPair
from tests.distill.test_token_rewards import byte_tokenizer
from tests.refusals import refuses
from tests.rows import read_rows
from tests.samples import keep_step, segment, trajectory
from tests.tiny import EOS, VOCAB_SIZE, save_tokenizer

# Two turns, the environment's words between them.
TURNS = segment(
    1, 5, seed=1, action_mask_T=[False, True, True, False, True, False],
    versions_T=[-1, 3, 3, -1, 4, -1],
)  # fmt: skip
READ, ANSWER = segment(3, 2, seed=2), segment(2, 3, seed=3)
LOST, POOR = segment(2, 2, seed=4), segment(4, 4, seed=5)
# The tokens of READ, fewer of them sampled.
READ_LATER = segment(4, 1, seed=6, tokens_T=READ.tokens_T)
GROUPS = [
    TrajectoryGroup(
        group_id=7,
        trajectories_G=(
            trajectory(TURNS, reward=1.0),
            trajectory(READ, ANSWER, reward=1.5),
            trajectory(LOST, POOR, reward=0.5),
        ),
    ),
    TrajectoryGroup(
        group_id=8,
        trajectories_G=(
            trajectory(POOR, reward=0.0),
            trajectory(TURNS, reward=1.0),  # a duplicate
            trajectory(READ, READ_LATER, reward=1.0),
        ),
    ),
]


def write_run(out: Path, student: str, groups: list[TrajectoryGroup] = GROUPS) -> Path:
    out.mkdir()
    settings = {"model": {"path": student}, "keep": "all"}
    (out / "config.json").write_text(json.dumps({"recipe": "rl", "settings": settings}))
    (out / "metrics.jsonl").write_text('{"step": 1}\n')
    log = KeptGroupWriter(out / "groups", 1)
    for step, group in enumerate(groups, 1):
        rows = policy_rows([group], ObjectiveConfig(kl_coef=0, reward_coef=1.0))
        keep_step(log, step, [group], rows)
    return out


@pytest.fixture
def run(tmp_path: Path, tiny_pair: TinyPair) -> Path:
    return write_run(tmp_path / "run", tiny_pair.student)


@pytest.fixture
def convert(run: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """convert(*arguments): the rows that the command writes to data.jsonl."""

    def rows(*arguments: str) -> list[dict[str, Any]]:
        data = tmp_path / "data.jsonl"
        assert main([f"out={run}", f"data={data}", *arguments]) == 0
        return read_rows(data)

    return rows


def load(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[TrainingRow]:
    encoder = ExampleEncoder(
        tokenizer=tokenizer, vocab_size=VOCAB_SIZE, max_length=64, stop_ids={EOS}
    )
    return load_sft_rows(str(path), encoder)


def facts(chain: Segment | TrainingRow) -> tuple[list[int], list[bool]]:
    mask_T = chain.action_mask_T if isinstance(chain, Segment) else chain.loss_mask_T
    return chain.tokens_T.tolist(), mask_T.tolist()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [TURNS, READ, ANSWER, READ_LATER]),
        (["min_reward=1.2"], [READ, ANSWER]),
        (["min_reward=0.5"], [TURNS, READ, ANSWER, LOST, POOR, READ_LATER]),
        (["only=condensed"], [READ, ANSWER, READ_LATER]),
        (["only=condensed", "min_reward=-1"], [READ, ANSWER, LOST, POOR, READ_LATER]),
    ],
)
def test_chosen_segments_keep_their_tokens_and_masks(
    convert: Callable[..., list[dict[str, Any]]], tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase, arguments: list[str], expected: list[Segment],
) -> None:  # fmt: skip
    convert(*arguments)
    rows = load(tmp_path / "data.jsonl", tokenizer)
    assert [facts(row) for row in rows] == [facts(each) for each in expected]


def test_tokens_that_no_text_encodes_to_stay_as_sampled(tmp_path: Path) -> None:
    """The tokenizer has a token `also`; the policy spelt the word, and ended within a character."""
    tokenizer = byte_tokenizer(*["also"] * 50, vocab_size=260)
    tokenizer.save_pretrained(tmp_path / "student")
    spelt = [tokenizer(letter)["input_ids"][0] for letter in "also"]
    half = tokenizer("你")["input_ids"][0]
    assert tokenizer("also")["input_ids"] != spelt
    made = segment(2, 3, tokens_T=np.array([*spelt, half], np.int32))
    group = TrajectoryGroup(group_id=0, trajectories_G=(trajectory(made, reward=1.0),))
    run = write_run(tmp_path / "run", str(tmp_path / "student"), [group])
    data = tmp_path / "data.jsonl"
    assert main([f"out={run}", f"data={data}"]) == 0
    loaded = load_tokenizer(str(tmp_path / "student"))
    encoder = ExampleEncoder(tokenizer=loaded, vocab_size=260, max_length=5, stop_ids=())
    [row] = load_sft_rows(str(data), encoder)
    assert facts(row) == facts(made)
    assert json.loads(data.read_text())["text"] == "also\N{REPLACEMENT CHARACTER}"


def test_a_model_of_another_tokenizer_is_refused(
    convert: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    convert()
    save_tokenizer(tmp_path / "other", alphabet="abc")
    with refuses(DataError, "tokens", names="jsonl:1:"):
        load(tmp_path / "data.jsonl", load_tokenizer(str(tmp_path / "other")))


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("min_reward=2", "1.5"),  # the highest reward
        ("only=condensed min_reward=2", "none of 3 "),
        ("data=data.parquet", "data=data.parquet"),
        ("data={run}/no/data.jsonl", "/no/data.jsonl"),
        ("data={run}/metrics.jsonl/data.jsonl", "metrics.jsonl/data.jsonl"),
        ("out={run}/no", "/no"),
    ],
)
def test_wrong_arguments_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str, named: str
) -> None:
    given = argument.format(run=run).split()
    assert main([f"out={run}", f"data={tmp_path / 'data.jsonl'}", *given]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "data.jsonl").exists()


def test_a_run_without_condensed_trajectories_rollouts_or_tokenizer_is_refused(
    tmp_path: Path, tiny_pair: TinyPair
) -> None:
    single = TrajectoryGroup(group_id=0, trajectories_G=(trajectory(TURNS, reward=1.0),))
    student = shutil.copytree(tiny_pair.student, tmp_path / "student")
    run = write_run(tmp_path / "run", str(student), [single])
    given = [f"out={run}", f"data={tmp_path / 'data.jsonl'}"]
    assert main([*given, "only=condensed"]) == 2
    assert main(given) == 0
    shutil.rmtree(student)
    assert main(given) == 2
    shutil.rmtree(run / "groups")
    assert main(given) == 2
