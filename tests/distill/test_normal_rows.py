"""The same data gives the same rows from every source."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from distill.data.columns import Columns, PromptColumns
from distill.data.example_encoder import ExampleEncoder
from distill.data.normal_rows import normal_row
from distill.data.prompts import PromptContext, load_prompts
from distill.data.row_reader import RowReader
from distill.data.sft_rows import load_sft_rows
from distill.errors import DataError
from tests.chat_templates import ADD, chat_tokenizer
from tests.rows import write_rows


def context() -> PromptContext:
    return PromptContext(
        tokenizer=chat_tokenizer("qwen2.5"), vocab_size=1000, context_length=1000, max_new_tokens=8
    )


UPPER = {
    "type": "function",
    "function": {
        "name": "upper",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "how": {"type": "object", "properties": {"locale": {"type": "string"}}},
            },
            "required": ["text"],
        },
    },
}


def called(name: str, arguments: Any) -> dict:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def chat(name: str, arguments: Any, tools: list[dict]) -> dict:
    messages = [
        {"role": "user", "content": "go"}, called(name, arguments),
        {"role": "tool", "content": "3"}, {"role": "assistant", "content": "done"},
    ]  # fmt: skip
    return {"messages": messages, "tools": tools}


# Rows of which Arrow makes one type: each call gets the arguments of both tools, null or not.
ROWS = [
    chat("add", {"a": 1, "b": 2}, [ADD]),
    chat("upper", {"text": "a", "how": {"locale": "tr"}}, [UPPER, ADD]),
    chat("upper", {"text": "b"}, [UPPER]),
    {"messages": [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}]},
]


def table() -> pyarrow.Table:
    return pyarrow.Table.from_pylist(ROWS)


def as_tables() -> list[dict]:
    return table().to_pylist()


def as_data_set() -> datasets.Dataset:
    return datasets.Dataset.from_list(ROWS)


def as_tuples() -> list[dict]:
    return [{**row, "messages": tuple(row["messages"])} for row in ROWS]


def in_json_text(path: Path) -> str:
    return write_rows(
        path / "text.jsonl", *({k: json.dumps(v) for k, v in r.items()} for r in ROWS)
    )


def in_parquet(path: Path) -> str:
    pyarrow.parquet.write_table(table(), path / "a.parquet")
    return str(path / "a.parquet")


def in_arrow(path: Path) -> str:
    with pyarrow.ipc.new_file(path / "a.arrow", table().schema) as writer:
        writer.write_table(table())
    return str(path / "a.arrow")


def in_json_columns(path: Path) -> str:
    if not hasattr(datasets, "Json"):
        pytest.skip("this version of datasets has no such columns")
    listed = datasets.List(datasets.Json())
    features = datasets.Features({"messages": listed, "tools": listed})
    data = datasets.Dataset.from_list(ROWS, features=features)
    data.to_parquet(path / "typed.parquet")
    return str(path / "typed.parquet")


def saved(path: Path) -> str:
    as_data_set().save_to_disk(path / "saved")
    return str(path / "saved")


def written_by_arrow(path: Path) -> str:
    as_data_set().to_json(path / "nulls.jsonl")
    return str(path / "nulls.jsonl")


def in_shards(path: Path) -> str:
    directory = path / "shards"
    directory.mkdir()
    for i, row in enumerate(ROWS):
        write_rows(directory / f"train-0000{i}-of-00004.jsonl", row)
    (directory / "README.md").write_text("# rows")
    (directory / "dataset_infos.json").write_text("{}")
    return str(directory)


SOURCES: dict[str, Callable[[Path], str]] = {
    "jsonl": lambda path: write_rows(path / "a.jsonl", *ROWS),
    "nulls": lambda path: write_rows(path / "a.jsonl", *as_tables()), "to_json": written_by_arrow,
    "json text": in_json_text, "parquet": in_parquet, "arrow": in_arrow,
    "json columns": in_json_columns, "saved": saved, "shards": in_shards,
    "pattern": lambda path: f"{in_shards(path)}/train-*.jsonl",
    "to_pylist": lambda _: f"{__name__}:as_tables", "data set": lambda _: f"{__name__}:as_data_set",
    "tuples": lambda _: f"{__name__}:as_tuples",
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same_rows(tmp_path: Path, source: str) -> None:
    rows = RowReader()(SOURCES[source](tmp_path))
    assert [row for _, row in rows] == ROWS


def nullable(schema: dict, *required: str) -> dict:
    parameters = {"type": "object", "properties": {"unit": schema}, "required": [*required]}
    return {"type": "function", "function": {"name": "get", "parameters": parameters}}


@pytest.mark.parametrize(
    ("tool", "kept", "kept_from_arrow"),
    [
        (nullable({"type": "string"}), False, False),
        (nullable({"type": ["string", "null"]}), True, False),
        (nullable({"anyOf": [{"type": "string"}, {"type": "null"}]}), True, False),
        (nullable({"enum": ["C", "F", None]}), True, False),
        (nullable({"type": ["string", "null"]}, "unit"), True, True),
        (ADD, False, False),
    ],
)
def test_null_arguments_of_the_tool_are_kept(tool: dict, kept: bool, kept_from_arrow: bool) -> None:
    row = {"messages": [called("get", {"city": "Paris", "unit": None})], "tools": [tool]}
    for from_arrow, stays in ((False, kept), (True, kept_from_arrow)):
        [message] = normal_row(row, from_arrow=from_arrow)["messages"]
        arguments = message["tool_calls"][0]["function"]["arguments"]
        assert arguments == {"city": "Paris"} | ({"unit": None} if stays else {})


@pytest.mark.parametrize(
    "names",
    [["train-0.parquet", "test-0.parquet"], ["a.jsonl", "b.csv"], ["data/a.jsonl"], ["README.md"]],
)
def test_a_directory_that_is_not_one_data_set_is_refused(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    with pytest.raises(DataError):
        RowReader()(str(tmp_path))


def test_a_pattern_without_files_and_a_file_of_nearly_that_name(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("{}")
    with pytest.raises(DataError):
        RowReader()(str(tmp_path / "train-*.jsonl"))
    for name in ("promts.jsonl", "prompt.parquet"):
        with pytest.raises(DataError):
            RowReader()(str(tmp_path / name))


ASK = [{"role": "user", "content": "1+2?"}]
SAY = [{"role": "assistant", "content": "3"}]


def trained(path: str, **columns: Mapping[str, str]) -> list[list[int]]:
    read = RowReader(Columns(**columns))
    tokenizer = chat_tokenizer("qwen2.5")
    encoder = ExampleEncoder(tokenizer=tokenizer, vocab_size=1000, max_length=1000, stop_ids=[3])
    rows = load_sft_rows(path, encoder, read)
    return [row.tokens_T[row.loss_mask_T].tolist() for row in rows]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": ASK, "completion": SAY}, {}),
        ({"prompt": ASK, "completion": SAY}, {"columns": {"prompt": "prompt"}}),
        ({"prompt": ASK, "completion": "3"}, {}),
        ({"prompt": json.dumps(ASK), "completion": json.dumps(SAY)}, {}),
        ({"messages": ASK, "completion": SAY}, {}),
        ({"chat": ASK, "answer": SAY}, {"columns": {"prompt": "chat", "completion": "answer"}}),
        (
            {"in": {"q": ASK}, "out": {"a": "3"}},
            {"columns": {"prompt": "in.q", "completion": "out.a"}},
        ),
    ],
)
def test_a_completion_answers_a_chat(tmp_path: Path, row: dict, columns: dict) -> None:
    whole = write_rows(tmp_path / "whole.jsonl", {"messages": [*ASK, *SAY]})
    assert trained(write_rows(tmp_path / "a.jsonl", row), **columns) == trained(whole)


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": ASK, "answer": "3"}, {}),
        ({"q": json.dumps(ASK), "answer": "3"}, {"columns": {"prompt": "q"}}),
        (
            {"prompt": ASK, "reward_model": {"ground_truth": "3", "style": "rule"}},
            {"columns": {"answer": "reward_model.ground_truth"}},
        ),
        (
            {"data": {"chat": ASK}, "a.b": "3"},
            {"columns": {"prompt": "data.chat", "answer": "a.b"}},
        ),
    ],
)
def test_prompts_as_they_are_published(tmp_path: Path, row: dict, columns: dict) -> None:
    read = RowReader(PromptColumns(**columns))
    [prompt] = load_prompts(write_rows(tmp_path / "a.jsonl", row), replace(context(), read=read))
    read.require_columns()
    assert prompt.answer == "3" and prompt.messages == ASK


@pytest.mark.parametrize("text", ["[1, 2]", "[INST] hi [/INST]", '["role"]', "{}", '[{"a": 1}]'])
def test_a_text_that_is_no_chat_is_kept(tmp_path: Path, text: str) -> None:
    [prompt] = load_prompts(write_rows(tmp_path / "a.jsonl", {"prompt": text}), context())
    assert prompt.text == text
