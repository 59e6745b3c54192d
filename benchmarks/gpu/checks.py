"""The checks by name, in the order in which they run, with their questions, criteria and limits.

This module imports no check, so a machine without Ray or SGLang runs those that need neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from benchmarks.gpu.setting import Numbers, Setting, Skipped

# Longest that the first SGLang server of a machine may take: it compiles kernels.
COLD_START_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question about a machine.

    Attributes:
        part: name of a set of checks that fits into one command of ten minutes. Its module is
            `benchmarks.gpu.PART_checks`; the check is the function of its name there.
        passes: criterion; empty: the check reports numbers only.
        deadline_s: longest duration at full size, including the starts of servers.
        needs: packages without which it is skipped.
        shares: True if it runs in one process with the part's other checks that have this set.
        cuda: True if it is skipped on a CPU.
    """

    part: str
    question: str
    passes: str = ""
    deadline_s: float = 120.0
    needs: tuple[str, ...] = ()
    shares: bool = False
    cuda: bool = False

    def run(self, name: str, setting: Setting) -> Numbers:
        """Run the check; returns numbers for the report.

        Raises:
            Skipped: the check cannot run here.
            Failed: the check ran, and its criterion is not met.
        """
        for package in self.needs:
            if find_spec(package) is None:
                raise Skipped(f"{package} is not installed")
        if self.cuda and not setting.cuda:
            raise Skipped("needs a GPU")
        found: Callable[[Setting], Numbers] = getattr(
            import_module(f"benchmarks.gpu.{self.part}_checks"), name
        )
        return found(setting)


_SGLANG = ("sglang",)
_RAY_AND_SGLANG = ("ray", "sglang")

CHECKS = {
    "gradient_truth": Check(
        part="learner",
        question="is every estimator's mean gradient the exact one, by enumeration?",
        passes="to 1e-4 of its norm",
    ),
    "full_divergence": Check(
        part="learner",
        question="is estimator=full the reverse KL that plain calls of both models give?",
        passes="to 1e-3",
    ),
    "utilisation": Check(
        part="learner",
        question="what share of a large matrix product's FLOPs does a step of 1.1 B reach?",
        passes="0.15",
        deadline_s=240.0,  # the model is made first
    ),
    "bfloat16_step": Check(
        part="learner",
        question="are log-probs and gradient norm in bfloat16 those of float32?",
        passes="within the handshake's tolerance; the norm within a quarter",
        deadline_s=180.0,
    ),
    "long_attention": Check(
        part="learner",
        question="8192 tokens: are log-probs transformers' own? How does a step's memory grow?",
        passes="by the handshake's tolerance; less than threefold for twice the length",
    ),
    "sharded_step": Check(
        part="sharding",
        question="FSDP at 8B's width (12 layers): seconds, MFU, memory at rows of 4k and 16k?",
        passes="at 16k no more above the weights than 1.15 of the plan",
        deadline_s=180.0,
    ),
    "profile": Check(
        part="sharding",
        question="which attention kernel runs, and where does a sharded step's time go?",
        deadline_s=150.0,
    ),
    "mixture_step": Check(
        part="sharding",
        question="a mixture at 30B-A3B's width (4 layers): seconds and kernels, alone and sharded?",
        deadline_s=180.0,
    ),
    "weight_group": Check(
        part="sharding",
        question="does the weight group's broadcast work over NCCL (a world of one)? Seconds?",
        passes="every bucket is sent",
    ),
    "compiled_step": Check(
        part="compiling",
        question="the sharded step with compiled layers: what does compiling gain?",
        passes="at 16k no more above the weights than 1.15 of the plan",
        deadline_s=400.0,
        cuda=True,
    ),
    "packed_attention": Check(
        part="attention",
        question="packed rows by flex attention: are loss and gradient those of padded rows?",
        passes="in float32, to 1e-3",
        deadline_s=240.0,  # flex compiles
    ),
    "attention_precisions": Check(
        part="attention",
        question="what do float32 keys and values, repeated for each query head, cost?",
    ),
    "planned_memory": Check(
        part="memory",
        question="is the peak of a step what the plan says, at three sizes?",
        passes="a pass between 0.3 and 1.15 of it",
        deadline_s=420.0,
    ),
    "embedded_run": Check(
        part="local",
        question="20 steps of recipe=opd, local and embedded: what does each stage reach?",
        passes="exit code 0, 20 steps, and the audit says exactly once",
        deadline_s=560.0,
    ),
    "plugin_cost": Check(
        part="pieces",
        question="what do the plugin's temperatures add to 2,048 rows of 151,936 logits?",
    ),
    "digest_cost": Check(
        part="pieces",
        question="seconds of a digest for each GiB; is it SGLang's?",
        passes="equal, where SGLang is installed",
    ),
    "top_k_decode": Check(
        part="pieces",
        question="what do 33 log-probs of each of 256 rows add to a decode step?",
        passes="the plugin lists the numbers of plain calls",
    ),
    "grouped_products": Check(
        part="pieces",
        question="a mixture's products in bfloat16 and float32: ms? What does autocast choose?",
    ),
    "handles": Check(
        part="pieces",
        question="does another process read a bucket by CUDA IPC, and is it given back?",
        passes="the same sum; nothing held after take_back",
        cuda=True,
    ),
    "server_start": Check(
        part="engine",
        question="does an SGLang server start? Seconds, kernels compiled",
        passes="it answers",
        deadline_s=COLD_START_S,
        needs=_SGLANG,
        shares=True,
    ),
    "handshake": Check(
        part="engine",
        question="do decode, prefill, teacher and learner agree at T?",
        passes="the handshake's own verdict",
        deadline_s=180.0,
        needs=_SGLANG,
        shares=True,
    ),
    "mixed_temperatures": Check(
        part="engine",
        question="are rows at four temperatures in one batch log-softmax of z / T?",
        passes="within the handshake's tolerance",
        needs=_SGLANG,
        shares=True,
    ),
    "captured_graphs": Check(
        part="engine",
        question="do decode and prefill agree with CUDA graphs and without? What are they worth?",
        passes="within the handshake's tolerance",
        deadline_s=420.0,
        needs=_SGLANG,
        shares=True,
        cuda=True,
    ),
    "push_copy": Check(
        part="push",
        question="weights of 1.1 B without CUDA IPC: seconds beside a memcpy?",
        passes="the probe agrees; nothing more is held after the third push",
        deadline_s=420.0,
    ),
    "push_ipc": Check(
        part="push",
        question="the same by CUDA IPC, bucket by bucket?",
        passes="the probe agrees; nothing more is held after the third push",
        deadline_s=420.0,
        needs=_SGLANG,
        cuda=True,
    ),
    "sleep_and_wake": Check(
        part="sleep",
        question="what does an engine keep of the GPU asleep, and is it as before once awake?",
        passes="within the handshake's tolerance; more than 1 GiB is released",
        deadline_s=420.0,
        needs=_SGLANG,
    ),
    "sleep_with_graphs": Check(
        part="sleep",
        question="what does it keep where captured graphs are not released?",
        deadline_s=420.0,
        needs=_SGLANG,
        cuda=True,
    ),
    "engines_by_turns": Check(
        part="turns",
        question="two servers on one GPU, one of them awake: are they as before after each sleep?",
        passes="log-probs within an eighth of the handshake's tolerance, after each of five sleeps",
        deadline_s=560.0,
        needs=_SGLANG,
    ),
    "served_run": Check(
        part="run",
        question="20 steps of recipe=opd on Ray and SGLang, one GPU: what does each stage reach?",
        passes="exit code 0, 20 steps, and the audit says exactly once",
        deadline_s=560.0,
        needs=_RAY_AND_SGLANG,
    ),
    "states_run": Check(
        part="run",
        question="the same with a served teacher's whole distributions, by hidden states?",
        passes="the same, 5 steps",
        deadline_s=400.0,
        needs=_RAY_AND_SGLANG,
    ),
    "adapter_run": Check(
        part="run",
        question="the same with an adapter that is pushed alone?",
        passes="the same, 5 steps",
        deadline_s=400.0,
        needs=_RAY_AND_SGLANG,
    ),
    "sleeping_run": Check(
        part="run",
        question="the same with a policy engine that sleeps while the learner computes?",
        passes="the same, 5 steps",
        deadline_s=400.0,
        needs=_RAY_AND_SGLANG,
    ),
    "turns_run": Check(
        part="run",
        question="the same where learner, policy and teacher take turns?",
        passes="the same, 5 steps",
        deadline_s=400.0,
        needs=_RAY_AND_SGLANG,
    ),
}
PARTS = tuple(dict.fromkeys(check.part for check in CHECKS.values()))
