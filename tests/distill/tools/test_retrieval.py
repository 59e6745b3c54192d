"""Retrieval of passages by words, in any script, deterministic."""

import asyncio
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from distill.errors import ConfigError, DataError
from distill.tools.retrieval import Retrieval
from tests.refusals import refuses
from tests.rows import write_rows


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "birds.txt").write_text("The heron stands still.\n\nA swift never lands.\n")
    (tmp_path / "deep" / "cities.md").write_text(
        "# 城市\n\n北京是中国的首都。\n\n東京は日本の首都です。"
    )
    rows = [{"text": "Isotherms join places of one temperature."}, {"text": "Isobars: pressure."}]
    write_rows(tmp_path / "maps.jsonl", *rows)
    (tmp_path / "ignored.bin").write_text("heron heron heron")
    return tmp_path


def search(directory: Path, query: str, **arguments) -> str:
    return asyncio.run(Retrieval(directory)({"query": query, **arguments}))


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("HERON", "[1] birds.txt\nThe heron stands still."),
        ("which swift lands?", "[1] birds.txt\nA swift never lands."),
        ("temperature", "[1] maps.jsonl:1\nIsotherms join places of one temperature."),
        ("中国首都", "[1] deep/cities.md\n北京是中国的首都。"),
        ("日本", "[1] deep/cities.md\n東京は日本の首都です。"),
        ("quetzal", "No passage has any of these words."),
        ("?!", "No passage has any of these words."),
    ],
)
def test_found_passages(texts: Path, query: str, first: str) -> None:
    assert search(texts, query).split("\n\n")[0] == first


def test_as_many_as_asked_for(texts: Path) -> None:
    assert search(texts, "首都", top_k=1).count("首都") == 1
    assert search(texts, "首都").count("首都") == 2


def test_it_pickles_by_its_directory_and_finds_the_same_elsewhere(texts: Path) -> None:
    tool = Retrieval(texts)
    here = asyncio.run(tool({"query": "the heron swift 首都"}))
    packed = pickle.dumps(tool)
    assert str(texts).encode() in packed and b"stands still" not in packed
    code = f"""
import asyncio, pickle, sys
print(asyncio.run(pickle.loads({packed!r})({{"query": "the heron swift 首都"}})))
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-X", "utf8", "-c", code], capture_output=True)
    assert done.stdout.decode().strip() == here, done.stderr.decode()


def test_directories_without_text(tmp_path: Path) -> None:
    with refuses(ConfigError, "env.tools"):
        Retrieval(tmp_path / "none")
    (tmp_path / "a.txt").touch()
    with refuses(ConfigError, "env.tools"):
        Retrieval(tmp_path)


@pytest.mark.parametrize("line", ["{", '{"texts": "a"}', '{"text": 1}', "[]"])
def test_invalid_rows_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line)
    with refuses(DataError, None, names="a.jsonl:2:"):
        search(tmp_path, "a")
