"""Concurrent evaluations (eval_engines=): steps continue, and no number changes."""

import json
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from cluster.base.outcomes import Interrupted
from cluster.inspect.audit import audit
from cluster.recipes.context import Observer
from cluster.runtime.driver import Signals
from tests.conftest import TinyPair
from tests.e2e import harness
from tests.e2e.harness import evaluations, events, lines, metrics, process_of, trained_groups
from tests.rows import read_rows, write_rows
from tests.waiting import until

pytestmark = pytest.mark.e2e


def rows(path: Path, answer: str) -> str:
    """Eight problems with the same answer."""
    made = ({"prompt": f"{a} + {b} =", "answer": answer} for a in range(4) for b in (1, 3))
    return write_rows(path, *made)


def distil(
    pair: TinyPair, out: Path, *, waits_for: str, training: str = "none", **overrides: object
) -> Path:
    """Run whose evaluations wait for an event; with `training`, its rollouts wait too."""
    settings = {
        "max_new_tokens": 6, "lr": 1e-3, "checkpoint_every": 100, "local": False,
        "max_staleness": 0, "eval_every": 2, "eval_engines": 1, "eval_size": 4,
        "prompts": rows(out.parent / f"{out.name}-train.jsonl", f"{out}|{training}"),
        "eval_source": rows(out.parent / f"{out.name}-eval.jsonl", f"{out}|{waits_for}"),
        "reward": "tests.e2e.rewards:patient", "smoke_test": False,
    }  # fmt: skip
    harness.distil(pair, out, **settings | overrides)
    return out


def measured(out: Path) -> dict[int, Mapping[str, float]]:
    """Evaluations of the policy between the first and the last step, by step."""
    found = [line for line in lines(out) if "time/eval" in line and 0 < line["step"] < 6]
    assert len(found) == len({line["step"] for line in found})
    return {int(line["step"]): line for line in found}


def place(out: Path, event: str, **fields: object) -> int:
    """Index of the line of events.jsonl that has these fields."""
    written = read_rows(out / "events.jsonl")
    wanted = {"event": event, **fields}
    [found] = [i for i, line in enumerate(written) if wanted.items() <= line.items()]
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_steps_continue_during_an_evaluation_with_the_same_numbers(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    out = distil(
        tiny_pair, tmp_path / "beside", waits_for="step", training="none",
        keep_best="eval/reverse_kl", keep_last=1,
    )  # fmt: skip
    assert (
        place(out, "evaluation begins", step=2)
        < place(out, "step", step=3)
        < place(out, "evaluation", who="step 2")
    )
    assert [line["step"] for line in metrics(out)] == [1, 2, 3, 4, 5, 6]
    beside = measured(out)
    assert [(step, line["eval/version"]) for step, line in beside.items()] == [(2, 2), (4, 4)]
    assert not any("time/eval" in line for line in metrics(out)), "they are lines of their own"

    between = distil(tiny_pair, tmp_path / "between", waits_for="none", eval_engines=0, local=True)
    for step, line in measured(between).items():
        ours = {name: beside[step][name] for name in line if name.startswith("eval/")}
        theirs = {name: value for name, value in line.items() if name.startswith("eval/")}
        assert ours == pytest.approx(theirs, abs=1e-4)

    kept = [
        [line["who"] for line in map(json.loads, (run / "evaluations.jsonl").open())]
        for run in (out, between)
    ]
    assert kept[0] == kept[1]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["eval step 4"]["eval/version"] == 4
    by_step = {line["step"]: line["eval/reverse_kl"] for line in [*beside.values(), after(out)]}
    best = min(by_step, key=lambda step: by_step[step])
    assert summary["best"]["step"] == best and (out / f"checkpoints/step-{best:06d}").is_dir()


def after(out: Path) -> Mapping[str, float]:
    [line] = [line for line in evaluations(out) if line["step"] == 6]
    return line


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("victim", "then"), [("evaluation engine 0", "back"), ("learner", "rewind")]
)
def test_deaths_during_an_evaluation_do_not_lose_it(
    tiny_pair: TinyPair, tmp_path: Path, victim: str, then: str
) -> None:
    out = tmp_path / "run"

    def kill() -> None:
        until(lambda: events(out, "evaluation begins"))
        os.kill(process_of(victim, out), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    distil(tiny_pair, out, waits_for="death", training=then, checkpoint_every=1)
    killer.join()
    assert [event["who"] for event in events(out, "death")] == [victim]
    assert trained_groups(out) == list(range(6 * 4)) and audit(out / "ledger.jsonl").problems == []
    steps = measured(out)
    assert all(line["eval/version"] == step for step, line in steps.items())
    if victim == "learner":
        assert sorted(steps) == [2, 4]
    else:
        [lost] = events(out, "evaluation lost")
        assert lost["step"] == 2 and min(steps) in (3, 4)
        assert len(events(out, "evaluation begins")) == len(steps) + 1


def test_an_interrupted_run_cancels_its_evaluation(tiny_pair: TinyPair, tmp_path: Path) -> None:
    signals = Signals()

    def line(written: Mapping[str, float]) -> None:
        if written["step"] == 2:  # its evaluation has begun
            signals.received = signal.SIGTERM

    out = tmp_path / "run"
    observer = Observer(line=line, signals=signals)
    with pytest.raises(Interrupted):
        distil(
            tiny_pair, out, waits_for="nothing that happens", steps=500, local=True,
            observer=observer,
        )  # fmt: skip
    assert place(out, "evaluation begins", step=2) < place(out, "evaluation given up", step=2)
    assert not measured(out)
    assert (out / "checkpoints/step-000002/manifest.json").is_file()
