"""Check of a whole run on Ray."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean, median

from benchmarks.gpu.commands import trained
from benchmarks.gpu.setting import TEMPERATURE, Numbers, Setting
from tests.tiny import make_tiny_pair

_DEADLINE_S = 500.0


def run_of_20(setting: Setting) -> Numbers:
    """recipe=opd on Ray: 20 steps, every group trained once by the audit of its journal."""
    root, out = Path(setting.scratch) / "pair", Path(setting.scratch) / "run"
    root.mkdir(exist_ok=True)
    shutil.rmtree(out, ignore_errors=True)
    pair = make_tiny_pair(root)
    shares = {"gpus_per_actor": 0.3} if setting.cuda else {}
    steps = trained(
        _DEADLINE_S, out, 20, student=pair.student, teacher=pair.teacher, prompts=pair.prompts,
        temperature=TEMPERATURE, prompts_per_step=4, group_size=4, max_new_tokens=8, lr=1e-3,
        eval_size=0, device=setting.device, **shares,
    )  # fmt: skip
    return {
        "tokens_per_s": median(step["tokens_per_s"] for step in steps[2:]),
        "logprob_gap": fmean(step["train/logprob_gap"] for step in steps),
        "kl_first": steps[0]["opd/reverse_kl"],
        "kl_last": steps[-1]["opd/reverse_kl"],
    }
