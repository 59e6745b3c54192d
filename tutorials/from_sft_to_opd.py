import marimo

app = marimo.App(width="medium")


@app.cell
def _():
    import marimo as mo

    mo.md("""
    # From SFT to OPD

    Supervised fine-tuning (SFT) trains a student on a few given answers. On-policy distillation (OPD) needs
    questions alone: the student answers them, and a teacher scores each token of its answers. This notebook runs
    SFT and then OPD, and compares the result with that of more SFT.

    With `-- --steps 2` after the file's name, each training lasts two steps, and assertions that need more steps are
    left out.
    """)
    return (mo,)


@app.cell
def _(mo):
    import tempfile
    from pathlib import Path

    import matplotlib.pyplot as plt
    import numpy as np

    import isotherm
    from cluster.demos.arithmetic import Problems, train_tokenizer
    from distill.models.loading import new_qwen3

    T = 1.0
    MOST_STEPS = mo.cli_args().get("steps")
    SCRATCH = tempfile.TemporaryDirectory(prefix="isotherm-tutorial-")  # removed at the end
    ROOT = Path(SCRATCH.name)

    def steps(full):
        return full if MOST_STEPS is None else min(full, int(MOST_STEPS))

    def random_model(name, seed):
        directory = ROOT / name
        letters = train_tokenizer(directory, Problems.split(held_out=9, seed=0).held_out)
        ids = letters.get_vocab()
        new_qwen3(
            vocab_size=len(ids),
            hidden_size=64,
            layers=1,
            heads=2,
            context_length=64,
            eos_token_id=ids["<eos>"],
            pad_token_id=ids["<pad>"],
            seed=seed,
        ).save_pretrained(directory)
        return str(directory)

    return MOST_STEPS, ROOT, T, isotherm, np, plt, random_model, steps


@app.cell
def _(mo):
    mo.md("""
    ## The task and the data

    The right answer to "472=" is "583": the successor of each digit, where 0 follows 9. Of the thousand questions,
    64 are held out: no model is trained on them. The student is trained on 30 questions with answers, and on 400
    without.
    """)
    return


@app.cell
def _(np):
    QUESTIONS = [f"{number:03d}=" for number in np.random.default_rng(0).permutation(1000)]
    HELD_OUT, WITH_ANSWERS, WITHOUT = QUESTIONS[:64], QUESTIONS[64:94], QUESTIONS[94:494]

    def answer(question):
        return "".join(str((int(digit) + 1) % 10) for digit in question[:-1])

    return HELD_OUT, QUESTIONS, WITHOUT, WITH_ANSWERS, answer


@app.cell
def _(QUESTIONS, ROOT, answer, isotherm, np, random_model, steps):
    random = np.random.default_rng(1)

    def supervised_step(policy, questions, count):
        rows = [policy.supervised_row(q, answer(q)) for q in random.choice(questions, count)]
        policy.forward_backward(rows, loss="cross_entropy")
        policy.optim_step()

    with isotherm.Policy(random_model("untaught", seed=2), lr=1e-2, device="cpu") as _policy:
        for _ in range(steps(200)):
            supervised_step(_policy, QUESTIONS[64:], 64)
        _directory = _policy.export(ROOT / "teacher")
    teacher = isotherm.Sampler(str(_directory), device="cpu")
    return random, supervised_step, teacher


@app.cell
def _(HELD_OUT, T, WITH_ANSWERS, answer, isotherm, np, teacher):
    def measured(policy, questions=HELD_OUT):
        """Accuracy of greedy answers to these questions, and KL(p_T || q_T) of samples, in nats per
        token."""
        greedy = policy.sample_batch(questions, temperature=0, max_new_tokens=4)
        right = [group[0].text == answer(q) for q, group in zip(questions, greedy, strict=True)]
        groups = policy.sample_batch(questions, temperature=T, max_new_tokens=4, num_samples=2)
        sampled = [completion for group in groups for completion in group]
        log_p = np.concatenate([each.logprobs_T for each in sampled])
        return float(np.mean(right)), float((log_p - np.concatenate(teacher.score(sampled))).mean())

    def train(model, count, step, every=5, **settings):
        """Train for `count` steps; return the directory of the trained model, a curve of (steps,
        accuracy, KL), and the accuracy on the questions that have answers."""
        curve = []
        with isotherm.Policy(model, device="cpu", **settings) as policy:
            for done in range(count):
                if done % every == 0:
                    curve.append((done, *measured(policy)))
                step(policy)
                policy.push()
            curve.append((count, *measured(policy)))
            known, _ = measured(policy, WITH_ANSWERS)
            trained = str(policy.export(f"{model}-{step.__name__}"))
        return trained, np.array(curve), known

    return (train,)


@app.cell
def _(mo):
    mo.md("""
    ## Supervised fine-tuning

    100 steps on the 30 answers. The student learns the format of an answer, and a part of the rule.
    """)
    return


@app.cell
def _(WITH_ANSWERS, random_model, steps, supervised_step, train):
    def sft(policy):
        supervised_step(policy, WITH_ANSWERS, 32)

    STUDENT, first_stage, accuracy_in_training = train(
        random_model("student", seed=1), steps(100), sft, lr=1e-2
    )
    return STUDENT, accuracy_in_training, first_stage, sft


@app.cell
def _(mo):
    mo.md("""
    ## On-policy distillation, and more SFT

    In a step of OPD, the student answers 32 of the questions without answers, four times each. The advantage of a
    token is log q_T - log p_T: the teacher's log-prob minus the student's, both at temperature T. For comparison,
    the same student is trained for as many steps of SFT on the 30 answers.
    """)
    return


@app.cell
def _(STUDENT, T, WITHOUT, random, sft, steps, teacher, train):
    def opd(policy):
        groups = policy.sample_batch(
            list(random.choice(WITHOUT, 32)), temperature=T, max_new_tokens=4, num_samples=4
        )
        sampled = [completion for group in groups for completion in group]
        rows = [
            each.row(advantages=log_q - each.logprobs_T)
            for each, log_q in zip(sampled, teacher.score(sampled), strict=True)
        ]
        policy.forward_backward(rows, loss="importance_sampling")
        policy.optim_step()

    _, distilled, _ = train(STUDENT, steps(50), opd, lr=5e-3)
    _, more_sft, _ = train(STUDENT, steps(50), sft, lr=5e-3)
    return distilled, more_sft


@app.cell
def _(distilled, first_stage, more_sft, plt):
    _figure, _axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    _begin = first_stage[-1, 0]
    for _axis, _column, _title in zip(
        _axes, (1, 2), ("held-out accuracy", "reverse KL, nats per token"), strict=True
    ):
        _axis.plot(first_stage[:, 0], first_stage[:, _column], label="SFT", color="#444444")
        for _curve, _name, _colour in (
            (distilled, "then OPD", "#0072B2"),
            (more_sft, "then more SFT", "#D55E00"),
        ):
            _axis.plot(_begin + _curve[:, 0], _curve[:, _column], label=_name, color=_colour)
        _axis.axvline(_begin, color="#BBBBBB", linestyle=":")
        _axis.set(xlabel="step", title=_title)
    _axes[0].legend()
    _figure
    return


@app.cell
def _(MOST_STEPS, accuracy_in_training, distilled, first_stage, mo, more_sft):
    (_, _before, _kl_before), (_, _opd, _kl_opd), (_, _sft, _kl_sft) = (
        curve[-1] for curve in (first_stage, distilled, more_sft)
    )
    assert distilled[0, 1] == more_sft[0, 1] == _before, (
        "both start from the student of the first stage"
    )
    if MOST_STEPS is None:
        assert accuracy_in_training == 1 and first_stage[0, 1] < 0.1 and 0.2 < _before < 0.75
        assert _opd > 0.95 and _kl_opd < 0.2
        assert _sft < 0.8 and _kl_sft > 5 * _kl_opd
    mo.md(f"""
    After SFT the student answers {accuracy_in_training:.0%} of its 30 questions correctly and **{_before:.0%}** of the
    held-out ones; its reverse KL to the teacher is {_kl_before:.2f} nats per token. After 50 more steps of SFT these
    are **{_sft:.0%}** and {_kl_sft:.2f} nats; after 50 steps of OPD **{_opd:.0%}** and {_kl_opd:.2f} nats.

    SFT trains on the same 30 answers again. OPD trains on the student's own tokens, including the wrong ones, and
    needs questions alone. But a student whose samples are all wrong learns little from the teacher's scores, so
    SFT comes first.

    The same two stages as runs, with evaluation, a report and resume:

    ```
    python -m cluster.train recipe=sft model=DIR data=answers.jsonl out=runs/sft
    python -m cluster.train recipe=opd student=runs/sft/final teacher=TEACHER prompts=questions.jsonl out=runs/opd temperature=1.0
    ```
    """)
    return


if __name__ == "__main__":
    from as_script import run_as_script

    run_as_script(app, __file__)
