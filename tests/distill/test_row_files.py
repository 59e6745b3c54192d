"""Rows are read from JSONL or parquet alike, or the file and the row are named."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from distill.data.row_files import located, read_rows
from distill.errors import DataError

ROWS = [
    {"messages": [{"role": "user", "content": "hi"}], "answer": "4"},
    {"messages": [{"role": "assistant", "content": "é", "tool_calls": [{"id": "a"}]}]},
]


def write_parquet(path: Path, rows: list[dict], schema: pyarrow.Schema | None = None) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path)
    return str(path)


def test_parquet_reads_as_the_same_rows_in_jsonl(tmp_path: Path) -> None:
    """Parquet gives every row every field, null where it had none: those are left out again."""
    lines = tmp_path / "data.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    parquet = write_parquet(tmp_path / "data.PARQUET", ROWS)
    assert read_rows(parquet) == read_rows(str(lines)) == list(enumerate(ROWS, start=1))


def test_parquet_maps_are_objects(tmp_path: Path) -> None:
    schema = pyarrow.schema({"bonuses": pyarrow.map_(pyarrow.string(), pyarrow.float64())})
    rows = [{"bonuses": {"so": 0.5}}, {"bonuses": {"hm": -1.0, "well": 2.0}}]
    read = read_rows(write_parquet(tmp_path / "maps.parquet", rows, schema))
    assert [row for _, row in read] == rows


def test_blank_lines_count_and_hold_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text('{"a": 1}\n\n  \n{"a": null}\n')
    assert read_rows(str(path)) == [(1, {"a": 1}), (4, {"a": None})]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": 1', "not valid JSON"),
        ("[1, 2]", r"expected a JSON object, got '\[1, 2\]'"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "not valid JSON: .*recursion"),
        ('{"a": ' + "1" * 5000 + "}", "not valid JSON: .*digits"),
    ],
    ids=["cut", "list", "brackets", "digits"],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"a": 1}\n' + line)
    with pytest.raises(DataError, match=rf"bad\.jsonl:2: {message}"):
        read_rows(str(path))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"empty\.jsonl holds no rows; write one JSON object"):
        read_rows(str(path))


def test_a_parquet_without_rows_is_refused(tmp_path: Path) -> None:
    schema = pyarrow.schema({"prompt": pyarrow.string()})
    with pytest.raises(DataError, match=r"empty\.parquet holds no rows$"):
        read_rows(write_parquet(tmp_path / "empty.parquet", [], schema))


@pytest.mark.parametrize("name", ["nowhere.jsonl", "nowhere.parquet", "dir.parquet", "dir"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    if name.startswith("dir"):
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=rf"cannot read .*{name}"):
        read_rows(str(tmp_path / name))


@pytest.mark.parametrize("content", [b"", b'{"prompt": "a"}\n', b"PAR1garbagePAR1"])
def test_a_parquet_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"cannot read .*bad\.parquet.* as parquet"):
        read_rows(str(tmp_path / "bad.parquet"))


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin1.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"cannot read .*latin1\.jsonl"):
        read_rows(str(tmp_path / "latin1.jsonl"))


def test_located_speaks_for_data_errors_only() -> None:
    with pytest.raises(DataError, match=r"^file:3: too long$"), located("file:3"):
        raise DataError("too long")
    with pytest.raises(KeyError, match="too long"), located("file:3"):
        raise KeyError("too long")
