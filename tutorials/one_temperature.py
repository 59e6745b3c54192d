import marimo

app = marimo.App(width="medium")


@app.cell
def _():
    import marimo as mo

    mo.md("""
    # One temperature

    A student samples at a temperature T, and a teacher scores what it sampled. If the teacher scores at
    another temperature, at 1 say, because that is what its server returns, the number that comes out is
    not KL(p_T || q_T), and training on it does not end at the teacher. Below this bias is seen, measured,
    and gone.

    Two tiny models that know nothing serve as well as any: all that is needed is two distributions over
    tokens.

    With `-- --steps 2` behind the file's name each training is two steps long, and only that is asserted which
    holds by then.
    """)
    return (mo,)


@app.cell
def _(mo):
    import tempfile
    from pathlib import Path

    import matplotlib.pyplot as plt
    import numpy as np
    import torch

    import isotherm
    from cluster.demos.arithmetic import Problems, train_tokenizer
    from distill.models.loading import new_qwen3

    T = 0.5
    SCRATCH = tempfile.TemporaryDirectory(prefix="isotherm-tutorial-")  # removed at the end
    ROOT = Path(SCRATCH.name)
    PROBLEMS = Problems.split(held_out=16, seed=0)
    PROMPTS = [problem.prompt for problem in PROBLEMS.held_out]
    MOST_STEPS = mo.cli_args().get("steps")

    def steps(full):
        return full if MOST_STEPS is None else min(full, int(MOST_STEPS))

    def make_model(name, forgotten=0.0):
        """A random model whose distributions are neither uniform nor certain; or one that has
        forgotten some of what the other knows: noise, as a share of each weight's size."""
        directory = ROOT / name
        vocabulary = train_tokenizer(directory, PROBLEMS.held_out).get_vocab()
        model = new_qwen3(
            vocab_size=len(vocabulary),
            hidden_size=64,
            layers=1,
            heads=2,
            context_length=64,
            eos_token_id=vocabulary["<eos>"],
            pad_token_id=vocabulary["<pad>"],
            seed=1,
        )
        noise = torch.Generator().manual_seed(2)
        for name, weight in model.named_parameters():
            if name.endswith("proj.weight"):
                weight.data.mul_(4)
            size = forgotten * weight.data.std() * (weight.ndim > 1)
            weight.data += size * torch.randn(weight.shape, generator=noise)
        model.model.norm.weight.data.mul_(8)
        model.save_pretrained(directory)
        return str(directory)

    TEACHER, STUDENT = make_model("teacher"), make_model("student", forgotten=0.5)
    return MOST_STEPS, PROMPTS, STUDENT, T, TEACHER, isotherm, np, plt, steps


@app.cell
def _(mo):
    mo.md("""
    ## Seen

    Let the student be an exact copy of the teacher. There is nothing to learn: for every token,
    log p_T = log q_T. The student samples at T = 0.5, and each of its tokens is scored by the teacher, at T
    and at 1.
    """)
    return


@app.cell
def _(PROMPTS, T, TEACHER, isotherm, np):
    teacher = isotherm.Sampler(TEACHER, device="cpu")

    def sample(policy):
        groups = policy.sample_batch(PROMPTS, temperature=T, max_new_tokens=12, num_samples=4)
        return [completion for group in groups for completion in group]

    with isotherm.Sampler(TEACHER, device="cpu") as _student:
        completions = sample(_student)
    log_p = np.concatenate([each.logprobs_T for each in completions])
    log_q = np.concatenate(teacher.score(completions))
    log_q1 = np.concatenate(teacher.score(completions, temperature=1.0))
    return log_p, log_q, log_q1, sample, teacher


@app.cell
def _(T, log_p, log_q, log_q1, plt):
    _figure, _axis = plt.subplots(figsize=(5, 4.5), layout="constrained")
    _axis.scatter(log_p, log_q1, s=8, label="scored at 1", color="#D55E00")
    _axis.scatter(log_p, log_q, s=8, label=f"scored at T = {T}", color="#0072B2")
    _axis.set(
        xlabel="student: log p_T", ylabel="teacher's log-prob", title="a student = its teacher"
    )
    _axis.legend()
    _figure
    return


@app.cell
def _(log_p, log_q, log_q1, mo):
    assert abs(log_p - log_q).max() < 1e-3
    _bias = (log_p - log_q1).mean()
    mo.md(f"""
    At T the points lie on the diagonal: the sampled KL(p_T || q_T) is **{(log_p - log_q).mean():.4f}** nats
    per token. At 1 they do not, and the same mean says **{_bias:.2f}**, of two models that are one.
    `opd/bias` in a run's metrics is this number.
    """)
    return


@app.cell
def _(mo):
    mo.md("""
    ## Measured

    The wrong number can be trained on. Each token's advantage is what the teacher's log-prob is above the
    student's own; its gradient should be zero for a student that is perfect already.
    """)
    return


@app.cell
def _(T, isotherm, np, sample, teacher):
    def distil(student, scored_at, steps):
        """Trains; returns curves: what the training saw, the true KL(p_T || q_T), gradient norms."""
        seen, true, norms = [], [], []
        settings = {"lr": 1e-3, "lr_schedule": "linear", "total_steps": steps, "device": "cpu"}
        with isotherm.Policy(student, **settings) as policy:
            for _ in range(steps):
                completions = sample(policy)
                scores = teacher.score(completions, temperature=scored_at)
                rows = [
                    each.row(advantages=score - each.logprobs_T)
                    for each, score in zip(completions, scores, strict=True)
                ]
                policy.forward_backward(rows, loss="importance_sampling")
                norms.append(policy.optim_step()["train/grad_norm"])
                policy.push()
                log_p = np.concatenate([each.logprobs_T for each in completions])
                seen.append(float((log_p - np.concatenate(scores)).mean()))
                true.append(float((log_p - np.concatenate(teacher.score(completions))).mean()))
        return seen, true, norms

    return (distil,)


@app.cell
def _(T, TEACHER, distil, steps):
    led_away = distil(TEACHER, scored_at=1.0, steps=steps(40))
    [gradient_at_T] = distil(TEACHER, scored_at=T, steps=1)[2]
    return gradient_at_T, led_away


@app.cell
def _(led_away, plt):
    _figure, _axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
    _axis.plot(led_away[0], label="what the training sees: log p_T - log q_1", color="#D55E00")
    _axis.plot(led_away[1], label="KL(p_T || q_T)", color="#0072B2")
    _axis.set(xlabel="step", ylabel="nats per token", title="from the teacher itself, scored at 1")
    _axis.legend()
    _figure
    return


@app.cell
def _(MOST_STEPS, gradient_at_T, led_away, mo, np):
    _before, _after = led_away[0][0], float(np.mean(led_away[0][-5:]))
    _true = float(np.mean(led_away[1][-5:]))
    assert gradient_at_T < 1e-4 < 0.01 < led_away[2][0]
    if MOST_STEPS is None:
        assert _after < 0.8 * _before and led_away[1][0] < 1e-3 and _true > 0.2
    mo.md(f"""
    Scored at T the first gradient has the norm **{gradient_at_T:.0e}**, which is rounding; scored at 1,
    **{led_away[2][0]:.2f}**. Following that, the training's own curve falls from {_before:.2f} to {_after:.2f},
    and the student goes from no distance at all to **{_true:.2f}** nats per token from its teacher.
    """)
    return


@app.cell
def _(mo):
    mo.md("""
    ## Gone

    The same from a student that has something to learn, a teacher whose weights were blurred: at one temperature
    it gets there, and at two it arrives somewhere else.
    """)
    return


@app.cell
def _(STUDENT, T, distil, steps):
    biased = distil(STUDENT, scored_at=1.0, steps=steps(80))
    unbiased = distil(STUDENT, scored_at=T, steps=steps(80))
    return biased, unbiased


@app.cell
def _(T, biased, plt, unbiased):
    _figure, _axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
    _axis.plot(biased[1], label="trained on scores at 1", color="#D55E00")
    _axis.plot(unbiased[1], label=f"trained on scores at T = {T}", color="#0072B2")
    _axis.set(xlabel="step", ylabel="KL(p_T || q_T), nats per token", ylim=(0, None))
    _axis.legend()
    _figure
    return


@app.cell
def _(MOST_STEPS, biased, mo, np, unbiased):
    _two, _one = (float(np.mean(curve[1][-5:])) for curve in (biased, unbiased))
    if MOST_STEPS is None:
        assert _one < 0.7 * _two and _one < 0.5 * unbiased[1][0]
    mo.md(f"""
    At the end the student is **{_one:.2f}** nats per token from its teacher with one temperature, and
    **{_two:.2f}** with two.

    A run of `isotherm train` has one T, which travels with every token, and no party may use another: before the
    first step the engines, the teacher and the learner score the same tokens, and the run does not start unless
    they agree.
    """)
    return


if __name__ == "__main__":
    from as_script import run_as_script

    run_as_script(app, __file__)
