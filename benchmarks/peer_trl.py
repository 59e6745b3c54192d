"""The peer of `make bench`: TRL's DistillationTrainer on a given pair, timed step by step.

Runs in its own virtualenv, `.venv-peer` (peer-requirements.txt says how to make it): nothing here
imports isotherm. The objective is the one isotherm trains: full-vocabulary KL(p_T || q_T) on the
student's own samples, one T for the sampling and for both sides of the loss, no truncation. TRL
1.16 generates one completion per row and is always on-policy (it has no `lmbda`), so a group of G
is a prompt repeated G times. `--steps` counts measured steps; `--warmup-steps` run before them.

    .venv-peer/bin/python benchmarks/peer_trl.py --student DIR --teacher DIR --prompts FILE.jsonl \
        --steps 20 --out FILE.json

`--set name=value` overrides a field of `DistillationConfig`, to try another TRL configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # both models are directories: never ask the hub

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer

STAGES = (
    "generation",  # sampling the completions
    "student_forward",  # backbone only, with activations kept
    "teacher_forward",  # backbone only, no gradient
    "divergence",  # both vocabulary projections, softmax at T, KL
    "backward",  # through the divergence and the student
    "optimizer",  # AdamW's step
)


def machine_cpu_seconds() -> float | None:
    """CPU seconds used by all processes of this machine; None if not on Linux."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _iowait, irq, softirq = map(int, stat.read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class StepClock(TrainerCallback):
    """Wall time, stage times and trained tokens of each optimizer step.

    A step lasts from the end of the previous step to its own end, so it includes all work of TRL
    between steps (data, logging).
    """

    def __init__(self, save: str | None, save_every: int) -> None:
        self._save, self._save_every = save, save_every
        self.seconds: list[float] = []
        self.ends: list[float] = []  # time of day
        self.cpu_seconds: list[float] = []  # of all our threads
        self.others_cpu_seconds: list[float | None] = []  # a busy machine shows here
        self.tokens: list[int] = []
        self.stages: list[dict[str, float]] = []
        self.reverse_kl: list[float] = []
        self._open_step()

    def _open_step(self) -> None:
        self._start = time.perf_counter()
        self._cpu_start = time.process_time()
        self._machine_start = machine_cpu_seconds()
        self._tokens = 0
        self._stages: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time inside the context to a stage of the current step."""
        start = time.perf_counter()
        yield
        self._stages[name] += time.perf_counter() - start

    def add_tokens(self, count: int) -> None:
        self._tokens += count

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._open_step()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._optimizer_start = time.perf_counter()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._stages["optimizer"] += time.perf_counter() - self._optimizer_start

    def on_step_end(
        self, _args: Any, state: Any, *_: Any, model: Any, processing_class: Any, **__: Any
    ) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        self.ends.append(time.time())
        own, machine = time.process_time() - self._cpu_start, machine_cpu_seconds()
        self.cpu_seconds.append(own)
        self.others_cpu_seconds.append(
            None
            if machine is None or self._machine_start is None
            else max(0.0, machine - self._machine_start - own)
        )
        self.tokens.append(self._tokens)
        self.stages.append(dict(self._stages))
        if self._save and self._save_every and state.global_step % self._save_every == 0:
            for part in (model, processing_class):
                part.save_pretrained(f"{self._save}/step-{state.global_step:06d}")
        self._open_step()

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self.reverse_kl.append(float(logs["loss"]))


class TimedTrainer(DistillationTrainer):
    """DistillationTrainer with timed stages; its computation is unchanged."""

    clock: StepClock

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.stage("generation"):
            return super()._generate_single_turn(*args, **kwargs)

    def _get_last_hidden_state(self, unwrapped_model: Any, *args: Any, **kwargs: Any) -> Any:
        teacher = self.accelerator.unwrap_model(self.teacher_model)
        name = "teacher_forward" if unwrapped_model is teacher else "student_forward"
        with self.clock.stage(name):
            return super()._get_last_hidden_state(unwrapped_model, *args, **kwargs)

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.stage("loss"):  # its two forwards are taken out again in `summarize`
            loss, entropy, valid_tokens = super()._compute_loss(*args, **kwargs)
        self.clock.add_tokens(int(valid_tokens))
        return loss, entropy, valid_tokens


def build_trainer(args: argparse.Namespace, output_dir: str) -> tuple[TimedTrainer, StepClock]:
    """The fastest TRL configuration found for small models on a CPU."""
    rows = args.prompts_per_step * args.group_size
    micro_batches = 2 if rows % 2 == 0 else 1  # less CPU a token than one batch of 32
    steps = args.steps + args.warmup_steps
    settings: dict[str, Any] = {
        "output_dir": output_dir,
        "max_steps": steps,
        "per_device_train_batch_size": rows // micro_batches,
        "gradient_accumulation_steps": micro_batches,  # completions are still sampled all at once
        "learning_rate": args.lr,
        "lr_scheduler_type": "constant",
        "max_completion_length": args.max_new_tokens,
        "temperature": args.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 1.0,  # reverse KL, KL(student || teacher)
        "disable_dropout": True,
        "gradient_checkpointing": False,  # TRL's default recomputes the forward to save memory
        "shuffle_dataset": False,  # rows are laid out in groups below
        "use_cpu": True,
        "bf16": False,
        "seed": args.seed,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    settings.update(args.set)
    clock = StepClock(args.save, args.save_every)
    trainer = TimedTrainer(
        model=args.student,
        teacher_model=args.teacher,
        args=DistillationConfig(**settings),
        train_dataset=grouped_prompts(args.prompts, steps, args.prompts_per_step, args.group_size),
        processing_class=AutoTokenizer.from_pretrained(args.student, padding_side="left"),
        callbacks=[clock],
    )
    trainer.clock = clock
    trainer.remove_callback(transformers.PrinterCallback)
    for name, model in (("student", trainer.model), ("teacher", trainer.teacher_model)):
        assert next(model.parameters()).dtype == torch.float32, f"{name} is not fp32"
    untimed_backward = trainer.accelerator.backward

    def timed_backward(*args: Any, **kwargs: Any) -> None:
        with clock.stage("backward"):
            untimed_backward(*args, **kwargs)

    trainer.accelerator.backward = timed_backward
    return trainer, clock


def grouped_prompts(path: str, steps: int, prompts_per_step: int, group_size: int) -> Dataset:
    """Prompts of every step in file order, cyclic, each repeated G times.

    Raises:
        ValueError: the file has no prompts.
    """
    with open(path, encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    wanted = [prompts[i % len(prompts)] for i in range(steps * prompts_per_step)]
    return Dataset.from_dict({"prompt": [p for p in wanted for _ in range(group_size)]})


def summarize(clock: StepClock, trainer: TimedTrainer, args: argparse.Namespace) -> dict[str, Any]:
    """Summary of the measured steps, without warm-up steps."""
    seconds, tokens = clock.seconds[args.warmup_steps :], clock.tokens[args.warmup_steps :]
    stages = [split_stages(s, t) for s, t in zip(clock.stages, clock.seconds, strict=True)]
    measured = stages[args.warmup_steps :]
    mean_stages = {name: statistics.fmean(s[name] for s in measured) for name in measured[0]}
    config = trainer.args
    return {
        "peer": "trl.DistillationTrainer",
        "versions": {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "torch_threads": torch.get_num_threads(),
        "arguments": vars(args),
        "config": {
            name: getattr(config, name)
            for name in (
                "per_device_train_batch_size",
                "gradient_accumulation_steps",
                "gradient_checkpointing",
                "cache_implementation",
                "temperature",
                "top_p",
                "top_k",
                "beta",
                "bf16",
                "torch_compile",
                "max_grad_norm",
                "weight_decay",
            )
        }
        | {"optim": str(config.optim)},
        "step_seconds": seconds,
        "step_ends": clock.ends[args.warmup_steps :],
        "cpu_seconds_per_step": clock.cpu_seconds[args.warmup_steps :],
        "others_cpu_seconds_per_step": clock.others_cpu_seconds[args.warmup_steps :],
        "trained_tokens_per_step": tokens,
        "mean_seconds_per_step": statistics.fmean(seconds),
        "median_seconds_per_step": statistics.median(seconds),
        "trained_tokens_per_s": sum(tokens) / sum(seconds),
        "stage_seconds_per_step": mean_stages,
        "stage_share": {k: v / sum(mean_stages.values()) for k, v in mean_stages.items()},
        "reverse_kl_per_step": clock.reverse_kl[args.warmup_steps :],
    }


def split_stages(spans: dict[str, float], total: float) -> dict[str, float]:
    """Spans of one step, made disjoint; time that no span covers is `other`."""
    spans = dict(spans)
    spans["divergence"] = spans.pop("loss") - spans["student_forward"] - spans["teacher_forward"]
    split = {name: spans[name] for name in STAGES}
    return split | {"other": total - sum(split.values())}


def setting(text: str) -> tuple[str, Any]:
    """Parse `name=value`; the value is read as JSON if it is JSON, else as a string."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time TRL's DistillationTrainer on a pair.")
    parser.add_argument("--student", required=True, help="checkpoint directory, with tokenizer")
    parser.add_argument("--teacher", required=True, help="checkpoint directory, same vocabulary")
    parser.add_argument("--prompts", required=True, help="JSONL with a `prompt` field")
    parser.add_argument("--steps", type=int, required=True, help="measured steps")
    parser.add_argument("--warmup-steps", type=int, default=1, help="before the measured ones")
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0: torch's default")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--save", help="directory for the trained student")
    parser.add_argument("--save-every", type=int, default=0, help="steps, to save in --save, too")
    parser.add_argument("--out", required=True, help="where to write the JSON")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    args.set = dict(args.set)
    return args


def main() -> None:
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="peer-trl-") as output_dir:
        trainer, clock = build_trainer(args, output_dir)
        trainer.train()
        if args.save:
            trainer.save_model(args.save)
    result = summarize(clock, trainer, args)
    Path(args.out).write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")
    print(
        f"trl {trl.__version__}: {result['mean_seconds_per_step']:.2f} s a step, "
        f"{result['trained_tokens_per_s']:.0f} trained tokens/s; "
        + ", ".join(f"{name} {share:.0%}" for name, share in result["stage_share"].items())
    )


if __name__ == "__main__":
    main()
