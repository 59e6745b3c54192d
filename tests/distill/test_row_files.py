"""Rows are the same from every format, or the file and the row are named."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distill.data.row_files import read_rows
from distill.errors import DataError
from tests.refusals import refuses


def write_parquet(path: Path, rows: list[dict], schema: pyarrow.Schema | None = None) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path)
    return str(path)


def test_parquet_maps_are_objects(tmp_path: Path) -> None:
    schema = pyarrow.schema({"bonuses": pyarrow.map_(pyarrow.string(), pyarrow.float64())})
    rows = [{"bonuses": {"so": 0.5}}, {"bonuses": {"hm": -1.0, "well": 2.0}}]
    read = read_rows(write_parquet(tmp_path / "maps.parquet", rows, schema))
    assert [row for _, row in read] == rows


@pytest.mark.parametrize("name", ["nowhere.jsonl", "nowhere.parquet", "dir.parquet", "dir"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    if name.startswith("dir"):
        (tmp_path / name).mkdir()
    with refuses(DataError, None, names=name):
        read_rows(str(tmp_path / name))


TEXTS = pyarrow.schema({"prompt": pyarrow.string(), "answer": pyarrow.string()})


def json_lines(rows: list[dict], end: str = "\n") -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode()


def table(rows: list[dict], delimiter: str = ",", end: str = "\n") -> bytes:
    names = sorted({name for row in rows for name in row})
    made = io.StringIO()
    writer = csv.DictWriter(
        made, names, delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_ALL
    )
    writer.writeheader()
    writer.writerows(rows)
    return made.getvalue().encode()


def arrow(rows: list[dict], new: Callable = pyarrow.ipc.new_file) -> bytes:
    made, sink = pyarrow.Table.from_pylist(rows, schema=TEXTS), io.BytesIO()
    with new(sink, made.schema) as writer:
        writer.write_table(made)
    return sink.getvalue()


def parquet(rows: list[dict]) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=TEXTS), sink)
    return sink.getvalue()


BOM = "\ufeff".encode()
# File name -> the bytes of rows of texts.
FORMATS: dict[str, Callable[[list[dict]], bytes]] = {
    "a.jsonl": json_lines, "windows.jsonl": lambda rows: BOM + json_lines(rows, "\r\n"),
    "a.jsonl.gz": lambda rows: gzip.compress(json_lines(rows)),
    "a.json": lambda rows: json.dumps(rows, indent=1).encode(),
    "array.jsonl": lambda rows: BOM + json.dumps(rows).encode(),
    "wide.jsonl": lambda rows: json_lines(rows).decode().encode("utf-16"),
    "wide.csv": lambda rows: table(rows).decode().encode("utf-16-le"),
    "a.json.gz": lambda rows: gzip.compress(json.dumps(rows).encode()), "lines.json": json_lines,
    "a.csv": table, "windows.CSV": lambda rows: BOM + table(rows, end="\r\n"),
    "a.csv.gz": lambda rows: gzip.compress(table(rows)), "a.tsv": lambda rows: table(rows, "\t"),
    "a.parquet": parquet, "a.arrow": arrow,
    "stream.arrow": lambda rows: arrow(rows, pyarrow.ipc.new_stream), "a.feather": arrow,
}  # fmt: skip
# Texts that quotes, commas, tabs, line ends and Unicode are in.
CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


@given(
    rows=st.lists(
        st.fixed_dictionaries({"prompt": CELLS.filter(str.strip)}, optional={"answer": CELLS}),
        min_size=1,
        max_size=6,
    )
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_format_gives_the_same_rows(tmp_path: Path, rows: list[dict]) -> None:
    for name, encode in FORMATS.items():
        path = tmp_path / name
        path.write_bytes(encode(rows))
        assert [row for _, row in read_rows(str(path))] == rows, name


def test_a_row_of_a_table_is_named_by_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('prompt,answer\n\n"two\nlines",4\n ,\nlast,\n')
    assert read_rows(str(path)) == [
        (3, {"prompt": "two\nlines", "answer": "4"}),
        (6, {"prompt": "last"}),
    ]


def test_a_long_cell_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt\n" + "x" * 200_000 + "\n")
    [(_, row)] = read_rows(str(path))
    assert len(row["prompt"]) == 200_000 and csv.field_size_limit() == 131_072


@pytest.mark.parametrize(
    ("name", "content", "row"),
    [
        ("a.csv", "a,b\n1,2\n1,2,3\n", ":3:"),
        ("a.csv", "a,b\n1\n", ":2:"),
        ("a.csv", "a, a\n1,2\n", ":1:"),
        ("a.csv", 'a\n"1', ":2:"),
        ("a.csv", "a,b\n", ""),
        ("a.jsonl", gzip.compress(b"{}"), ""),
        ("a.json", '[{"a": 1}, 2]', ":2:"),
        ("a.json", '[{"a": 1},\n {"a" 1}]', ":2:"),
        ("a.json", "[]", ""),
        ("a.json", '{\n "a": [1]\n}', ":1:"),
        ("a.jsonl", "question,answer\n1,2\n", ":1:"),
        ("a.jsonl", '{"a": 1}\n{"a": 1', ":2:"),
        ("a.jsonl", '{"a": 1}\n[1, 2]', ":2:"),
        ("a.jsonl", '{"a": 1}\n{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", ":2:"),
        ("a.jsonl", '{"a": 1}\n{"a": ' + "1" * 5000 + "}", ":2:"),
        ("a.jsonl", '{"a": 1}\n{"b": {"c": 1, "c": 1}}', ":2:"),
        ("a.json", '[{"a": 1, "a": 2}]', ""),
        ("a.jsonl", "", ""),
        ("a.jsonl", "\n \n", ""),
        ("a.jsonl.gz", "no gzip", ""),
        ("cut.jsonl.gz", gzip.compress(json_lines([{"a": "é"}]), mtime=0)[:-9], ""),
        ("a.arrow", "no arrow", ""),
        ("a.parquet", "", ""),
        ("a.parquet", '{"prompt": "a"}\n', ""),
        ("a.parquet", "PAR1garbagePAR1", ""),
    ],
    ids=lambda value: str(value)[:20],
)
def test_malformed_files_are_refused(
    tmp_path: Path, name: str, content: str | bytes, row: str
) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with refuses(DataError, None, names=name + row):
        read_rows(str(tmp_path / name))


def test_the_column_of_a_row_that_ends_too_early_is_where_it_ends(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2\n{"a": 3}\n')
    with refuses(DataError, None, names="column 8"):
        read_rows(str(tmp_path / "a.jsonl"))


def test_the_text_at_which_a_row_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1},\n{"a": 2},\n')
    with refuses(DataError, None, names="','"):
        read_rows(str(tmp_path / "a.jsonl"))
