"""Forecasts of planted pairs, and their numbers compared with slow twins."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.forecast import main
from cluster.inspect.forecast.judge import Pair, judge
from cluster.inspect.forecast.measure import AnswerStats, PairMeasurements, mass_in_common
from distill.objective.noise_scale import NoiseScale, noise_scale
from distill.types import TopLogprobs
from tests.e2e.harness import train
from tests.rows import write_rows
from tests.tiny import save_tokenizer, tiny_model_dir

SUMS = [(a, b) for a in range(5) for b in range(5)]


def schooled(root: Path, name: str, seed: int, answers: list[list[str]]) -> str:
    """A model trained on these answers to the sums."""
    start = tiny_model_dir(root / name, seed=seed, sharpness=1.0, hidden_size=32, layers=1)
    save_tokenizer(start)
    rows = [
        {"prompt": f"{a}+{b}=", "completion": answer}
        for (a, b), texts in zip(SUMS, answers, strict=True)
        for answer in texts
    ]
    book = write_rows(root / f"{name}.jsonl", *rows)
    out = root / name / "run"
    train(
        "sft", out, model=start, data=book, steps=80, batch_size=25, lr=1e-2,
        checkpoint_every=1000, local=True,
    )  # fmt: skip
    return str(out / "final")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """`student` is right half of the time, `good` always, and `mannered` in another format."""
    root = tmp_path_factory.mktemp("forecast")
    careless = [[str(a + b), str(a + b + 1)] for a, b in SUMS]
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in SUMS]
    prompts = write_rows(root / "prompts.jsonl", *rows)
    student = schooled(root, "student", 1, careless)
    return {
        "prompts": prompts,
        "student": student,
        "copy": str(shutil.copytree(student, root / "copy")),
        "good": schooled(root, "good", 3, [[str(a + b)] for a, b in SUMS]),
        "mannered": schooled(root, "mannered", 4, [[f"~{a + b}~"] for a, b in SUMS]),
    }


@pytest.mark.parametrize(
    ("teacher", "verdict"),
    [("good", "good"), ("mannered", "another style"), ("copy", "same")],
)
def test_planted_pairs_get_their_verdicts(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    teacher: str, verdict: str,
) -> None:  # fmt: skip
    out = tmp_path / "forecast.json"
    code = main(
        [
            f"student={models['student']}", f"teacher={models[teacher]}",
            f"prompts={models['prompts']}", "temperature=0.7", "max_new_tokens=6",
            "engine=embedded", "reward=contains", "group_size=4", f"out={out}", "threads=1",
        ]
    )  # fmt: skip
    printed = " ".join(capsys.readouterr().out.split())
    assert code == 0, printed
    written = json.loads(out.read_text())
    assert written["forecast"]["verdict"] == verdict, written
    assert f"verdict: {verdict}" in printed
    measured = written["measured"]
    assert 0.3 < measured["student"]["reward"] < 0.7
    if teacher == "good":
        assert measured["teacher"]["reward"] > 0.9 and measured["reverse_kl"] > 0.05
        assert written["forecast"]["estimator"] == measured["noise_of"] == "full"
        assert written["pair"]["same_ends"]
    if teacher == "copy":
        assert abs(measured["reverse_kl"]) < 1e-4 and measured["teacher_holds"] == 1


MEASURED = PairMeasurements(
    student=AnswerStats(tokens=100, eos_share=0.9, cut_share=0.1, reward=0.4),
    teacher=AnswerStats(tokens=120, eos_share=0.9, cut_share=0.1, reward=0.8),
    reward_gain=0.4, reward_gain_error=0.05, reverse_kl=0.5, forward_kl=0.6, kl_early=0.4,
    kl_late=0.6, teacher_holds=0.9, student_holds=0.85, prompt_tokens=50,
    noise=NoiseScale(
        signal=1.0, within=100.0, between=25.0, between_error=5.0, prompts=64, group_size=2
    ),
    noise_of="sampled", score_s=2.0, sample_s=20.0,
)  # fmt: skip
PAIR = Pair(same_ends=True, same_template=True)


def test_settings_of_a_good_pair_follow_from_the_measurements() -> None:
    found = judge(MEASURED, PAIR, 1e-5)
    assert (found.verdict, found.warnings, found.lr) == ("good", [], 1e-5)
    assert found.group_size == 2  # the nearest to sqrt(100 / 25 * 0.5)
    assert found.prompts_per_step == 128  # 25 + 100 / 2 = 75, up to a power of two
    tokens = 128 * 2 * (100 + 50)
    assert found.teacher_tokens == tokens
    assert found.teacher_s == pytest.approx(tokens * 2.0 / (128 * 150))


def test_a_gradient_with_little_noise_needs_small_steps() -> None:
    """Independent of the noise between prompts."""
    for between in (-0.1, 0.0, 0.3):
        noise = replace(MEASURED.noise, within=1.3, between=between)
        found = judge(replace(MEASURED, noise=noise, noise_of="full"), PAIR, 1e-5)
        assert found.prompts_per_step * found.group_size <= 32


@pytest.mark.parametrize(
    ("changed", "pair", "names"),
    [
        ({"kl_late": 1.5}, {}, "max_new_tokens"),
        ({"reward_gain": None, "reward_gain_error": None}, {}, "`answer`"),
        ({"teacher": replace(MEASURED.teacher, cut_share=0.7)}, {}, "max_new_tokens"),
        ({"noise": replace(MEASURED.noise, signal=-0.1)}, {}, "noise"),
        ({"noise": replace(MEASURED.noise, between=0.1)}, {}, "group_size=16"),
        ({}, {"same_ends": False}, "stop_tokens="),
        ({}, {"same_template": False}, "chat_template="),
    ],
)
def test_each_sign_of_trouble_has_a_warning(changed: dict, pair: dict, names: str) -> None:
    [warning] = judge(replace(MEASURED, **changed), replace(PAIR, **pair), 1e-5).warnings
    assert names in warning


def test_the_common_mass_equals_that_of_a_loop() -> None:
    random = np.random.default_rng(0)

    def top(seed: int) -> TopLogprobs:
        ids_NK = np.stack([random.permutation(12)[:4] for _ in range(30)]).astype(np.int32)
        p_NK = np.sort(np.random.default_rng(seed).dirichlet(np.ones(5), 30)[:, :4])[:, ::-1]
        return TopLogprobs(ids_NK=ids_NK, logprobs_NK=np.log(p_NK).astype(np.float32))

    first, second = top(1), top(2)
    for n, shares in enumerate(mass_in_common(first, second)):
        for own, other, share in ((first, second, shares[0]), (second, first, shares[1])):
            masses = {
                int(i): float(np.exp(p))
                for i, p in zip(own.ids_NK[n], own.logprobs_NK[n], strict=True)
            }
            common = sum(mass for i, mass in masses.items() if i in other.ids_NK[n])
            assert share == pytest.approx(common / sum(masses.values()), rel=1e-5)


@pytest.mark.parametrize("signal", [0.0, 1.0])
def test_the_noise_scale_is_unbiased(signal: float) -> None:
    """Gradients drawn with a known direction and known noise; means over many measurements."""
    random = np.random.default_rng(0)
    prompts, size, dim = 6, 3, 4
    direction = signal * np.array([1.0, 0.5, 0.0, -0.5])
    between, within = 0.7, 1.3
    found = []
    for _ in range(2000):
        of_prompts = direction + between * random.normal(size=(prompts, 1, dim))
        gradients = of_prompts + within * random.normal(size=(prompts, size, dim))
        means = gradients.mean(1)
        scale = noise_scale(
            squared_PG=(gradients**2).sum(2).tolist(),
            squared_means_P=(means**2).sum(1).tolist(),
            squared_mean=float((means.mean(0) ** 2).sum()),
        )
        found.append((scale.signal, scale.within, scale.between, scale.between_error))
    expected = (direction @ direction, dim * within**2, dim * between**2)
    *means, error = np.mean(found, 0)
    assert means == pytest.approx(expected, rel=0.1, abs=0.05)
    spread = np.std(found, 0)[2]
    assert 0.85 * spread < error < (1.5 if signal else 1.1) * spread


def test_groups_grow_with_the_price_of_a_prompt() -> None:
    scale = NoiseScale(
        signal=1.0, within=16.0, between=4.0, between_error=1.0, prompts=8, group_size=2
    )
    assert [scale.best_group_size(cost) for cost in (0.25, 1.0, 4.0, 100.0)] == [1, 2, 4, 16]
    assert scale.samples == 20 and scale.prompts_for(4) == 8
    blind = replace(scale, signal=0.0)
    assert blind.samples == float("inf") == blind.prompts_for(4)
    assert replace(scale, between=-1.0).best_group_size(1.0) == 16


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("teacher=http://127.0.0.1:1", "teacher=http://127.0.0.1:1"),
        ("teacher=policy", "teacher=policy"),
        ("group_size=1", "sampling.group_size"),
        ("temperature=0", "temperature"),
    ],
)
def test_a_pair_without_a_forecast_is_refused(
    capsys: pytest.CaptureFixture[str], given: str, named: str
) -> None:
    name = given.partition("=")[0]
    arguments = ["student=a", "teacher=b", "prompts=c.jsonl", "temperature=0.7"]
    arguments = [each for each in arguments if not each.startswith(f"{name}=")]
    assert main([*arguments, given]) == 2
    assert named in capsys.readouterr().err
