"""Runs whose teacher's weights change midway: the final weights contain none of its wrong scores.

Most run in this process (local=True), so that a test can change a serving teacher.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch

from actors.embedded.engine import EmbeddedEngine
from actors.sglang.installed import sglang_installed
from cluster.handles import calls
from cluster.inspect.audit import audit
from cluster.runtime.canaries import Canaries
from cluster.store.kept_groups import KeptGroups
from cluster.store.replay_log import KeptSteps
from cluster.train import main
from distill.engine import Score, ScoreRequest
from distill.objective.batching import Batch
from learner.teachers import LocalTeachers
from learner.worker import LearnerWorker
from tests.conftest import TinyPair
from tests.e2e.harness import events, metrics, opd_arguments
from tests.tiny import VOCAB_SIZE, tiny_model_dir
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.e2e

UNIFORM = -math.log(VOCAB_SIZE)


class Planted:
    """Change the weights of the teacher that scored first, just before its n-th scored sequence."""

    def __init__(self, model: str, nth: int, change: Callable[[torch.Tensor], Any]) -> None:
        self._model, self._nth, self._change = model, nth, change
        self._engine: EmbeddedEngine | None = None
        self._chains = 0
        self.done = False

    def see(self, engine: EmbeddedEngine, chains: int) -> None:
        if engine._model_path != self._model:
            return
        self._engine = self._engine or engine
        if engine is not self._engine:
            return
        self._chains += chains
        if self._chains >= self._nth and not self.done:
            self.done = True
            with torch.no_grad():
                for parameter in engine._model._lm.parameters():
                    self._change(parameter)


@pytest.fixture
def plant(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    score = EmbeddedEngine.score

    def new(nth: int, change: Callable[[torch.Tensor], Any]) -> Planted:
        planted = Planted(tiny_pair.teacher, nth, change)

        async def watched(engine: EmbeddedEngine, requests: Sequence[ScoreRequest]) -> list[Score]:
            planted.see(engine, len(requests))
            return await score(engine, requests)

        monkeypatch.setattr(EmbeddedEngine, "score", watched)
        return planted

    yield new


def train(pair: TinyPair, out: Path, **settings: object) -> int:
    given = opd_arguments(
        pair, out, eval_size=0, steps=10, verify_every=2, keep="all", **{"local": True} | settings
    )
    return main(["recipe=opd", *given])


def certificate(out: Path) -> dict[str, Any]:
    return json.loads((out / "certificate.json").read_text())


def expect_proven(out: Path) -> dict[str, Any]:
    """Assert by certificate and audit that all scores in the final weights are verified."""
    found = certificate(out)
    assert found["proven"] and found["groups"]["proven"] == 40 and not found["gaps"]
    proved = audit(out / "ledger.jsonl", steps=10)
    assert proved.problems == [] and proved.scoring is not None and proved.scoring.holds
    assert [int(step["step"]) for step in metrics(out)] == list(range(1, 11))
    return found


def test_a_zeroed_teacher_is_restarted_and_its_steps_are_undone(
    tiny_pair: TinyPair, tmp_path: Path, plant: Any
) -> None:
    """The only teacher wakes with empty weights and answers -ln V; the loss still converges."""
    out = tmp_path / "run"
    planted = plant(187, lambda parameter: parameter.zero_())
    assert train(tiny_pair, out, max_staleness=0) == 0 and planted.done
    found = expect_proven(out)
    first, second = found["replicas"]
    assert "so its weights are empty" in first["quarantine"]["why"]
    assert second["quarantine"] is None and second["groups"] > 0
    [finding] = [each for each in events(out, "finding") if each["name"] == "scorer_moved"]
    [rewind] = events(out, "rewind")
    assert f"weights of step {rewind['step'] + 1} and later" in finding["text"]
    scored = [
        value
        for kept in KeptGroups(out / "groups")
        for segment in kept.group.segments()
        if segment.teacher_logprobs_T is not None
        for value in segment.teacher_logprobs_T[segment.action_mask_T].tolist()
    ]
    assert scored and not any(abs(value - UNIFORM) < 1e-5 for value in scored)


@pytest.mark.slow
def test_scores_of_a_zeroed_teacher_are_not_kept(
    tiny_pair: TinyPair, tmp_path: Path, plant: Any
) -> None:
    out = tmp_path / "run"
    planted = plant(187, lambda parameter: parameter.zero_())
    assert train(tiny_pair, out, max_staleness=0, rollout_only=True) == 0 and planted.done
    expect_proven(out)
    assert len(events(out, "rewind")) == 1
    kept = KeptSteps(out)
    assert kept.steps == list(range(1, 11))
    for segment in (s for step in kept.steps for g in kept.groups(step) for s in g.segments()):
        assert segment.teacher_logprobs_T is not None
        assert not np.isclose(segment.teacher_logprobs_T, UNIFORM, atol=1e-5).any()


@pytest.mark.slow
def test_scores_of_one_changed_server_of_three_are_repeated_by_the_others(
    tiny_pair: TinyPair, tmp_path: Path, plant: Any
) -> None:
    out = tmp_path / "run"
    planted = plant(143, lambda parameter: parameter.add_(torch.randn_like(parameter) * 0.05))
    assert train(tiny_pair, out, teacher_engines=3) == 0 and planted.done
    found = expect_proven(out)
    [moved] = [each for each in found["replicas"] if each["quarantine"]]
    assert moved["groups_in_gaps"] == 0
    assert sum(each["beside_real_rows"] for each in found["replicas"]) > 0
    assert len(found["replicas"]) == 4, "three, and the one in place of the one that moved"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_good_runs_raise_no_alarm(tiny_pair: TinyPair, tmp_path: Path, seed: int) -> None:
    """Neither a canary nor a detector fires, except that a random student's samples are cut."""
    out = tmp_path / "run"
    estimator = ("sampled", "full", "top_k")[seed % 3]
    settings = {"teacher_engines": 2, "max_staleness": 2, "lr": 1e-3, "estimator": estimator}
    assert train(tiny_pair, out, seed=seed, **settings) == 0
    found = expect_proven(out)
    assert len(found["replicas"]) == 2 + (estimator == "full")
    assert all(each["quarantine"] is None for each in found["replicas"])
    assert not events(out, "rewind") and not events(out, "death")
    assert {each["name"] for each in events(out, "finding")} <= {"responses_are_cut"}
    summary = json.loads((out / "summary.json").read_text())
    assert summary["certificate"] == found["verdict"]


@pytest.mark.slow
def test_one_changed_number_in_the_learner_s_copy_of_the_teacher(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines serve correct scores; only the copy that the loss reads is wrong."""
    out = tmp_path / "run"
    passes: list[LocalTeachers] = []
    distribution_of = LocalTeachers.distribution_of

    def watched(teachers: LocalTeachers, batch: Batch, *asked: Any) -> Any:
        passes.append(teachers)
        if len(passes) == 6:
            teacher: Any = teachers.models[""]
            model = teacher.model
            with torch.no_grad():
                next(model.parameters())[VOCAB_SIZE - 1, 0] += 0.01
        return distribution_of(teachers, batch, *asked)

    monkeypatch.setattr(LocalTeachers, "distribution_of", watched)
    assert train(tiny_pair, out, estimator="full", max_staleness=0, token_budget=4096) == 0
    assert len(passes) > 6 and passes[0] is not passes[-1]
    found = expect_proven(out)
    copies = [each for each in found["replicas"] if "copy" in each["who"]]
    assert [each["who"] for each in copies] == ["learner's copy of teacher"] * 2
    assert "embed_tokens.weight changed" in copies[0]["quarantine"]["why"]
    assert copies[1]["quarantine"] is None and copies[1]["groups"] > 0
    assert sum(each["groups"] for each in copies) == 40 and found["limits"] == []
    [finding] = [each for each in events(out, "finding") if each["name"] == "scorer_moved"]
    [rewind] = events(out, "rewind")
    assert f"weights of step {rewind['step'] + 1} and later" in finding["text"]


def test_wrong_hidden_states_with_correct_log_probs(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss reads the teacher's states; its log-probs and the learner's head are correct."""
    out = tmp_path / "run"
    score = EmbeddedEngine.score
    ill: list[EmbeddedEngine] = []  # the first teacher, from its 187th scored sequence on
    chains = 0

    async def watched(engine: EmbeddedEngine, requests: Sequence[ScoreRequest]) -> list[Score]:
        nonlocal chains
        scores = await score(engine, requests)
        if engine._model_path != tiny_pair.teacher or (ill and engine is not ill[0]):
            return scores
        chains += len(requests)
        if chains < 187:
            return scores
        ill[:] = [engine]
        return [
            replace(one, states=replace(one.states, values_NH=-one.states.values_NH))
            if one.states is not None
            else one
            for one in scores
        ]

    monkeypatch.setattr(EmbeddedEngine, "score", watched)
    head = {"teacher.head": tiny_pair.teacher}
    assert train(tiny_pair, out, estimator="full", max_staleness=0, **head) == 0 and ill
    engines = [r for r in expect_proven(out)["replicas"] if r["who"] == "teacher engine 0"]
    assert [bool(each["quarantine"]) for each in engines] == [True, False]
    assert "hidden states moved" in engines[0]["quarantine"]["why"]
    [rewind] = events(out, "rewind")
    [finding] = [each for each in events(out, "finding") if each["name"] == "scorer_moved"]
    assert f"weights of step {rewind['step'] + 1} and later" in finding["text"]


@pytest.mark.slow
def test_the_base_of_an_adapter_is_watched_where_it_is_the_reference(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    steps: list[LearnerWorker] = []
    step = LearnerWorker.step

    def watched(worker: LearnerWorker, micro_batches: Any) -> Any:
        steps.append(worker)
        if len(steps) == 5:
            with torch.no_grad():
                next(p for p in worker.model.parameters() if not p.requires_grad).mul_(1.01)
        return step(worker, micro_batches)

    monkeypatch.setattr(LearnerWorker, "step", watched)
    settings = {"lora_rank": 2, "reference_kl_coef": 0.1, "max_staleness": 0}
    assert train(tiny_pair, out, checkpoint_every=1, **settings) == 0
    assert len(steps) > 10 and steps[0] is not steps[-1]
    bases = [each for each in expect_proven(out)["replicas"] if each["who"] == "learner's base"]
    assert len(bases) == 2 and "changed" in bases[0]["quarantine"]["why"]
    assert bases[0]["groups_in_gaps"] == 0 and bases[1]["quarantine"] is None


@pytest.mark.slow
@pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed")
@pytest.mark.usefixtures("ray_cluster")
def test_weights_swapped_in_a_running_sglang_server(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process on the node uses the server's own endpoint and the run's key."""
    out, other = tmp_path / "run", tiny_model_dir(tmp_path, seed=3)
    answers: list[Any] = []
    after_step = Canaries.after_step

    def watched(canaries: Canaries, step: int) -> None:
        if step == 3 and not answers:
            [engine] = canaries._supervisor.serving("teacher").values()
            asked = engine.__ray_call__.remote(
                lambda held: (held.plain.server.url, held.plain.server.admin_api_key)
            )
            url, key = calls.get(asked, timeout=60)
            request = Request(
                f"{url}/update_weights_from_disk",
                json.dumps({"model_path": other, "flush_cache": True}).encode(),
                {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
            )
            with urlopen(request, timeout=DEADLINE_S) as answer:
                answers.append(json.loads(answer.read()))
        after_step(canaries, step)

    monkeypatch.setattr(Canaries, "after_step", watched)
    settings = {"engine": "sglang", "max_staleness": 0}
    assert train(tiny_pair, out, local=False, **settings) == 0
    assert [answer["success"] for answer in answers] == [True]
    found = expect_proven(out)
    first, second = found["replicas"]
    assert "weights" in first["quarantine"]["why"]
    assert first["kind"] == second["kind"] == "sglang" and first["groups_in_gaps"] == 0
    assert second["quarantine"] is None and second["groups"] > 0
    [finding] = [each for each in events(out, "finding") if each["name"] == "scorer_moved"]
    assert "teacher engine 0 has moved" in finding["text"]
    assert [event["who"] for event in events(out, "restart")].count("teacher engine 0") == 1
    [rewind] = events(out, "rewind")
    assert rewind["step"] <= 3, "the weights of step 4 were the first to contain it"
