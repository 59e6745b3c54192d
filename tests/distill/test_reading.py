"""Documents longer than the context: parts, notes, separate segments, and refusals."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from actors.rollout.episode import rollout_group
from distill.envs.base import EnvDataset
from distill.envs.reading import Reading
from distill.errors import ConfigError, DataError, IsothermError
from distill.sampling import TrainSampling
from distill.types import Trajectory
from examples.show.chat_worlds import CAPITALS_APART, documents, reading_rows
from tests.refusals import refuses
from tests.rows import write_rows
from tests.samples import TEMPERATURE
from tests.scripted import Scripted, setting, trained_tokenizer

BOOK = reading_rows(documents(30, 24, seed=0), lines_per_part=4, forgets=0.2)
TOKENIZER = trained_tokenizer(BOOK, CAPITALS_APART)

SAMPLING = TrainSampling(temperature=TEMPERATURE, max_new_tokens=8)
# Four documents of 24 lines, a word of two letters and a number each.
ROWS = [
    {
        "document": "\n".join(f"{chr(65 + i)}{chr(66 + d)} {10 + 3 * i + d}" for i in range(24)),
        "question": f"{chr(65 + 5 * d + 3)}{chr(66 + d)}",
        "answer": f"{10 + 3 * (5 * d + 3) + d}",
        "facts": [f"{10 + 3 * (5 * d + 3) + d}"],
    }
    for d in range(4)
]


def dataset(
    directory: Path,
    rows: list[Mapping[str, object]] | None = None,
    context_length: int = 64,
    **settings: object,
) -> EnvDataset:
    path = write_rows(directory / "documents.jsonl", *(ROWS if rows is None else rows))
    config = Reading(**{"terse": True} | settings)  # pyright: ignore[reportArgumentType]
    return config(path, setting(TOKENIZER, context_length=context_length, max_new_tokens=8))


def reads(row: Mapping[str, str]):
    """Write the number down when it is shown, and keep it."""

    def script(_turn: int, seen: str) -> str:
        shown = seen.rpartition("user\n")[2].partition("<|im_end|>")[0]
        _, notes, *part = shown.split("|")
        if not part:
            return notes.partition("=")[0]
        return row["answer"] if row["question"] in part[0] else notes or "-"

    return script


def played(problems: EnvDataset, policy: Scripted, problem: int = 0) -> Trajectory:
    rolled = rollout_group(policy, problems.builder(problem, 1), SAMPLING, group_id=0, seed=0)
    return asyncio.run(rolled).trajectories_G[0]


def test_a_document_is_read_in_parts(tmp_path: Path) -> None:
    policy = Scripted(TOKENIZER, reads(ROWS[0]))
    made = played(dataset(tmp_path, fact_bonus=0.5), policy)
    assert made.reward == 1.0 and made.metrics["facts_kept"] == 1.0
    assert set(made.metrics) == set(Reading().metric_names)
    assert len(made.segments) == len(policy.seen) > 3  # each turn begins afresh
    shown = "".join(policy.seen)
    assert all(line in shown for line in ROWS[0]["document"].split("\n"))
    assert all(len(request.prompt_tokens_T) + 8 <= 64 for request in policy.requests)
    paid = [segment.bonuses_T.sum() for segment in made.segments if segment.bonuses_T is not None]
    kept = sum(ROWS[0]["answer"] in TOKENIZER.decode(s.tokens_T[s.action_mask_T].tolist())
               for s in made.segments[:-1])  # fmt: skip
    assert sum(paid) == pytest.approx(0.5 * kept) and kept >= 1


@pytest.mark.parametrize(("fact", "kept"), [("Ab", 1.0), ("4", 0.0)])
def test_facts_are_counted_as_they_are_paid(tmp_path: Path, fact: str, kept: float) -> None:
    rows: list[Mapping[str, object]] = [{**ROWS[0], "facts": [fact]}]
    made = played(
        dataset(tmp_path, rows=rows, fact_bonus=0.5), Scripted(TOKENIZER, lambda *_: "ab 42")
    )
    assert made.metrics["facts_kept"] == kept
    for notes in made.segments[:-1]:
        assert (0.0 if notes.bonuses_T is None else notes.bonuses_T.sum()) == kept / 2


@pytest.mark.parametrize("by", ["keywords", "tests.distill.test_reading:last_lines"])
def test_a_document_is_condensed_first(tmp_path: Path, by: str) -> None:
    problems = dataset(tmp_path, by=by, part_tokens=30)
    policy = Scripted(TOKENIZER, ["42"])
    made = played(problems, policy)
    assert len(made.segments) == 1
    lines = ROWS[0]["document"].split("\n")
    assert any(line in policy.seen[0] for line in lines)
    assert not all(line in policy.seen[0] for line in lines)
    if by == "keywords":
        assert f"{ROWS[0]['question']} {ROWS[0]['answer']}" in policy.seen[0]


def test_a_document_is_condensed_once_for_its_group(tmp_path: Path) -> None:
    problems = dataset(tmp_path, by="tests.distill.test_reading:counted_lines", part_tokens=30)
    for _ in range(2):
        COUNTED.clear()
        policy = Scripted(TOKENIZER, ["42", "42", "42"])
        rolled = rollout_group(policy, problems.builder(0, 3), SAMPLING, group_id=0, seed=0)
        assert len(asyncio.run(rolled).trajectories_G) == 3
        assert [ROWS[0]["document"]] == COUNTED


COUNTED: list[str] = []


def counted_lines(text: str, focus: str, max_tokens: int) -> str:
    COUNTED.append(text)
    return last_lines(text, focus, max_tokens)


def test_no_part_has_text_of_two_passages(tmp_path: Path) -> None:
    document = "1 2 3\n## 4\n5 6\n## 7\n8 9"
    row = {"document": document, "question": "5", "answer": "6"}
    whole, parted = (
        played(
            dataset(tmp_path, [row], 128, **boundary), Scripted(TOKENIZER, lambda _turn, _seen: "6")
        )
        for boundary in ({}, {"passage_boundary": "(?m)^##"})
    )
    assert (len(whole.segments), len(parted.segments)) == (2, 4)
    seen = [TOKENIZER.decode(each.tokens_T.tolist()) for each in parted.segments]
    assert "## 4\n5 6" in seen[1] and "7" not in seen[1] and "3" not in seen[1]
    with refuses(ConfigError, "env.passage_boundary"):
        Reading(passage_boundary="(")
    with refuses(ConfigError, "env.passage_boundary"):
        Reading(by="keywords", passage_boundary="(?m)^##")


def last_lines(text: str, focus: str, max_tokens: int) -> str:
    return "\n".join(text.split("\n")[-2:])


def test_words_for_models_that_were_not_taught_the_task(tmp_path: Path) -> None:
    policy = Scripted(TOKENIZER, lambda _turn, _seen: "7")
    played(dataset(tmp_path, terse=False, context_length=1024, part_tokens=40), policy)
    assert "Part 1 of" in policy.seen[0] and "Write the new notes" in policy.seen[0]
    assert "Answer the question" in policy.seen[-1]


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"rows": [{"document": "a", "question": "b"}]}, DataError, "answer"),
        ({"rows": [{"document": " ", "question": "b", "answer": "c"}]}, DataError, "document"),
        ({"rows": [{**ROWS[0], "facts": "x"}]}, DataError, "facts"),
        ({"context_length": 24}, DataError, None),
        ({"max_turns": 2}, DataError, "document"),
        ({"part_tokens": 0}, ConfigError, "env.part_tokens"),
        ({"part_tokens": 64, "by": "keywords"}, DataError, "env.part_tokens"),
        ({"by": "keyword"}, ConfigError, "env.by"),
    ],
)
def test_bad_input(
    tmp_path: Path, changes: dict, error: type[IsothermError], field: str | None
) -> None:
    with refuses(error, field):
        dataset(tmp_path, **changes)
