import marimo

app = marimo.App(width="medium")


@app.cell
def _():
    import marimo as mo

    mo.md("""
    # Your own environment

    An environment is a class of a dozen lines. It gives the first messages, and after each turn of the policy a
    reward and further messages. In this one, the policy is asked for the successor of a digit. After a wrong answer
    it has a second try, for half the reward. A tiny model that is right about two times in five learns the task by
    RL.

    With `-- --steps 2` after the file's name, the run lasts two steps, and assertions that need more steps are
    left out.
    """)
    return (mo,)


@app.cell
def _():
    import sys
    import tempfile
    from pathlib import Path

    import matplotlib.pyplot as plt
    import numpy as np

    import isotherm

    SCRATCH = tempfile.TemporaryDirectory(prefix="isotherm-tutorial-")  # removed at the end
    ROOT = Path(SCRATCH.name)
    return ROOT, isotherm, np, plt, sys


@app.cell
def _(mo):
    mo.md("""
    ## The environment

    The environment is in a file of its own, `digits.py`, because the workers of a run import it by name:
    `env="digits:Digits"`. The directory in which a run is started, or that of the notebook, is on their import
    path. `Successor` is one episode. `Digits` has the settings (only inherited ones here) and makes the problems.
    """)
    return


@app.cell
def _(ROOT, mo, sys):
    CODE = """
from functools import partial

import chz

from distill.envs.chat import MessageEnv, MessageStep
from distill.envs.chat_config import ChatEnvConfig, MessageProblem


class Successor(MessageEnv):
    def __init__(self, digit):
        self.digit, self.tries = digit, 0

    def initial_messages(self):
        return [{"role": "user", "content": f"{self.digit}+1="}]

    async def step(self, message):
        self.tries += 1
        right = message["content"] == str(self.digit + 1)
        again = [] if right or self.tries == 2 else [{"role": "user", "content": "="}]
        return MessageStep(
            reward=right / self.tries, messages=again, metrics={"tries": self.tries}
        )


@chz.chz
class Digits(ChatEnvConfig):
    reads_prompts = judges = False

    def problems(self, path, setting):
        return [MessageProblem(make=partial(Successor, digit)) for digit in range(9)]
"""
    (ROOT / "digits.py").write_text(CODE)
    sys.path.insert(0, str(ROOT))
    mo.md(f"```python{CODE}```")
    return


@app.cell
def _(mo):
    mo.md("""
    ## A student that is often wrong

    A random model almost never writes one digit and stops, so it would get no reward to learn from. The student is
    therefore fine-tuned first, on answers of which about two in five are right. Its chat template ends the
    assistant's turns with the model's stop token, so that the second turn continues the tokens of the first.
    """)
    return


@app.cell
def _(ROOT, isotherm, np):
    from cluster.demos.arithmetic import Problems, train_tokenizer
    from distill.models.loading import new_qwen3

    _tokenizer = train_tokenizer(ROOT / "random", Problems.split(held_out=9, seed=0).held_out)
    _tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}"
        "{% endfor %}"
    )
    _tokenizer.save_pretrained(ROOT / "random")
    _ids = _tokenizer.get_vocab()
    new_qwen3(
        vocab_size=len(_ids),
        hidden_size=64,
        layers=1,
        heads=2,
        context_length=64,
        eos_token_id=_ids["<eos>"],
        pad_token_id=_ids["<pad>"],
        seed=1,
    ).save_pretrained(ROOT / "random")

    _random = np.random.default_rng(0)

    def demonstration(policy):
        digit = int(_random.integers(0, 9))
        answer = digit + 1 if _random.random() < 0.4 else int(_random.integers(0, 10))
        return policy.supervised_row(f"{digit}+1=", str(answer))

    with isotherm.Policy(str(ROOT / "random"), lr=3e-3, device="cpu") as _policy:
        for _ in range(150):
            _policy.forward_backward(
                [demonstration(_policy) for _ in range(32)], loss="cross_entropy"
            )
            _policy.optim_step()
        STUDENT = str(_policy.export(ROOT / "student"))
    return (STUDENT,)


@app.cell
def _(mo):
    mo.md("""
    ## The run

    The settings are those of the command line. `local=True` runs everything in this process; without it, the same
    call runs on Ray.
    """)
    return


@app.cell
def _(ROOT, STUDENT, isotherm, mo):
    MOST_STEPS = mo.cli_args().get("steps")
    lines = list(
        isotherm.run(
            "rl",
            student=STUDENT,
            env="digits:Digits",
            out=ROOT / "run",
            temperature=1.0,
            steps=60 if MOST_STEPS is None else int(MOST_STEPS),
            prompts_per_step=9,
            group_size=8,
            max_new_tokens=3,
            lr=1e-3,
            max_staleness=0,
            eval_size=0,
            engine="embedded",
            device="cpu",
            local=True,
            quiet=True,
        )
    )
    return MOST_STEPS, lines


@app.cell
def _(lines, plt):
    _figure, _axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for _axis, _name in zip(_axes, ("reward/mean", "env/tries"), strict=True):
        _axis.plot([line["step"] for line in lines], [line[_name] for line in lines])
        _axis.set(xlabel="step", title=_name)
    _figure
    return


@app.cell
def _(MOST_STEPS, ROOT, isotherm, lines, mo, np):
    with isotherm.Sampler(str(ROOT / "run" / "final"), device="cpu") as _sampler:
        _answers = {
            digit: _sampler.sample(
                [{"role": "user", "content": f"{digit}+1="}], temperature=0, max_new_tokens=3
            )[0].text
            for digit in range(9)
        }
    _right = sum(answer == str(digit + 1) for digit, answer in _answers.items())
    _before, _after = (
        float(np.mean([line["reward/mean"] for line in part])) for part in (lines[:5], lines[-5:])
    )
    assert all(1 <= line["env/tries"] <= 2 for line in lines)
    if MOST_STEPS is None:
        assert _after > _before + 0.1 and _right >= 6
    mo.md(f"""
    The mean reward rose from {_before:.2f} to {_after:.2f}. With greedy decoding, the model now answers {_right} of 9
    questions correctly: {", ".join(f"{digit}+1={answer}" for digit, answer in _answers.items())}.

    `docs/environments.md` describes the rest: tools, games of two, rewards of single tokens, comparison within a
    group, and environments without messages.
    """)
    return


if __name__ == "__main__":
    from as_script import run_as_script

    run_as_script(app, __file__)
