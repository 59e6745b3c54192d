"""Orders of rows, with each source's share, and rows of every file format."""

import csv
import gzip
import io
import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distill.data.held_out import choose_held_out, hold_out
from distill.data.order import MixedPart, MixedStream, PromptStream, part_of, shares
from distill.data.row_files import read_rows
from distill.data.sources import shard_rows
from distill.errors import DataError
from tests.refusals import refuses
from tests.samples import training_row


def write_parquet(path: Path, rows: list[dict], schema: pyarrow.Schema | None = None) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path)
    return str(path)


def test_parquet_maps_are_objects(tmp_path: Path) -> None:
    schema = pyarrow.schema({"bonuses": pyarrow.map_(pyarrow.string(), pyarrow.float64())})
    rows = [{"bonuses": {"so": 0.5}}, {"bonuses": {"hm": -1.0, "well": 2.0}}]
    read = read_rows(write_parquet(tmp_path / "maps.parquet", rows, schema))
    assert [row for _, row in read] == rows


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_text_is_not_held_with_four_bytes_per_character(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"rows.{suffix}").write_text('"prompt"\n' * (suffix == "csv") + "\n" * 1_000_000)
    tracemalloc.start()
    try:
        with refuses(DataError, None):
            read_rows(str(tmp_path / f"rows.{suffix}"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000


def test_shards_without_rows_are_passed_over(tmp_path: Path) -> None:
    empty = pyarrow.schema({"prompt": pyarrow.string()})
    write_parquet(tmp_path / "0.parquet", [], empty)
    with refuses(DataError, None, names=tmp_path.name):
        shard_rows(str(tmp_path))
    write_parquet(tmp_path / "1.parquet", [{"prompt": "a"}])
    write_parquet(tmp_path / "2.parquet", [], empty)
    assert shard_rows(str(tmp_path)) == [(1, {"prompt": "a"})]


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
        ("a.jsonl", gzip.compress(b"{}", mtime=0), ""),
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
def test_bad_files_are_refused(tmp_path: Path, name: str, content: str | bytes, row: str) -> None:
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


PARTS = st.lists(
    st.builds(MixedPart, size=st.integers(1, 9), weight=st.integers(1, 7)), min_size=1, max_size=4
)
SEEDS = st.integers(0, 2**40)


@given(parts=PARTS, seed=SEEDS)
def test_blocks_have_every_source_as_often_as_its_weight(parts: list[MixedPart], seed: int) -> None:
    stream, block = MixedStream(parts, seed), sum(part.weight for part in parts)
    for first in range(0, 5 * block, block):
        drawn = Counter(stream.source(position) for position in range(first, first + block))
        assert drawn == {number: part.weight for number, part in enumerate(parts)}


@given(parts=PARTS, seed=SEEDS)
def test_every_source_is_walked_as_if_it_were_alone(parts: list[MixedPart], seed: int) -> None:
    """Slow reference: walk from the start, and count the occurrences of each source."""
    stream = MixedStream(parts, seed)
    alone = [PromptStream(part.size, seed, number) for number, part in enumerate(parts)]
    seen = [0] * len(parts)
    for position in range(60):
        source, row = part_of(parts, stream.index(position))
        assert source == stream.source(position)
        assert row == alone[source].index(seen[source])
        seen[source] += 1


@given(parts=PARTS, seed=SEEDS, positions=st.lists(st.integers(0, 10**9), min_size=1, max_size=9))
def test_indices_depend_on_no_call(parts: list[MixedPart], seed: int, positions: list[int]) -> None:
    """Workers ask out of order, and a resumed run begins midway."""
    used = MixedStream(parts, seed)
    for position in positions:
        assert used.index(position) == MixedStream(parts, seed).index(position)
        assert 0 <= used.index(position) < sum(part.size for part in parts)


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=5), share=st.floats(0, 1))
def test_things_are_dealt_out_by_size(sizes: list[int], share: float) -> None:
    total = int(share * sum(sizes))
    counts = shares(sizes, total)
    assert sum(counts) == total
    for size, count in zip(sizes, counts, strict=True):
        assert 0 <= count <= size
        assert abs(count - (size * total / sum(sizes) if total else 0)) < 1


def test_another_seed_or_epoch_is_another_order() -> None:
    for of in (lambda seed: PromptStream(30, seed).index, lambda seed: mixed(seed).source):
        assert [of(7)(i) for i in range(60)] != [of(8)(i) for i in range(60)]
    epochs = PromptStream(30, 7)
    assert [epochs.index(i) for i in range(30)] != [epochs.index(i) for i in range(30, 60)]


def mixed(seed: int) -> MixedStream:
    return MixedStream([MixedPart(size=4, weight=3), MixedPart(size=9, weight=2)], seed)


_KEYS = st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=30), min_size=1, max_size=3)


@given(_KEYS, st.integers(0, 10), st.integers(0, 99))
def test_no_prompt_is_on_both_sides(keys: list[list[int]], count: int, seed: int) -> None:
    sources = range(len(keys))
    chosen = choose_held_out(keys, [count] * len(keys), [[seed, i] for i in sources])
    held_out = {keys[i][p] for i in sources for p in chosen[i]}
    trained = {key for i in sources for p, key in enumerate(keys[i]) if p not in chosen[i]}
    assert not held_out & trained
    assert all(len(apart) <= count for apart in chosen)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 99))
def test_of_different_prompts_just_as_many_are_held_out(size: int, count: int, seed: int) -> None:
    [chosen] = choose_held_out([range(size)], [count], [[seed]])
    assert len(chosen) == min(count, size)
    assert [chosen] == choose_held_out([range(size)], [count], [[seed]])


def test_rows_of_one_prompt_in_two_sources_are_trained() -> None:
    shared, first, second = ([training_row(3, 2, seed=seed)] for seed in range(3))
    split = hold_out([[shared, first], [shared, second]], 0.5, seed=0)
    assert split == [([shared], [first]), ([shared], [second])]
    assert hold_out([[shared, first], [shared, second]], 2, seed=0) == split


def test_rows_of_a_conversation_are_known_by_its_first_prompt_in_any_order() -> None:
    first, second = training_row(3, 2), training_row(9, 2)
    other = training_row(4, 2, seed=1)
    split = hold_out([[[second, first], [first], [other]]], 1, seed=0)
    assert split == [([[second, first], [first]], [[other]])]
