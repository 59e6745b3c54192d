import marimo

app = marimo.App(width="medium")


@app.cell
def _():
    import marimo as mo

    mo.md("""
    # What the settings of RL do

    Group size, advantages, the KL penalty, the discount and substeps: each is changed alone, in the same small
    run. The task is the successor of a digit ("3+1=" and one digit), which the student gets right about two times
    in five.

    With `-- --steps 2` after the file's name, each run lasts two steps, and assertions that need more steps are
    left out.
    """)
    return (mo,)


@app.cell
def _():
    import json
    import tempfile
    from pathlib import Path

    import matplotlib.pyplot as plt
    import numpy as np

    import isotherm
    from cluster.demos.arithmetic import Problems, train_tokenizer
    from distill.models.loading import new_qwen3

    SCRATCH = tempfile.TemporaryDirectory(prefix="isotherm-tutorial-")  # removed at the end
    ROOT = Path(SCRATCH.name)
    _rows = [{"prompt": f"{digit}+1=", "answer": str(digit + 1)} for digit in range(9)]
    (ROOT / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _rows))

    def fine_tune(name, right, seed):
        """Save a model that was fine-tuned on answers of which a share is right."""
        untrained = ROOT / f"{name}-untrained"
        ids = train_tokenizer(untrained, Problems.split(held_out=9, seed=0).held_out).get_vocab()
        new_qwen3(
            vocab_size=len(ids),
            hidden_size=64,
            layers=1,
            heads=2,
            context_length=64,
            eos_token_id=ids["<eos>"],
            pad_token_id=ids["<pad>"],
            seed=seed,
        ).save_pretrained(untrained)
        random = np.random.default_rng(seed)

        def demonstration():
            digit = int(random.integers(0, 9))
            answer = digit + 1 if random.random() < right else int(random.integers(0, 10))
            return policy.supervised_row(f"{digit}+1=", str(answer))

        with isotherm.Policy(str(untrained), lr=3e-3, device="cpu") as policy:
            for _ in range(150):
                policy.forward_backward([demonstration() for _ in range(32)], loss="cross_entropy")
                policy.optim_step()
            return str(policy.export(ROOT / name))

    STUDENT, TEACHER = fine_tune("student", 0.4, seed=1), fine_tune("teacher", 0.95, seed=2)
    return ROOT, STUDENT, TEACHER, isotherm, np, plt


@app.cell
def _(ROOT, STUDENT, isotherm, mo, np, plt):
    MOST_STEPS = mo.cli_args().get("steps")

    def train(name, recipe="rl", **settings):
        """Train with these settings changed; return the curve of each metric, as an array."""
        run = {
            "student": STUDENT,
            "prompts": ROOT / "prompts.jsonl",
            "out": ROOT / name,
            "temperature": 1.0,
            "steps": 20 if MOST_STEPS is None else int(MOST_STEPS),
            "prompts_per_step": 9,
            "group_size": 8,
            "max_new_tokens": 3,
            "lr": 1.5e-3,
            "max_staleness": 0,
            "eval_size": 0,
            "engine": "embedded",
            "device": "cpu",
            "local": True,
            "quiet": True,
        }
        lines = list(isotherm.run(recipe, **run | settings))
        return {key: np.array([line.get(key, np.nan) for line in lines]) for key in lines[0]}

    def draw(curves, *metrics):
        figure, axes = plt.subplots(
            1, len(metrics), figsize=(4.6 * len(metrics), 3.4), layout="constrained", squeeze=False
        )
        for axis, metric in zip(axes[0], metrics, strict=True):
            for name, curve in curves.items():
                axis.plot(curve[metric], label=name)
            axis.set(xlabel="step", title=metric)
        axes[0][0].legend()
        return figure

    return MOST_STEPS, draw, train


@app.cell
def _(mo):
    mo.md("""
    ## Groups

    The advantage of a response is its reward minus the mean reward of its group. A group whose responses all have
    the same reward gives no gradient. `reward/constant_groups` is the share of such groups, which is larger for
    small groups. Below, a step has 72 samples, in groups of 2 and of 8.
    """)
    return


@app.cell
def _(draw, train):
    groups_of_8 = train("groups-of-8", group_size=8, prompts_per_step=9)
    groups_of_2 = train("groups-of-2", group_size=2, prompts_per_step=36)
    draw({"2": groups_of_2, "8": groups_of_8}, "reward/mean", "reward/constant_groups")
    return groups_of_2, groups_of_8


@app.cell
def _(groups_of_2, groups_of_8, mo):
    _wasted = [curve["reward/constant_groups"].mean() for curve in (groups_of_2, groups_of_8)]
    assert _wasted[0] > 1.5 * _wasted[1]
    mo.md(f"""
    On average, {_wasted[0]:.0%} of the groups of 2 were constant, and {_wasted[1]:.0%} of the groups of 8.

    ## Advantages

    `scale_by_std` divides the advantages of a group by their standard deviation: a group with one right answer in
    eight then weighs as much as one with four. `baseline=leave_one_out` subtracts the mean reward of the *other*
    responses, which multiplies every advantage by G / (G - 1) and does not change its sign.
    """)
    return


@app.cell
def _(draw, groups_of_8, train):
    scaled = train("scaled", scale_by_std=True)
    left_out = train("left-out", baseline="leave_one_out")
    advantages = {"mean": groups_of_8, "scale_by_std": scaled, "leave_one_out": left_out}
    draw(advantages, "reward/mean", "advantage/std", "train/grad_norm")
    return left_out, scaled


@app.cell
def _(groups_of_8, left_out, mo, scaled):
    # the first step, in which all three runs have the same samples
    _plain, _scaled, _left_out = (
        float(curve["advantage/max"][0]) for curve in (groups_of_8, scaled, left_out)
    )
    assert abs(_left_out / _plain - 8 / 7) < 1e-3 and _scaled > 1.5 * _plain
    mo.md(f"""
    In the first step all three runs have the same samples. The largest advantage is {_plain:.2f}; with
    `leave_one_out` it is 8 / 7 times as large, {_left_out:.2f}; divided by the standard deviation it is {_scaled:.2f}.

    ## The KL penalty

    `reference_kl_coef` penalises the KL from a reference model, here the initial student: the advantage of a token
    is lower where its log-prob is above the reference's. The policy changes less, and learns less.
    """)
    return


@app.cell
def _(STUDENT, draw, groups_of_8, train):
    penalised = train("penalised", reference_kl_coef=0.5, reference=STUDENT)
    draw({"0": groups_of_8, "0.5": penalised}, "reward/mean", "train/entropy")
    return (penalised,)


@app.cell
def _(MOST_STEPS, groups_of_8, mo, penalised):
    _free, _held = (float(c["reward/mean"][-3:].mean()) for c in (groups_of_8, penalised))
    if MOST_STEPS is None:
        assert _held < _free - 0.05
        assert penalised["train/entropy"][-1] > groups_of_8["train/entropy"][-1]
    mo.md(f"""
    The reward ends at {_free:.2f} without the penalty and at {_held:.2f} with it. With the penalty the policy keeps
    more of its entropy.

    ## The discount of the teacher's term

    In on-policy distillation the advantage of a token is log q_T - log p_T of that token. With
    `kl_discount_factor` = g it also contains g times the term of the next token, g^2 times that of the one after,
    and so on. It then includes what follows the token, and has more variance. A response here has two tokens (the
    digit and the EOS), so the difference is small.
    """)
    return


@app.cell
def _(TEACHER, draw, train):
    # estimator=sampled for both: estimator=full has no future terms
    by_tokens = {"teacher": TEACHER, "estimator": "sampled"}
    immediate = train("immediate", "opd", **by_tokens)
    discounted = train("discounted", "opd", **by_tokens, kl_discount_factor=0.9)
    draw({"0": immediate, "0.9": discounted}, "opd/reverse_kl", "advantage/std")
    return discounted, immediate


@app.cell
def _(MOST_STEPS, discounted, immediate, mo):
    _ends = [float(curve["opd/reverse_kl"][-3:].mean()) for curve in (immediate, discounted)]
    _starts = [float(curve["opd/reverse_kl"][0]) for curve in (immediate, discounted)]
    assert abs(_starts[0] - _starts[1]) < 1e-4
    assert discounted["advantage/std"][0] != immediate["advantage/std"][0]
    if MOST_STEPS is None:
        assert max(_ends) < 0.7 * _starts[0]
    mo.md(f"""
    The reverse KL falls from {_starts[0]:.2f} nats per token to {_ends[0]:.2f} without future terms, and to
    {_ends[1]:.2f} with them.

    ## Substeps

    `num_substeps` splits the groups of a step over that many optimizer updates. All but the first are off-policy,
    because the earlier updates have changed the weights since the groups were sampled. `train/ratio_max` is the
    largest ratio of a token's probability to the one at which it was sampled; with one update it is 1. More
    updates learn more from the same samples, until the ratios become too large; `loss=ppo` clips them.
    """)
    return


@app.cell
def _(draw, groups_of_8, train):
    substeps = train("substeps", num_substeps=3)
    draw({"1": groups_of_8, "3": substeps}, "reward/mean", "train/ratio_max")
    return (substeps,)


@app.cell
def _(groups_of_8, mo, substeps):
    _largest = [float(curve["train/ratio_max"].max()) for curve in (groups_of_8, substeps)]
    assert abs(_largest[0] - 1) < 1e-3 and _largest[1] > 1.02
    mo.md(f"""
    The largest ratio was {_largest[0]:.3f} with one update, and {_largest[1]:.2f} with three.

    `docs/objectives.md` says which of these settings to choose when.
    """)
    return


if __name__ == "__main__":
    from as_script import run_as_script

    run_as_script(app, __file__)
