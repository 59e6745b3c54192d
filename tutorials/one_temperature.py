import marimo

app = marimo.App(width="medium")


@app.cell
def _():
    import marimo as mo

    mo.md("""
    # One temperature

    A student samples at a temperature T, and a teacher scores the samples. If the teacher scores at another
    temperature, for example at 1 because its server returns those log-probs, then the mean difference of the
    log-probs is not KL(p_T || q_T), and a student that is trained on it does not converge to the teacher. This
    notebook shows the bias, measures its effect, and removes it.

    The models are tiny and random. Any two distributions over tokens would do.

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

    def make_model(name, noise_share=0.0):
        """Save a random model whose distributions are neither uniform nor certain.

        `noise_share` adds noise to each weight matrix, as a share of its standard deviation.
        """
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
            size = noise_share * weight.data.std() * (weight.ndim > 1)
            weight.data += size * torch.randn(weight.shape, generator=noise)
        model.model.norm.weight.data.mul_(8)
        model.save_pretrained(directory)
        return str(directory)

    TEACHER, STUDENT = make_model("teacher"), make_model("student", noise_share=0.5)
    return MOST_STEPS, PROMPTS, STUDENT, T, TEACHER, isotherm, np, plt, steps


@app.cell
def _(mo):
    mo.md("""
    ## The bias

    First, the student is an exact copy of the teacher. There is nothing to learn: log p_T = log q_T for every
    token. The student samples at T = 0.5. The teacher scores each token, once at T and once at 1.
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
        xlabel="student: log p_T",
        ylabel="teacher's log-prob",
        title="the student is a copy of the teacher",
    )
    _axis.legend()
    _figure
    return


@app.cell
def _(log_p, log_q, log_q1, mo):
    assert abs(log_p - log_q).max() < 1e-3
    _bias = (log_p - log_q1).mean()
    mo.md(f"""
    Scored at T, the points lie on the diagonal, and the sampled KL(p_T || q_T) is
    **{abs((log_p - log_q).mean()):.4f}** nats per token. Scored at 1 they do not, and the same mean is **{_bias:.2f}**,
    although the two models are the same. The metric `opd/bias` of a run is this difference.
    """)
    return


@app.cell
def _(mo):
    mo.md("""
    ## Training on biased scores

    The advantage of a token is the teacher's log-prob minus the student's. For a student that equals its teacher,
    the gradient should be zero.
    """)
    return


@app.cell
def _(T, isotherm, np, sample, teacher):
    def distil(student, scored_at, steps):
        """Train; return three curves: the mean of log p_T - score, KL(p_T || q_T), gradient norms."""
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
    from_teacher = distil(TEACHER, scored_at=1.0, steps=steps(40))
    [gradient_at_T] = distil(TEACHER, scored_at=T, steps=1)[2]
    return from_teacher, gradient_at_T


@app.cell
def _(from_teacher, plt):
    _figure, _axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
    _axis.plot(from_teacher[0], label="as trained: mean of log p_T - log q_1", color="#D55E00")
    _axis.plot(from_teacher[1], label="KL(p_T || q_T)", color="#0072B2")
    _axis.set(
        xlabel="step",
        ylabel="nats per token",
        title="a copy of the teacher, trained on scores at 1",
    )
    _axis.legend()
    _figure
    return


@app.cell
def _(MOST_STEPS, from_teacher, gradient_at_T, mo, np):
    _before, _after = from_teacher[0][0], float(np.mean(from_teacher[0][-5:]))
    _true = float(np.mean(from_teacher[1][-5:]))
    assert gradient_at_T < 1e-4 < 0.01 < from_teacher[2][0]
    if MOST_STEPS is None:
        assert _after < 0.8 * _before and from_teacher[1][0] < 1e-3 and _true > 0.2
    mo.md(f"""
    With scores at T, the norm of the first gradient is **{gradient_at_T:.0e}**, which is rounding error. With scores
    at 1 it is **{from_teacher[2][0]:.2f}**. As training goes on, the biased mean falls from {_before:.2f} to
    {_after:.2f}, while the true KL(p_T || q_T) rises from zero to **{_true:.2f}** nats per token.
    """)
    return


@app.cell
def _(mo):
    mo.md("""
    ## Without the bias

    Now the student is the teacher with noise added to its weights. It is trained twice: on scores at 1, and on
    scores at T.
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
    At the end, KL(p_T || q_T) is **{_one:.2f}** nats per token with scores at T, and **{_two:.2f}** with scores at 1.

    A run of `isotherm train` has one T, which is stored with the samples. Before the first step, the
    engines, the teacher and the learner score the same tokens, and the run does not start unless they agree.
    """)
    return


if __name__ == "__main__":
    from as_script import run_as_script

    run_as_script(app, __file__)
