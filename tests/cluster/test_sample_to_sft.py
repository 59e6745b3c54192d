"""Rows for SFT sampled from a checkpoint and from an endpoint; hints are not in the rows."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config.recipes import make
from cluster.config.supervised_checks import check_sft
from cluster.sample_to_sft import main
from tests.actors.judge_server import API_KEY, MODEL, ScriptedJudge, running_judge
from tests.rows import read_rows, write_rows
from tests.tiny import TinyPair


def short(response: str, answer: str) -> float:
    return float(len(response) <= int(answer))


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedJudge]:
    monkeypatch.setenv("ISOTHERM_ENDPOINT_API_KEY", API_KEY)
    with running_judge() as server:
        yield server


def test_a_checkpoint_s_short_answers_become_rows(
    tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_rows(
        tmp_path / "prompts.jsonl",
        *({"prompt": f"{a} + 1 =", "answer": 20} for a in range(4)),
        {"prompt": "say"},
    )
    data = tmp_path / "rows.jsonl"
    asked = [
        f"model={tiny_pair.student}", f"prompts={prompts}", f"data={data}", "samples=8",
        "max_new_tokens=64", f"reward={__name__}:short", "engine=embedded",
    ]  # fmt: skip
    assert main(asked) == 0, capsys.readouterr().err
    rows = read_rows(data)
    assert rows and {row["prompt"] for row in rows} <= {"say", *(f"{a} + 1 =" for a in range(4))}
    for row in rows:
        if row["prompt"] == "say":
            assert row["reward"] is None
        else:
            assert row["reward"] == 1.0 and len(row["completion"]) <= 20
    again = tmp_path / "again.jsonl"
    assert main([*asked, f"data={again}"]) == 0
    assert read_rows(again) == rows, "the seed decides"
    assert main([*asked, f"data={again}", "keep=best"]) == 0
    best = read_rows(again)
    assert len(best) == len({row["line"] for row in rows}) and all(row in rows for row in best)
    inputs = check_sft(
        make("sft", model=tiny_pair.student, data=str(data), out=str(tmp_path / "o"), batch_size=1)
    )
    assert len(inputs.rows_D) == len(rows)


def test_an_endpoint_sees_the_hint_and_the_row_does_not(
    endpoint: ScriptedJudge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.script = lambda text, _given: "7" if "hint" in text else "8"
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "3 + 4?"}]
    shown = [*chat[:1], {"role": "user", "content": "3 + 4? (hint: 7)"}]
    prompts = write_rows(
        tmp_path / "prompts.jsonl",
        {"messages": chat, "teacher_messages": shown, "answer": "7"},
        {"prompt": "2 + 5?", "teacher_prompt": "2 + 5? (hint: 7)", "answer": "7"},
    )
    data = tmp_path / "rows.jsonl"
    asked = [
        f"model={endpoint.url}", f"name={MODEL}", f"prompts={prompts}", f"data={data}",
        "samples=2", "temperature=0.5", "max_new_tokens=9",
    ]  # fmt: skip
    assert main(asked) == 1
    assert not data.exists()
    assert main([*asked, "hinted=True"]) == 0, capsys.readouterr().err
    first, second = read_rows(data)
    assert first["messages"] == [*chat, {"role": "assistant", "content": "7"}]
    assert (second["prompt"], second["completion"]) == ("2 + 5?", "7")
    endpoint.script = lambda *_: "7 \ud83d"  # an answer cut within a surrogate pair
    assert main([*asked, "hinted=True", "min_reward=0"]) == 0, capsys.readouterr().err
    assert read_rows(data)[1]["completion"] == "7 \ud83d"
    endpoint.script = lambda *_: "7"
    assert main([*asked, "hinted=True"]) == 0
    assert "(hint" not in data.read_text()
    body = endpoint.bodies[-1]
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0.5, 9, MODEL)
    endpoint.finish_reason = "length"
    assert main([*asked, "hinted=True"]) == 1, "a cut answer became a row"


def test_equal_prompts_of_two_sources_have_different_samples(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    files = [write_rows(tmp_path / name, {"prompt": "say"}) for name in ("a.jsonl", "b.jsonl")]
    prompts = ",".join(map(str, files))
    asked = [
        f"model={tiny_pair.student}", f"prompts={prompts}", f"data={data}", "samples=4",
        "max_new_tokens=64", "engine=embedded",
    ]  # fmt: skip
    assert main(asked) == 0
    completions = [
        {r["completion"] for r in read_rows(data) if r["source"] == file} for file in files
    ]
    assert all(completions) and not completions[0] & completions[1]


@pytest.mark.parametrize(("places", "most"), [(16, 4), (2, 2)])
def test_samples_of_a_prompt_are_requested_concurrently(
    endpoint: ScriptedJudge, tmp_path: Path, places: int, most: int
) -> None:
    endpoint.meets, endpoint.delay_s = most, 0.1
    prompts = write_rows(tmp_path / "prompts.jsonl", {"prompt": "a"})
    asked = [
        f"model={endpoint.url}", f"name={MODEL}", f"prompts={prompts}", "samples=4",
        f"data={tmp_path / 'rows.jsonl'}", f"max_concurrent={places}",
    ]  # fmt: skip
    assert main(asked) == 0
    assert len(endpoint.bodies) == 4 and endpoint.most_at_once == most


def test_an_endpoint_that_refuses_is_named_without_its_key(
    endpoint: ScriptedJudge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ISOTHERM_ENDPOINT_API_KEY", "another-key")
    prompts = write_rows(tmp_path / "prompts.jsonl", {"prompt": "a", "answer": "b"})
    data = tmp_path / "rows.jsonl"
    assert (
        main([f"model={endpoint.url}", f"name={MODEL}", f"prompts={prompts}", f"data={data}"]) == 1
    )
    errors = capsys.readouterr().err
    assert endpoint.url in errors and "ISOTHERM_ENDPOINT_API_KEY is set" in errors
    assert "another-key" not in errors and not data.exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data": "rows.txt"}, "data=rows.txt"),
        ({"model": "http://h:1/v1"}, "name"),
        ({"name": "x"}, "name=x"),
        ({"samples": "2", "temperature": "0"}, "samples=2"),
        ({"reward": "model:m"}, "model:m"),
        ({"prompts": "a.jsonl:2,b.jsonl"}, "a.jsonl:2,b.jsonl"),
        ({"columns.tag": "topic"}, "columns.tag=topic"),
        ({"hinted": "True"}, ":1"),
    ],
)
@pytest.mark.usefixtures("hub_cache")
def test_bad_input_is_refused_before_sampling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], named: str
) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", {"prompt": "a", "answer": "b"})
    given = {
        "model": "a/b", "prompts": str(prompts), "data": str(tmp_path / "rows.jsonl"),
    } | changes  # fmt: skip
    assert main([f"{name}={value}" for name, value in given.items()]) in (1, 2)
    assert named in capsys.readouterr().err
