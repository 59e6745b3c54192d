"""`cluster.evaluate` on the embedded engine: data sets, responses and the report."""

import json
from pathlib import Path

import pytest

from cluster.evaluate import main
from tests.conftest import TinyPair
from tests.rows import write_rows


def even(response: str, _answer: str) -> float:
    return float(len(response) % 2 == 0)


def evaluate(pair: TinyPair, *arguments: str) -> int:
    return main([f"model={pair.student}", "engine=embedded", "max_new_tokens=4", *arguments])


def test_data_sets_are_reported_separately_with_every_response(
    tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = write_rows(
        tmp_path / "sums.jsonl", *({"prompt": f"{a} +", "answer": "e"} for a in range(5))
    )
    open_ended = write_rows(tmp_path / "open.jsonl", {"prompt": "say"}, {"prompt": "more"})
    out = tmp_path / "report.json"
    code = evaluate(
        tiny_pair, f"prompts={sums},{open_ended}", f"out={out}", f"reward={__name__}:even",
        "eval.temperature=1.5", "eval.samples=4", f"teacher={tiny_pair.teacher}", "temperature=0.7",
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "sums (5 prompts)" in printed.out and "open (2 prompts)" in printed.out
    report = json.loads(out.read_text())
    assert report["serving decoder"]["temperature"] == 1.5
    judged, unjudged = report["data sets"]["sums"], report["data sets"]["open"]
    assert [(r["line"], r["sample"]) for r in judged["responses"]] == [
        (line, sample) for line in range(1, 6) for sample in range(4)
    ]
    metrics = judged["metrics"]
    right = [r["correct"] for r in judged["responses"]]
    assert metrics["eval/accuracy"] == pytest.approx(sum(right) / 20)
    assert 0 < sum(right) < 20
    assert metrics["eval/accuracy"] <= metrics["eval/pass@2"] <= metrics["eval/pass@4"]
    best = [max(right[4 * p : 4 * p + 4]) for p in range(5)]
    assert metrics["eval/pass@4"] == pytest.approx(sum(best) / 5)
    assert metrics["eval/accuracy_low"] <= metrics["eval/accuracy"] <= metrics["eval/accuracy_high"]
    assert "eval/accuracy" not in unjudged["metrics"] and len(unjudged["responses"]) == 8
    assert metrics["eval/reverse_kl"] > 0 < unjudged["metrics"]["eval/reverse_kl"]


def test_the_serving_decoder_changes_no_log_probability(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    prompts = write_rows(tmp_path / "p.jsonl", {"prompt": "1 +", "answer": "e"})
    kls = []
    for decoder in (["eval.temperature=0"], ["eval.temperature=2", "eval.top_k=3"]):
        out = tmp_path / "report.json"
        code = evaluate(
            tiny_pair, f"prompts={prompts}", f"out={out}", f"teacher={tiny_pair.teacher}",
            "temperature=0.7", *decoder,
        )  # fmt: skip
        assert code == 0
        kls.append(json.loads(out.read_text())["data sets"]["p"]["metrics"]["eval/reverse_kl"])
    assert kls[0] == kls[1]


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("prompts=x.jsonl,x.jsonl", "x.jsonl"),
        ("prompts=,", "data.source=,"),
        ("prompts=x.jsonl:2,y.jsonl", "data.source=x.jsonl:2,y.jsonl"),
        ("answer_pattern=(", "data.answer_pattern=("),
        ("prompts=no-such-file.jsonl", "no-such-file.jsonl"),
        ("columns.anser=a", "columns.anser=a"),
        ("teacher=policy temperature=1", "teacher=policy"),
    ],
)
def test_bad_input_is_refused(
    tiny_pair: TinyPair, capsys: pytest.CaptureFixture[str], argument: str, named: str
) -> None:
    assert evaluate(tiny_pair, f"prompts={tiny_pair.prompts}", *argument.split()) == 2
    assert named in " ".join(capsys.readouterr().err.split())
