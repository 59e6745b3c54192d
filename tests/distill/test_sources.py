"""Sources of rows: syntax, names, digests, columns of any name, and functions of rows."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.data.columns import Columns, PromptColumns, refuse_misspelt
from distill.data.prompts import FIELDS
from distill.data.row_conversion import LongRows, TooLong
from distill.data.row_reader import RowReader
from distill.data.sources import Source, parse_sources
from distill.errors import ConfigError, DataError
from tests.refusals import refuses

ROWS = [{"prompt": "1+1=", "answer": "2", "bonuses": {"so": 1.0}}, {"prompt": "é"}]


def one_by_one() -> Iterator[dict]:
    """Rows as a custom function yields them."""
    yield from ROWS


def nothing() -> list[dict]:
    return []


def lists() -> list:
    return [{"prompt": "a"}, ["b"]]


def broken() -> list[dict]:
    raise KeyError("no such shard")


def parsed(value: str) -> list[tuple[str, str, int]]:
    return [(s.place, s.name, s.weight) for s in parse_sources("prompts", value)]


def test_several_with_weights() -> None:
    assert parsed("a.jsonl:3,b.parquet:1") == [("a.jsonl", "a", 3), ("b.parquet", "b", 1)]
    assert parsed("a.csv:0.7, b.csv:0.3") == [("a.csv", "a", 7), ("b.csv", "b", 3)]
    assert parsed("a.csv,b.csv:1.5") == [("a.csv", "a", 2), ("b.csv", "b", 3)]
    assert parsed("a.csv:6,b.csv:4") == [("a.csv", "a", 3), ("b.csv", "b", 2)]


@given(weights=st.lists(st.integers(1, 999), min_size=2, max_size=5))
def test_weights_keep_their_ratios(weights: list[int]) -> None:
    value = ",".join(f"{i}.jsonl:{weight / 100}" for i, weight in enumerate(weights))
    read = [source.weight for source in parse_sources("prompts", value)]
    assert all(a * read[0] == b * weights[0] for a, b in zip(weights, read, strict=True)), read


def test_functions_and_hub_data_sets_have_colons_of_their_own() -> None:
    assert parsed("my.module:rows:2,openai/gsm8k:main:test:0.5,o/n") == [
        ("my.module:rows", "rows", 4),
        ("openai/gsm8k:main:test", "gsm8k", 1),
        ("o/n", "n", 2),
    ]


def test_sources_with_equal_names_are_named_by_their_paths() -> None:
    assert [name for _, name, _ in parsed("x/train.jsonl,y/train.jsonl,z.csv")] == [
        "x/train.jsonl", "y/train.jsonl", "z",
    ]  # fmt: skip


def test_a_file_of_exactly_that_name_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "a,b:3"
    path.write_text(json.dumps(ROWS))
    assert parsed(str(path)) == [(str(path), "a,b:3", 1)]


@pytest.mark.parametrize(
    "value",
    [
        "",
        "a.jsonl,,b.jsonl",
        "a.jsonl:1,a.jsonl:2",
        "a.jsonl:0,b.jsonl",
        "a.jsonl:-1",
        "a.jsonl:x",
        "a.jsonl:1.0001,b.jsonl:1",
    ],
)
def test_invalid_sources_are_refused(value: str) -> None:
    with refuses(ConfigError, "prompts"):
        parse_sources("prompts", value)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("nothing", "nothing"),
        ("lists", "lists:2:"),
        ("broken", "test_sources.py:"),
        ("absent", "absent"),
    ],
)
def test_a_function_that_makes_no_rows_is_named(name: str, named: str) -> None:
    with pytest.raises((ConfigError, DataError)) as refused:
        RowReader()(f"{__name__}:{name}")
    assert named in str(refused.value)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    return str(tmp_path / "saved")


def test_a_saved_data_set_needs_its_split(saved: str, tmp_path: Path) -> None:
    one = datasets.Dataset.load_from_disk(saved)
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "both")
    assert RowReader()(str(tmp_path / "both/train")) == list(enumerate(ROWS, 1))
    with pytest.raises(DataError):
        RowReader()(str(tmp_path / "both"))


def test_a_hub_data_set_is_asked_for_its_subset_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(path: str, name: str | None, split: str) -> datasets.Dataset:
        asked.append((path, name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    for place in ("openai/gsm8k", "openai/gsm8k:main", "openai/gsm8k:main:test", "o/n::test"):
        assert RowReader()(place) == list(enumerate(ROWS, 1))
    assert asked == [
        ("openai/gsm8k", None, "train"),
        ("openai/gsm8k", "main", "train"),
        ("openai/gsm8k", "main", "test"),
        ("o/n", None, "test"),
    ]


def test_errors_of_the_library_are_data_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise RuntimeError("Config name\n  is missing")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError):
        RowReader()("o/n")


def test_columns_that_no_source_has_are_refused(tmp_path: Path) -> None:
    """One source may have the field itself; if all do, the setting is a mistake."""
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text('[{"question": "1", "answer": "=2"}]')
    b.write_text('[{"prompt": "1", "answer": "=3"}]')
    reader = RowReader(PromptColumns(columns={"prompt": "question"}, answer_pattern="=(.+)"))
    assert reader(str(b)) == [(1, {"prompt": "1", "answer": "3"})]
    with refuses(ConfigError, "columns.prompt"):
        reader.require_columns()
    assert reader(str(a)) == [(1, {"prompt": "1", "answer": "2"})]
    reader.require_columns()
    with refuses(ConfigError, "columns.answer"):
        RowReader(PromptColumns(columns={"answer": "anwser"})).require_columns()


def digest(*sources: tuple[str, int]) -> str | None:
    reader = RowReader()
    for place, _ in sources:
        reader(place)
    return reader.digest([Source(place=p, name=p, weight=w) for p, w in sources])


def test_a_digest_is_of_content_and_weights(tmp_path: Path, saved: str) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text(json.dumps(ROWS))
    b.write_text(json.dumps(ROWS[:1]))
    moved = tmp_path / "moved.jsonl"
    moved.write_text(json.dumps(ROWS))
    function = f"{__name__}:one_by_one"
    assert digest((str(a), 1)) == digest((str(moved), 1)) != digest((str(b), 1))
    assert digest((function, 1)) == digest((saved, 1))  # of the same rows
    mixed = {
        digest((str(a), 3), (str(b), 1)), digest((str(a), 1), (str(b), 1)),
        digest((str(b), 3), (str(a), 1)), digest((str(a), 3), (function, 1)),
    }  # fmt: skip
    assert len(mixed) == 4 and None not in mixed
    assert digest((str(a), 3), (str(b), 1)) == digest((str(moved), 3), (str(b), 1))


def test_data_read_by_an_environment_has_no_digest(tmp_path: Path) -> None:
    assert RowReader().digest([Source(place=str(tmp_path), name="a")]) is None


GSM8K = {"question": "Natalia sold 48 clips. How many?", "answer": "48/2 = 24\n#### 72"}


def mapped(columns: Columns, *rows: dict) -> list[dict]:
    return [row for _, row in columns.as_fields(list(enumerate(rows, 1)), "file")]


CHAT = [{"role": "user", "content": "hi"}]
PAIRS = Columns(columns={"prompt": "q", "chosen": "good", "rejected": "bad"})


@pytest.mark.parametrize(
    ("columns", "rows", "fields"),
    [
        (
            PromptColumns(columns={"prompt": "question", "answer": "solution"}),
            [{"question": "a", "solution": 4, "answer": "long", "prompt": "raw", "level": 3}],
            [{"prompt": "a", "answer": 4, "level": 3}],
        ),
        (PromptColumns(columns={"prompt": "prompt"}), [{"prompt": CHAT}], [{"messages": CHAT}]),
        (
            PromptColumns(columns={"prompt": "q", "answer": "a"}),
            [{"q": "x", "a": "1"}, {"q": "y"}],
            [{"prompt": "x", "answer": "1"}, {"prompt": "y"}],
        ),
        (
            PAIRS,
            [{"q": "1", "good": "2", "bad": "3"}],
            [{"prompt": "1", "chosen": "2", "rejected": "3"}],
        ),
    ],
    ids=["others stay", "a chat", "an optional column", "pairs"],
)
def test_columns_are_read_as_fields(columns: Columns, rows: list, fields: list) -> None:
    assert mapped(columns, *rows) == fields


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        (PromptColumns(columns={"prompt": "questoin"}), "columns.prompt"),
        (PromptColumns(answer_pattern="=> (.+)"), "answer_pattern"),
        (Columns(columns={"completion": "reply"}), "columns.completion"),
        (Columns(columns={"chosen": "good"}), "columns.chosen"),
        (Columns(columns={"rejected": "bad"}), "columns.rejected"),
    ],
)
def test_a_column_that_is_not_there_is_named(columns: Columns, field: str) -> None:
    with refuses(DataError, field):
        mapped(columns, GSM8K)


def test_an_answer_key_that_no_row_has_is_named() -> None:
    with refuses(DataError, "columns.answer"):
        mapped(PromptColumns(columns={"answer": "anwser"}), {"prompt": "a"})


@pytest.mark.parametrize(
    ("pattern", "answer", "found"),
    [
        ("#### (.+)", "#### 1,234 \n", "1,234"),
        (r"\\boxed\{(.*?)\}", r"\boxed{1} so \boxed{2}", "2"),
        (r"\d+$", "of 3, 14", "14"),
        (r"(\d+)|none", 17, "17"),
    ],
)
def test_the_last_match_or_its_first_group(pattern: str, answer: object, found: str) -> None:
    columns = PromptColumns(answer_pattern=pattern)
    assert mapped(columns, {"prompt": "a", "answer": answer}) == [{"prompt": "a", "answer": found}]
    assert mapped(columns, {"prompt": "a"}) == [{"prompt": "a"}]


@pytest.mark.parametrize(
    ("slip", "beside"),
    [
        *((slip, {"prompt": "a"}) for slip in ("anwser", "Answer", "teacher_promt", "bonusses")),
        *((slip, {}) for slip in ("promt", "Prompt", "mesages")),
    ],
)
def test_a_misspelt_field_is_noticed(slip: str, beside: dict[str, str]) -> None:
    with refuses(DataError, slip):
        refuse_misspelt(beside | {slip: "b"}, FIELDS)


@pytest.mark.parametrize(
    "name",
    ["id", "level", "tags", "lag", "prompt_id", "answer_type", "message", "promt", "question", ""],
)
def test_other_columns_are_ignored(name: str) -> None:
    refuse_misspelt({"prompt": "a", "answer": "b", name: "c"}, FIELDS)


LENGTHS = [3, 9, 1, 12, 8]
NUMBERED = [(2 * number, length) for number, length in enumerate(LENGTHS, 1)]


def fitting(_number: int, length: int) -> int:
    if length > 8:
        raise TooLong(f"{length} tokens", length=length, field="data.max_length")
    return length


@pytest.mark.parametrize("threads", [1, 4])
def test_long_rows_are_one_error(threads: int) -> None:
    with refuses(TooLong, "data.max_length", names="a.jsonl:8: 12 tokens") as caught:
        LongRows().converted("a.jsonl", NUMBERED, fitting, threads=threads)
    assert "2 of 5" in str(caught.value)


@pytest.mark.parametrize("threads", [1, 4])
def test_dropped_rows_are_one_warning(threads: int, caplog: pytest.LogCaptureFixture) -> None:
    long = LongRows(drop=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # training and evaluation may read the same source
            made = long.converted("a.jsonl", NUMBERED, fitting, threads=threads)
            assert made == [3, 1, 8]
    [record] = caplog.records
    assert "2 of 5" in record.getMessage() and "a.jsonl" in record.getMessage()
    assert long.dropped == {"a.jsonl": {4, 8}}


def test_a_source_of_long_rows_alone_is_refused() -> None:
    with refuses(TooLong, "data.max_length"):
        LongRows(drop=True).converted("a.jsonl", NUMBERED[1:2], fitting)


def test_many_rows_stay_in_order() -> None:
    numbers = range(1, 9999)
    made = LongRows().converted("a.jsonl", [(n, n % 7) for n in numbers], lambda n, row: (n, row))
    assert made == [(n, n % 7) for n in numbers]


def _refused(number: int) -> Callable[[int, int], int]:
    def convert(given: int, length: int) -> int:
        if given == number:
            raise DataError("`prompt` is blank", field="prompt")
        return fitting(given, length)

    return convert


def test_another_fault_is_named_also_after_long_rows() -> None:
    for drop in (False, True):
        with refuses(DataError, "prompt", names="a.jsonl:10: `prompt`"):
            LongRows(drop=drop).converted("a.jsonl", NUMBERED, _refused(10))


def test_the_digest_changes_with_the_dropped_rows() -> None:
    def digest(rows: list[tuple[int, int]]) -> str:
        long = LongRows(drop=True)
        long.converted("a.jsonl", rows, fitting)
        return long.digest(["a.jsonl", "b.jsonl"])

    assert digest(NUMBERED[:1]) == ""
    assert "2 rows" in digest(NUMBERED)
    assert len({digest(NUMBERED), digest(NUMBERED[:2]), digest([*NUMBERED[:3], (11, 9)])}) == 3
