"""Data sources: GSM8K's columns, weights of sources, functions; edits are detected."""

import csv
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from cluster.audit import main as audit
from cluster.store.kept_groups import KeptGroups
from cluster.train import main
from tests.conftest import TinyPair
from tests.e2e.harness import metrics
from tests.rows import write_rows

pytestmark = pytest.mark.e2e


def gsm8k_rows(first: int, count: int) -> list[dict[str, str]]:
    """Rows with the columns of GSM8K."""
    return [
        {
            "question": f"Ann has {a} and finds 5.\nHow many?",
            "answer": f"{a}+5={a + 5}\n#### {a + 5}",
        }
        for a in range(first, first + count)
    ]


def pairs() -> list[dict[str, str]]:
    """Rows of a function, for supervised fine-tuning."""
    return [{"q": f"{a}+1=", "a": str(a + 1)} for a in range(9)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """CSV of 30 rows as a spreadsheet writes it."""
    path = tmp_path / "words.csv"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"], lineterminator="\r\n")
        writer.writeheader()
        writer.writerows(gsm8k_rows(0, 30))
    return path


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    path = tmp_path / "more.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(gsm8k_rows(50, 10)), path)
    return path


def train(pair: TinyPair, out: Path, prompts: str, **settings: object) -> int:
    given = {
        "student": pair.student, "teacher": pair.teacher, "prompts": prompts, "out": out,
        "columns.prompt": "question", "answer_pattern": r"#### (.+)", "reward_coef": 0.5,
        "reward": "contains", "temperature": 0.7, "steps": 4, "prompts_per_step": 8,
        "group_size": 2, "max_new_tokens": 4, "eval_size": 4, "engine": "embedded", "local": True,
        "max_staleness": 0,  # steps take their own prompts, whatever the machine does
    } | settings  # fmt: skip
    return main(["recipe=opd", *(f"{name}={value}" for name, value in given.items())])


def test_sources_have_their_shares_and_edits_are_detected(
    tiny_pair: TinyPair, tmp_path: Path, table: Path, parquet: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out, prompts = tmp_path / "run", f"{table}:3,{parquet}:1"
    assert train(tiny_pair, out, prompts, steps=2) == 0
    assert "words 27, 75% of groups; more 9, 25% of groups" in " ".join(
        capsys.readouterr().out.split()
    )
    assert train(tiny_pair, out, prompts, steps=4) == 0  # resumed
    for step in metrics(out):
        assert step["rollout/share/source=words"] == 0.75  # blocks of 4 in steps of 8
        assert step["rollout/share/source=more"] == 0.25
        for kind in ("opd/reverse_kl", "reward/mean"):
            parts = [step[f"{kind}/source={name}"] for name in ("words", "more")]
            assert min(parts) <= step[kind] <= max(parts)
    kept = KeptGroups(out / "groups")
    assert kept and {each.group.source for each in kept} <= {"words", "more"}
    assert audit([f"out={out}"]) == 0  # each group exactly once

    assert train(tiny_pair, out, f"{table}:1,{parquet}:1", steps=5) == 2
    assert "data.source" in capsys.readouterr().err
    table.write_text(table.read_text().replace("Ann", "Bob"))
    assert train(tiny_pair, out, prompts, steps=5) == 2
    error = capsys.readouterr().err
    assert f"data.source={prompts} " in error and "sha256" in error


def test_sft_on_rows_of_a_function(tiny_pair: TinyPair, tmp_path: Path) -> None:
    lines = write_rows(tmp_path / "lines.jsonl", *pairs()[:3])
    out = tmp_path / "run"
    code = main(
        [
            "recipe=sft", f"model={tiny_pair.student}", f"data={__name__}:pairs,{lines}:3",
            "columns.prompt=q", "columns.completion=a", f"out={out}", "steps=3", "batch_size=8",
            "local=True",
        ]
    )  # fmt: skip
    assert code == 0
    shares = Counter(step["train/share/source=lines"] for step in metrics(out))
    assert shares == {0.75: 3}
